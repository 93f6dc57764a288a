def show() -> None:
    "x"
