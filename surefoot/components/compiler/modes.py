"""Modes of torch.compile that equal the default mode on a device, and the reasons."""

from __future__ import annotations

WITHOUT_GRAPHS = "CUDA graphs need a GPU"


def why_default(mode: str, device: str, *, deterministic: bool) -> str | None:
    """Return why `mode` of torch.compile equals the default mode on `device`, or None.

    None means that `mode` is different from the default, or is the default itself.

    >>> why_default("reduce-overhead", "cpu", deterministic=True)
    'CUDA graphs need a GPU'
    >>> why_default("reduce-overhead", "cuda", deterministic=True)
    >>> why_default("max-autotune", "cpu", deterministic=False)
    """
    if device == "cuda" or mode == "default":
        return None
    if mode == "reduce-overhead":
        return WITHOUT_GRAPHS
    return (
        f"train.deterministic forbids autotuning, and {WITHOUT_GRAPHS}" if deterministic else None
    )
