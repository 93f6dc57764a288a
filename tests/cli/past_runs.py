"""Run folders as runs leave them, written record by record through the contract."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from surefoot.contract import events
from surefoot.contract.events import Ended, Evaluated, Event, Fault, Started, Step

BEGAN_S = 1_790_000_000.0
OUTCOMES = ("finished", "stopped", "failed", "interrupted")
SPEC: Mapping[str, Any] = {
    "task": {"use": "digits"},
    "optim": {"lr": 0.005},
    "train": {"length": "40 steps"},
}


def started(
    generation: int = 1, *, first_step: int = 1, spec: Mapping[str, Any] = SPEC, **changes: Any
) -> Started:
    made: dict[str, Any] = {
        "generation": generation,
        "time_s": BEGAN_S + 100 * generation,
        "spec_id": "0123456789ab",
        "spec": spec,
        "task": "digits",
        "code_digest": "c" * 64,
        "data": {"describe": "1,437 samples", "digest": "d" * 64, "guarantee": "proven"},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "variables": {},
        "command": ("surefoot", "train", "digits"),
        "machine": {
            "processor": "a processor",
            "cores": 2,
            "memory_bytes": 2**34,
            "device": "cpu",
            "threads": 1,
        },
        "place": {"rank": 0, "world_size": 1, "host": "here"},
        "commit": None,
        "seed": 0,
        "num_parameters": 58_474,
        "total_steps": 40,
        "steps_per_epoch": 20,
        "first_step": first_step,
        "notes": ("rate x 1",),
    }
    return Started(**{**made, **changes})


def step(number: int, loss: float | None, generation: int = 1) -> Step:
    return Step(
        generation=generation,
        time_s=BEGAN_S + 100 * generation + number,
        step=number,
        epoch=number / 20,
        num_steps=10,
        loss=loss,
        terms={"loss": loss},
        gradient_norm=1.0,
        learning_rates={"main": 0.005},
        num_applied=10,
        num_samples=640,
        num_items=640.0,
        elapsed_s=0.5,
        waiting_s=0.0,
        samples_per_s=1280.0,
        items_per_s=1280.0,
        peak_bytes=400 << 20,
    )


def evaluated(
    number: int,
    accuracy: float | None,
    generation: int = 1,
    *,
    best: bool = True,
    split: str = "test",
) -> Evaluated:
    return Evaluated(
        generation=generation,
        time_s=BEGAN_S + 100 * generation + number,
        step=number,
        split=split,
        num_samples=360,
        loss=0.25,
        metrics={"accuracy": accuracy},
        score="accuracy",
        better="higher",
        best=best,
        elapsed_s=0.1,
        units={"accuracy": "%"},
    )


def fault(number: int, generation: int = 1) -> Fault:
    return Fault(
        generation=generation,
        time_s=BEGAN_S,
        step=number,
        fault="nonfinite",
        rank=0,
        host="here",
        action="the step was skipped, no weight changed",
        detail="the loss is nan",
    )


def ended(
    number: int,
    outcome: str = "finished",
    generation: int = 1,
    cause: str = "the length was reached",
) -> Ended:
    return Ended(
        generation=generation,
        time_s=BEGAN_S + 100 * generation + 50,
        step=number,
        outcome=outcome,
        cause=cause,
        exit_code=0,
        elapsed_s=50.0,
        num_samples=2560,
        samples_per_s=1280.0,
        peak_bytes=500 << 20,
    )


def write(folder: Path, records: Iterable[Event], *, torn: str = "") -> Path:
    """A run folder with these records and, behind them, half a line."""
    folder.mkdir(parents=True)
    lines = "".join(record.as_line() for record in records)
    (folder / events.FILE).write_text(lines + torn, encoding="utf-8")
    return folder


def write_finished(
    folder: Path, *, lr: float = 0.005, accuracy: float = 0.994, **changes: Any
) -> Path:
    spec = {**SPEC, "optim": {"lr": lr}}
    losses = [step(number, lr * 100 / number) for number in (1, 10, 20, 30, 40)]
    return write(
        folder,
        [
            started(spec=spec, **changes),
            *losses,
            evaluated(20, 0.9),
            evaluated(40, accuracy),
            ended(40),
        ],
    )
