"""Tables that the subcommands of `surefoot.cli.prove` print, with verdicts."""
