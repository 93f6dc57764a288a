"""Which modes of torch.compile are the default under another name, and why."""

from __future__ import annotations

WITHOUT_GRAPHS = "CUDA graphs need a GPU"


def why_default(mode: str, device: str, *, deterministic: bool) -> str | None:
    """Why a mode changes nothing on a device; None where it is one of its own.

    >>> why_default("reduce-overhead", "cpu", deterministic=True)
    'CUDA graphs need a GPU'
    >>> why_default("reduce-overhead", "cuda", deterministic=True), why_default("max-autotune", "cpu", deterministic=False)
    (None, None)
    """
    if device == "cuda" or mode == "default":
        return None
    if mode == "reduce-overhead":
        return WITHOUT_GRAPHS
    return f"train.deterministic lets it choose nothing by measuring, and {WITHOUT_GRAPHS}" if deterministic else None
