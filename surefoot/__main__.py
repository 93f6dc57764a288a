"""Entry point of `python -m surefoot`."""

from surefoot.cli.entry import main

if __name__ == "__main__":
    main()
