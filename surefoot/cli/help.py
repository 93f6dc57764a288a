"""How `--help` reads: no `<bool>` beside a flag that takes no value, no `<str>` beside an argument that has its own word."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class Verb(TyperCommand):
    """A verb."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_plain(each) for each in super().get_params(ctx)]


class Verbs(TyperGroup):
    """A group of verbs."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_plain(each) for each in super().get_params(ctx)]


def _plain(parameter: Any) -> Any:
    """The parameter without the type that typer would show."""
    if getattr(parameter, "is_flag", False) and parameter.metavar is None:
        parameter.metavar = ""
    if parameter.param_type_name == "argument" and parameter.metavar is not None:
        parameter.display_type_rich = _no_type
    return parameter


def _no_type(ctx: Any) -> None:
    return None
