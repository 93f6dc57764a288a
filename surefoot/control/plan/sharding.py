"""What each stage of sharding leaves on a rank, and what it sends: arithmetic on the states of a model, without its activations.

Rajbhandari et al., ZeRO (SC 2020), section 5: of P parameters with g bytes each of weight, of gradient and of optimiser state, N ranks
hold w P + g P + s P without sharding; stage 1 divides s by N, stage 2 g too, stage 3 w too. Section 7: a sum over all ranks sends each
number twice, in a sum in parts and a gathering; stage 3 gathers the weights once more.
"""

from __future__ import annotations

from dataclasses import dataclass

STAGES = (0, 1, 2, 3)
VOLUMES = {0: 2, 1: 2, 2: 2, 3: 3}  # what is sent in a step, as multiples of all weights


@dataclass(frozen=True)
class Sharding:
    """One stage, 0 is none: bytes of states on each rank, the share that it saves, and how often all weights' numbers are sent a step."""

    stage: int
    num_bytes: float
    saved: float
    volumes: int


def compare_stages(
    num_parameters: int, num_ranks: int, *, weight_bytes: int = 4, gradient_bytes: int = 4, state_bytes: int = 8
) -> tuple[Sharding, ...]:
    """All stages, on `num_ranks` ranks; the bytes are of each parameter, and as they stand here those of Adam in fp32.

    >>> [f"{each.num_bytes / 1e9:.2f}" for each in compare_stages(175_000_000_000, 64)]
    ['2800.00', '1421.88', '732.81', '43.75']
    >>> mixed = compare_stages(175_000_000_000, 64, weight_bytes=2, gradient_bytes=2, state_bytes=12)
    >>> [f"{each.num_bytes / 1e9:.1f}" for each in mixed]
    ['2800.0', '732.8', '388.3', '43.8']
    """
    whole = weight_bytes + gradient_bytes + state_bytes
    found = []
    for stage in STAGES:
        held = [
            size / num_ranks if stage >= split_from else size
            for split_from, size in ((1, state_bytes), (2, gradient_bytes), (3, weight_bytes))
        ]
        found.append(Sharding(stage, num_parameters * sum(held), 1.0 - sum(held) / whole, VOLUMES[stage]))
    return tuple(found)
