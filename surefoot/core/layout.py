"""How the ranks of a run are laid out: how many per axis of the mesh, and why a layout does not fit the ranks that there are.

`replicate` ranks hold the same weights and read other samples. Further axes will multiply in the same way.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Self

from surefoot.core.errors import SpecError


@dataclass(frozen=True)
class Layout:
    """Ranks per axis.

    >>> Layout.parse("replicate=2").world_size
    2
    >>> str(Layout.parse("1"))
    '1'
    """

    replicate: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `replicate=2`; `1` is one process. Raises SpecError."""
        if text.strip() == "1":
            return cls()
        names = [field.name for field in fields(cls)]
        values: dict[str, int] = {}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if name not in names or not equals or not value.isdecimal() or not int(value) or name in values:
                raise SpecError(
                    f"{part.strip()!r} in the layout {text.strip()!r} is no axis with its ranks",
                    hint=f"write 1 for one process, or {', '.join(f'{each}=2' for each in names)}",
                )
            values[name] = int(value)
        return cls(**values)

    @property
    def world_size(self) -> int:
        """The ranks that it takes."""
        return self.replicate

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in asdict(self).items() if size != 1) or "1"


def fit(world_size: int, replicate: int | None) -> Layout:
    """The layout of a run on so many ranks; an axis that is left open takes all that there are.

    Raises SpecError where the axes do not make up the world.
    """
    made = Layout(world_size if replicate is None else replicate)
    if made.world_size != world_size:
        raise SpecError(
            f"layout.replicate is {replicate}, and there {'is' if world_size == 1 else 'are'} {world_size} rank{'s' * (world_size != 1)}",
            hint=f"start {made.world_size} ranks, or leave layout.replicate out: it is then as many as there are",
        )
    return made
