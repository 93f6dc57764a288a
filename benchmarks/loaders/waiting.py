"""One arm: steps of `cifar10`, or of the same net on JPEGs, with some setting of the loader.

The JPEGs are decoded anew each epoch.

python -m benchmarks.loaders.waiting decoded|photos SETTING TARS SETS REPORT

SETTING is auto, or so many processes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.components.data.order import Keys
from surefoot.components.data.tars.source import Tars
from surefoot.contract.spec import RunSpec
from surefoot.contract.task import Source
from surefoot.tasks.cifar10 import Cifar10
from surefoot.train.run import Run
from surefoot.trial import write_report

FOUND, TIMED, BATCH = 48, 40, 250  # steps in which auto may look; steps that are timed


class Photos(Cifar10):
    """The net of cifar10 on the tars themselves."""

    def data(self, split: str) -> Source:  # type: ignore[override]
        if split not in self._sources:
            made: Any = _Pairs(
                Tars(
                    sorted(Path(self.folder or "").glob(f"{split}-*.tar")),
                    cache=self.cache,
                    image="jpg",
                    label="cls",
                )
            )
            self._sources[split] = made
        return self._sources[split]

    def augment(self, batch: tuple[Tensor, Tensor], keys: Keys) -> tuple[Tensor, Tensor]:
        return super().augment(batch, keys)


class _Pairs:
    """Batches as (images, labels)."""

    guarantee, thread_safe = "proven", True

    def __init__(self, tars: Tars) -> None:
        self._tars, self.digest = tars, tars.digest

    def __len__(self) -> int:
        return len(self._tars)

    def read(self, ids: Any) -> tuple[Any, Any]:
        batch = self._tars.read(ids)
        return batch["image"], batch["label"]

    def describe(self) -> str:
        return self._tars.describe()


def main() -> None:
    what, setting, tars, sets, report = sys.argv[1:]
    torch.set_num_threads(1)
    task = (Cifar10 if what == "decoded" else Photos)(
        tars, cache=str(Path(sets) / what), widths=(16, 32, 32)
    )
    loader = (
        {"workers": "auto"} if setting == "auto" else {"workers": int(setting), "kind": "process"}
    )
    spec = RunSpec(
        train={"batch": BATCH, "length": f"{FOUND + TIMED} steps"},
        loader=loader,
        evaluate={"every": "99 epochs"},
    )
    with (
        tempfile.TemporaryDirectory(prefix="surefoot-waiting-") as made,
        Run(spec, task, folder=Path(made) / "run", quiet=True) as run,
    ):
        begun_s, waiting_s = 0.0, 0.0
        for each in run.steps():
            if each.step == FOUND:
                begun_s = time.perf_counter()
            waiting_s += each.waiting_s if each.step > FOUND else 0.0
        took_s = time.perf_counter() - begun_s
        found = run.assembly.engine.steps.reader.loader.settings.workers
    write_report(
        report, {"step_s": took_s / TIMED, "waiting": waiting_s / took_s, "workers": float(found)}
    )


if __name__ == "__main__":
    main()
