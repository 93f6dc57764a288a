"""How `--help` reads: no `<bool>` beside a flag that takes no value, no `<str>` beside an argument that has its own word.

What stands in brackets, as the name of a spec's table, is text and no markup, which would leave it out.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class Verb(TyperCommand):
    """A verb."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_plain(each) for each in super().get_params(ctx)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _escape(self, *self.get_params(ctx))
        super().format_help(ctx, formatter)


class Verbs(TyperGroup):
    """A group of verbs."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_plain(each) for each in super().get_params(ctx)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _escape(self, *self.get_params(ctx), *self.commands.values())
        super().format_help(ctx, formatter)


def _plain(parameter: Any) -> Any:
    """The parameter without the type that typer would show."""
    if getattr(parameter, "is_flag", False) and parameter.metavar is None:
        parameter.metavar = ""
    if parameter.param_type_name == "argument" and parameter.metavar is not None:
        parameter.display_type_rich = _no_type
    return parameter


def _escape(*described: Any) -> None:
    """Escape the markup in the texts of commands and parameters, which are made anew for each command line."""
    from rich.markup import escape

    for each in described:
        for name in ("help", "short_help", "epilog"):
            if text := getattr(each, name, None):
                setattr(each, name, escape(text))


def _no_type(ctx: Any) -> None:
    return None
