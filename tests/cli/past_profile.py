"""What a profile and a ladder leave behind, as files.

`name` stands wherever a stranger may choose a name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FLAME = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 30">'
    '<rect width="100" height="14" fill="#fa0"/>{inside}</svg>'
)


def write_profile(run: Path, *, name: str = "aten::addmm", inside: str = "") -> None:
    """All five files of `profile/`; `inside` goes into the flame graph as it is."""
    folder = run / "profile"
    folder.mkdir()
    keys = ("name", "calls", "self_s", "total_s", "self_bytes", "flops", "bytes")
    rows = [
        dict(zip(keys, row, strict=True))
        for row in (
            (name, 80, 0.02, 0.03, 4 << 20, 4e8, 1e7),
            ("aten::relu", 40, 0.004, 0.004, None, 0, 1e6),
        )
    ]
    _write(folder / "operators.json", {"num_steps": 20, "window_s": 0.05, "rows": rows})
    _write(
        folder / "memory.json",
        {
            "times_s": [0.0, 0.01, 0.02, 0.03],
            "categories": {
                "parameters": [8 << 20] * 4,
                "gradients": [0, 2 << 20, 8 << 20, 0],
                "optimizer": [16 << 20] * 4,
                "activations": [0, 30 << 20, 12 << 20, 0],
                name: [0, 1 << 20, None, 0],
            },
        },
    )
    keys = ("name", "kind", "calls", "flops", "bytes", "elapsed_s", "bound")
    points = [
        dict(zip(keys, point, strict=True))
        for point in (
            (name, "operator", 80, 4e8, 1e7, 0.02, "compute"),
            ("aten::relu", "operator", 40, 1e6, 8e6, 0.004, "memory"),
            ("blocks.0", "module", 20, 3e8, 2e7, 0.03, "compute"),
            ("unknown", "module", 1, None, None, None, None),
        )
    ]
    peaks = {"flops_per_s": {"fp32": 9e10, "bf16": 2e11}, "bytes_per_s": 1.2e10, "cores": 2}
    rest = {
        "mfu": 0.123,
        "mfu_formula": "model FLOPs of a sample x samples/s / peak FLOP/s",
        "fusible_share": 0.3,
    }
    _write(folder / "roofline.json", {"device": name, "peaks": peaks, "points": points, **rest})
    for file in ("flame_stack.svg", "flame_module.svg"):
        (folder / file).write_text(FLAME.format(inside=inside), encoding="utf-8")


def write_ladder(folder: Path, *, name: str = "fused update") -> Path:
    """A ladder of four rungs: two stay, one is slower, one computes something else."""
    folder.mkdir(parents=True)
    rungs = [
        _rung(name, 0.8, kept=True, reason="a gain"),
        _rung("threads", 0.97, kept=True, reason="a gain"),
        _rung("tiny batches", 1.4, kept=False, reason="slower"),
        {
            **_rung("skips a slice", 0.5, kept=False, reason=f"{name}: the gradients differ"),
            "parity": {"verdict": "fails", "words": name},
        },
        {
            "name": "on a GPU",
            "kind": "rounding",
            "standing": "skipped",
            "kept": False,
            "reason": "no GPU here",
        },
    ]
    _write(
        folder / "ladder.json",
        {
            "spec": name,
            "device": "cpu",
            "conditions": {"processor": name, "threads": "1"},
            "num_samples": 2048,
            "num_runs": 60,
            "baseline": {"spec_id": "0123", "plain": {"optim.fused": False}},
            "rungs": rungs,
            "best": "best.toml",
        },
    )
    return folder


def _rung(name: str, estimate: float, *, kept: bool, reason: str) -> dict[str, Any]:
    ratio = {"estimate": estimate, "low": estimate - 0.03, "high": estimate + 0.03, "n": 5}
    wide = {"estimate": 0.9238, "low": 0.7211, "high": 1.3421, "n": 5}
    return {
        "name": name,
        "kind": "nothing",
        "kept": kept,
        "reason": reason,
        "standing": "kept" if kept else "rejected",
        "change": {"optim.fused": True},
        "purpose": "time",
        "time_ratio": ratio,
        "memory_ratio": {**ratio, "estimate": 1.0},
        "throughput_ratio": wide,
        "startup_ratio": wide,
        "total_time_ratio": ratio,
        "total_memory_ratio": wide,
        "expected": {"time": 0.9},
        "score": {
            "name": "accuracy",
            "unit": "%",
            "value": 0.994,
            "start": 0.992,
            "better": "higher",
        },
        "parity": {
            "verdict": "holds",
            "worst": 1e-7,
            "words": "within the noise of two equal runs",
        },
    }


def _write(path: Path, row: dict[str, Any]) -> None:
    path.write_text(json.dumps({"version": 1, **row}), encoding="utf-8")
