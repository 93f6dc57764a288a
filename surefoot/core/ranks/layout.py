"""Layout of the ranks of a run: the number of ranks on each axis of the device mesh.

Ranks on the `replicate` axis have the same weights. Ranks on the `shard` axis each store a part of
the state that the ZeRO stage shards. All ranks read different samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from surefoot.core.errors import SpecError

AXES = ("replicate", "shard")
STAGES = (1, 2, 3)
Transport = Literal["auto", "shared_memory", "gloo"]  # of ranks on CPUs


@dataclass(frozen=True)
class Layout:
    """Number of ranks on each axis, and the ZeRO stage of the shard axis.

    Consecutive ranks share one replica: `replicate` is the outer axis, `shard` the inner one.

    Args:
        replicate: Number of replicas of the state.
        shard: Number of ranks that share one replica.
        stage: ZeRO stage (Rajbhandari et al., 2020): 1 shards the optimizer state, 2 also the
            gradients, 3 also the weights.

    >>> Layout.parse("replicate=2,shard=2,stage=1").world_size
    4
    >>> str(Layout.parse("1")), str(Layout.parse("shard=2"))
    ('1', 'shard=2,stage=3')
    """

    replicate: int = 1
    shard: int = 1
    stage: int = 3

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a text such as `replicate=2,shard=2,stage=3`; `1` is one process.

        Raises SpecError for any other text.
        """
        if text.strip() == "1":
            return cls()
        values: dict[str, int] = {}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if (
                name not in (*AXES, "stage")
                or not equals
                or not value.isdecimal()
                or not int(value)
                or name in values
            ):
                raise SpecError(
                    (
                        f"the layout {text.strip()!r} has the entry {part.strip()!r}, "
                        "which is not AXIS=RANKS"
                    ),
                    hint=(
                        f"write 1 for one process, or {', '.join(f'{each}=2' for each in AXES)}, "
                        "or shard=2,stage=1"
                    ),
                )
            values[name] = int(value)
        if "stage" in values and (values["stage"] not in STAGES or values.get("shard", 1) == 1):
            raise SpecError(
                f"the layout {text.strip()!r} has stage {values['stage']} on "
                f"{values.get('shard', 1)} shard rank(s)",
                hint=(
                    "a stage needs 2 or more shard ranks: 1 shards the optimizer state, 2 "
                    "also gradients, 3 also weights"
                ),
            )
        return cls(**values)

    @property
    def world_size(self) -> int:
        """Number of ranks of the layout."""
        return self.replicate * self.shard

    @property
    def is_sharded(self) -> bool:
        """True if a rank stores only a part of the state."""
        return self.shard > 1

    def __str__(self) -> str:
        axes = [f"{name}={size}" for name in AXES if (size := getattr(self, name)) != 1]
        return ",".join([*axes, *([f"stage={self.stage}"] if self.is_sharded else [])]) or "1"


def fit(world_size: int, replicate: int | None, shard: int = 1, stage: int = 3) -> Layout:
    """Return the layout of a run on `world_size` ranks.

    If `replicate` is None, it becomes world_size / shard. Raises SpecError if replicate * shard is
    not `world_size`.
    """
    are = f"there {'is' if world_size == 1 else 'are'} {world_size} rank{'s' * (world_size != 1)}"
    if world_size % shard:
        legal = [str(each) for each in range(1, world_size + 1) if world_size % each == 0]
        raise SpecError(
            f"layout.shard is {shard}, but {are}",
            hint=f"start a multiple of {shard}, or set layout.shard to {' or '.join(legal)}",
        )
    made = Layout(world_size // shard if replicate is None else replicate, shard, stage)
    if made.world_size != world_size:
        times = "" if shard == 1 else f" times a layout.shard of {shard}"
        raise SpecError(
            f"layout.replicate is {replicate}{times}, but {are}",
            hint=(
                f"start {made.world_size} ranks, or leave layout.replicate out: it then "
                "follows from the number of ranks"
            ),
        )
    return made
