import typer

app = typer.Typer()


@app.command()
def show() -> None:
    "x"
