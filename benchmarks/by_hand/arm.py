"""What every arm's process does.

Its models, one after the other, with one component by hand or by surefoot.

python -m benchmarks.by_hand.arm --how hand --component bf16 --report FILE --folder DIR
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import islice

import torch

from benchmarks.by_hand import hand
from benchmarks.by_hand.components import COMPONENTS, MODELS
from benchmarks.step_cost.arms.surefoot_run import Costed
from benchmarks.step_cost.models import LEARNING_RATE, SEED, Workload
from benchmarks.step_cost.watch import Watch
from surefoot.contract.spec import RunSpec
from surefoot.train.run import Run
from surefoot.trial import write_report


def train(component: str, workload: Workload, watch: Watch, folder: str) -> None:
    tables = {
        "task": {
            "use": f"{Costed.__module__}:{Costed.__name__}",
            "workload": workload.name,
            "batches": workload.num_batches,
        },
        "data": {"shuffle": not watch.compares},
        "optim": {"lr": LEARNING_RATE},
        "schedule": {"name": "constant"},
        "observe": {"tensorboard": False},
        "train": {
            "length": f"{watch.total} steps",
            "batch": workload.batch,
            "seed": SEED,
            "threads": 1,
        },
    }
    for table, keys in COMPONENTS[component].tables_for(workload.batch).items():
        tables[table] = {**tables.get(table, {}), **keys}
    spec = RunSpec(**tables)
    watch.read_loss = lambda report: report.loss
    with Run(spec, folder=folder) as run:
        for report in islice(run.steps(), watch.total):
            watch.tick(run.model, report)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", required=True, choices=("hand", "surefoot"))
    parser.add_argument("--component", required=True, choices=COMPONENTS)
    parser.add_argument("--report", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, help="measured, instead of the model's own")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    measures: dict[str, float] = {}
    for name in COMPONENTS[asked.component].models:
        workload = replace(MODELS[name], steps=asked.steps or MODELS[name].steps)
        watch = Watch(workload)
        if asked.how == "hand":
            hand.train(asked.component, workload, watch)
        else:
            train(asked.component, workload, watch, f"{asked.folder}/{name}")
        measures |= {f"{name}/{measure}": value for measure, value in watch.measures.items()}
    write_report(asked.report, measures)


if __name__ == "__main__":
    main()
