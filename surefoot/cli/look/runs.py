def runs() -> None:
    "x"
