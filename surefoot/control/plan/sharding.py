"""Memory per rank and communication of each ZeRO stage, for model states without activations.

Rajbhandari et al., ZeRO (SC 2020), section 5: let each of P parameters have w bytes of weight, g of
gradient and s of optimizer state. Without sharding, each of N ranks needs w P + g P + s P. Stage 1
divides s by N, stage 2 also g, and stage 3 also w. Section 7: an all-reduce sends each element
twice, as a reduce-scatter and an all-gather; stage 3 gathers the weights once more.
"""

from __future__ import annotations

from dataclasses import dataclass

STAGES = (0, 1, 2, 3)
VOLUMES = {0: 2, 1: 2, 2: 2, 3: 3}  # communication of a step, as multiples of all weights


@dataclass(frozen=True)
class Sharding:
    """Memory and communication of a ZeRO stage; stage 0 is no sharding.

    `num_bytes` is the size of the model states per rank, and `saved` the share saved by sharding.
    `volumes` is the number of times that a step sends all weights.
    """

    stage: int
    num_bytes: float
    saved: float
    volumes: int


def compare_stages(
    num_parameters: int,
    num_ranks: int,
    *,
    weight_bytes: int = 4,
    gradient_bytes: int = 4,
    state_bytes: int = 8,
) -> tuple[Sharding, ...]:
    """Return the memory and the communication of all ZeRO stages on `num_ranks` ranks.

    The default sizes are those of Adam in fp32.

    Args:
        num_parameters: number of parameters of the model.
        num_ranks: number of ranks.
        weight_bytes: bytes of weight per parameter.
        gradient_bytes: bytes of gradient per parameter.
        state_bytes: bytes of optimizer state per parameter.

    >>> [f"{each.num_bytes / 1e9:.2f}" for each in compare_stages(175_000_000_000, 64)]
    ['2800.00', '1421.88', '732.81', '43.75']
    >>> num_parameters = 175_000_000_000
    >>> mixed = compare_stages(num_parameters, 64, weight_bytes=2, gradient_bytes=2, state_bytes=12)
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
        found.append(
            Sharding(stage, num_parameters * sum(held), 1.0 - sum(held) / whole, VOLUMES[stage])
        )
    return tuple(found)
