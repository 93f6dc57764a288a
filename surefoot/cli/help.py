"""Parsing of command lines, and the rendering of `--help`.

If a single-value option is given several times, the last value is used and a warning is printed.
`--help` shows no `<bool>` beside a flag without a value, and no `<str>` beside an argument that has
a metavar. Brackets in help texts, such as the name of a spec's table, are escaped, because Rich
would read them as markup and omit them.
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
    """Typer command that warns about repeated options and escapes Rich markup in its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:  # true while a shell completes a word
            _warn_of_repeated(self.make_parser(ctx).parse_args(list(given))[2], given)
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; in the hint of an error, replace SPEC and RUN by what the user typed."""
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
    """Typer group of commands that escapes Rich markup in its help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that `args[0]` names; if there is none, exit with a helpful error.

        For a command of a subgroup, the error gives its full name, such as `checkpoint export`. In
        a subgroup, if no name is similar, the error lists the commands of the subgroup.
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
    """Mapping from names to commands, which are built on first access.

    An unbuilt command is stored as a `functools.partial` that builds it.
    """

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if isinstance(found, functools.partial):
            found = self.data[name] = found()
        return found


def fill(hint: str, subject: Path) -> str:
    """Return the hint with SPEC and RUN replaced by the path `subject`, quoted for the shell.

    If `subject` is a run folder, RUN becomes the folder and SPEC its spec.toml. Otherwise SPEC
    becomes `subject`.

    >>> fill("try surefoot train SPEC --steps 3", Path("my spec.toml"))
    "try surefoot train 'my spec.toml' --steps 3"
    """
    spec = subject / "spec.toml"
    typed = {"SPEC": spec, "RUN": subject} if spec.exists() else {"SPEC": subject}
    return re.sub(
        rf"\b(?:{'|'.join(typed)})\b", lambda found: shlex.quote(str(typed[found[0]])), hint
    )


def warn_of_values(name: str, values: Sequence[str]) -> None:
    """Warn on standard error if an option has several different values: the last one is used.

    Ranks that surefoot launched, and ranks other than 0, print nothing.
    """
    if len(set(values)) > 1 and place.flight_file() is None and not place.here().rank:
        told = ", ".join(value if value.isprintable() else ascii(value) for value in values)
        print(
            f"warning: {name} is given {len(values)} times ({told}): the last value is used",
            file=sys.stderr,
            flush=True,
        )


def _warn_of_repeated(order: Sequence[Any], args: Sequence[str]) -> None:
    """Warn about each single-value option that `args` sets to several different values.

    `order` lists the parsed parameters, with one entry per occurrence in `args`.
    """
    for parameter, times in Counter(order).items():
        if times > 1 and parameter.param_type_name == "option" and not parameter.multiple:
            warn_of_values(max(parameter.opts, key=len), _find_values(parameter, args))


def _find_values(parameter: Any, args: Sequence[str]) -> list[str]:
    """Return every value of an option in `args`; for a flag, its spelling at each occurrence."""
    names, found = (*parameter.opts, *parameter.secondary_opts), []
    for index, word in enumerate(args):
        name, equals, value = word.partition("=")
        if word == "--":
            break
        if name in names:
            found.append(name if parameter.is_flag else value if equals else args[index + 1])
    return found


def _without_type_label(parameter: Any) -> Any:
    """Remove the type label that `--help` would show for a parameter; return the parameter."""
    if getattr(parameter, "is_flag", False) and parameter.metavar is None:
        parameter.metavar = ""
    if parameter.param_type_name == "argument" and parameter.metavar is not None:
        parameter.display_type_rich = _no_type
    return parameter


@contextlib.contextmanager
def _escape_markup(*described: Any) -> Iterator[None]:
    """Escape Rich markup in the help texts of commands and parameters, inside the context."""
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
    """Return the text with each paragraph on one line; a line that starts with `--` stays separate.

    Rich then wraps the text at the width of the terminal, not at that of the source code.

    >>> _join_lines("Measure.\\n\\nIn fresh\\nprocesses.\\n--fit: the\\nlargest.")
    'Measure.\\n\\nIn fresh processes.\\n--fit: the largest.'
    """
    return re.sub(r"(?<!\n)\n(?!\n|(?<=\.\n)--)", " ", text)


def _no_type(ctx: Any) -> None:
    return None
