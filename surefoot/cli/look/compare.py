def compare() -> None:
    "x"
