"""Parsing of command lines, and the rendering of `--help`.

If an option that takes one value is given several, the last value counts and a warning says so.
`--help` shows no `<bool>` beside a flag without a value, and no `<str>` beside an argument that has
a metavar. Brackets in help texts, such as the name of a spec's table, are escaped, since Rich would
read them as markup and omit them.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
import sys
from collections import Counter, UserDict
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

from surefoot.core import place
from surefoot.core.errors import SurefootError

SUBJECTS = ("SPEC", "RUN", "SPEC|RUN")  # metavars of what a verb is about


class Verb(TyperCommand):
    """A Typer command that warns of repeated options and escapes markup in its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:  # true while a shell completes a word
            _warn_of_repeated(self.make_parser(ctx).parse_args(list(given))[2], given)
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; in the hint of its error SPEC and RUN become what the user typed."""
        try:
            return super().invoke(ctx)
        except SurefootError as error:
            typed = [ctx.params[each.name] for each in self.params if each.metavar in SUBJECTS]
            if error.hint and typed and isinstance(typed[0], str | Path):
                error.hint = fill(error.hint, Path(typed[0]))
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        return [_without_type_label(each) for each in super().get_params(ctx)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _escape_markup(self, *self.get_params(ctx)):
            super().format_help(ctx, formatter)


class Verbs(TyperGroup):
    """A Typer group of verbs that escapes markup in its help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a verb, or name what was meant.

        The error for a verb of a subgroup names it in full (`checkpoint export`); a subgroup that
        is given something else, as a spec, names its commands.
        """
        if args[0] not in self.commands:
            inside = [
                f"{name} {args[0]}"
                for name, each in self.commands.items()
                if args[0] in getattr(each, "commands", ())
            ]
            if inside:
                ctx.fail(f"No such command {args[0]!r}. It is {' or '.join(inside)}.")
            # Typer suggests what is near
            if ctx.parent is not None and not get_close_matches(args[0], self.commands):
                ctx.fail(
                    f"No such command {args[0]!r}. "
                    f"{self.name} has the commands {', '.join(self.commands)}."
                )
        return super().resolve_command(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        return [_without_type_label(each) for each in super().get_params(ctx)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _escape_markup(self, *self.get_params(ctx), *self.commands.values()):
            super().format_help(ctx, formatter)


class LazyVerbs(UserDict[str, Any]):
    """Verbs by name, each built by its function when it is first asked for."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if isinstance(found, functools.partial):
            found = self.data[name] = found()
        return found


def fill(hint: str, subject: Path) -> str:
    """Return the hint with a spec or a run folder in place of SPEC and RUN in its commands.

    >>> fill("try surefoot train SPEC --steps 3", Path("my spec.toml"))
    "try surefoot train 'my spec.toml' --steps 3"
    """
    spec = subject / "spec.toml"
    typed = {"SPEC": spec, "RUN": subject} if spec.exists() else {"SPEC": subject}
    return re.sub(
        rf"\b(?:{'|'.join(typed)})\b", lambda found: shlex.quote(str(typed[found[0]])), hint
    )


def warn_of_values(name: str, values: Sequence[str]) -> None:
    """Warn on standard error that the last of several different values counts.

    Only the first process of a command prints the warning; its ranks do not.
    """
    if len(set(values)) > 1 and place.flight_file() is None and not place.here().rank:
        told = ", ".join(value if value.isprintable() else ascii(value) for value in values)
        print(
            f"warning: {name} is given {len(values)} times ({told}): the last value is used",
            file=sys.stderr,
            flush=True,
        )


def _warn_of_repeated(order: Sequence[Any], args: Sequence[str]) -> None:
    """Warn of each single-value option to which `args` gives different values.

    `order` lists the parameters in the order in which they were given.
    """
    for parameter, times in Counter(order).items():
        if times > 1 and parameter.param_type_name == "option" and not parameter.multiple:
            warn_of_values(max(parameter.opts, key=len), _find_values(parameter, args))


def _find_values(parameter: Any, args: Sequence[str]) -> list[str]:
    """Return the values that `args` gives to an option; for a switch, its names."""
    names, found = (*parameter.opts, *parameter.secondary_opts), []
    for index, word in enumerate(args):
        name, equals, value = word.partition("=")
        if word == "--":
            break
        if name in names:
            found.append(name if parameter.is_flag else value if equals else args[index + 1])
    return found


def _without_type_label(parameter: Any) -> Any:
    """Return the parameter without the type label that Typer would show."""
    if getattr(parameter, "is_flag", False) and parameter.metavar is None:
        parameter.metavar = ""
    if parameter.param_type_name == "argument" and parameter.metavar is not None:
        parameter.display_type_rich = _no_type
    return parameter


@contextlib.contextmanager
def _escape_markup(*described: Any) -> Iterator[None]:
    """Escape markup in the help texts of commands and parameters for as long as they are shown."""
    from rich.markup import escape

    texts = [
        (each, name, text)
        for each in described
        for name in ("help", "short_help", "epilog")
        if (text := getattr(each, name, None))
    ]
    for each, name, text in texts:
        setattr(each, name, escape(_join_lines(text)))
    try:
        yield
    finally:
        for each, name, text in texts:
            setattr(each, name, text)


def _join_lines(text: str) -> str:
    """Return the text with one line for each paragraph, and for each flag that a line explains.

    Docstrings are broken at the width of the source; Rich breaks lines at that of the terminal.

    >>> _join_lines("Measure.\\n\\nIn fresh\\nprocesses.\\n--fit: the\\nlargest.")
    'Measure.\\n\\nIn fresh processes.\\n--fit: the largest.'
    """
    return re.sub(r"(?<!\n)\n(?!\n|(?<=\.\n)--)", " ", text)


def _no_type(ctx: Any) -> None:
    return None
