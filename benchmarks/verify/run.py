"""`surefoot verify` on every built-in task, every example and every loop.

What was tried, how often it was killed, what it found.

python benchmarks/verify/run.py [--data DIR] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measured import ROOT, show
from surefoot.core.units import format_seconds
from surefoot.trial import find_conditions, markdown

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "verify.json"
TASKS = "benchmarks/verify/tasks.py"


@dataclass(frozen=True)
class Case:
    """One call of `surefoot verify`.

    Its words, what it stands for, and the data set that it wants.
    """

    name: str
    words: tuple[str, ...]
    what: str
    wants: str | None = None


def sets(*keys: str) -> tuple[str, ...]:
    return tuple(word for key in keys for word in ("--set", key))


def of_task(name: str, what: str, *words: str, wants: str | None = None, steps: int = 12) -> Case:
    return Case(name, (name, "--steps", str(steps), *words), what, wants)


def of_example(name: str, what: str, *words: str) -> Case:
    return Case(name, (f"{TASKS}:{name}", "--steps", "12", *words), what)


def of_script(name: str, what: str) -> Case:
    command = shlex.join((sys.executable, str(ROOT / "examples" / name), "out"))
    return Case(name, ("--command", command, "--state", "out"), what)


SOON = sets('evaluate.every="3 steps"')
CIFAR = sets("train.batch=50")
CASES = (
    of_task("digits", "dropout, shifted images, BatchNorm", *SOON),
    of_task(
        "cifar10",
        "shifted and mirrored images, BatchNorm, bf16, Muon",
        *CIFAR,
        wants="cifar10-webdataset",
        steps=6,
    ),
    of_task("cifar10_quick", "the same, narrower", *CIFAR, wants="cifar10-webdataset", steps=6),
    of_task("wikitext2", "dropout, bf16, Muon", wants="wikitext-2", steps=6),
    of_task("pycorpus", "dropout, bf16, Muon", *sets("task.dropout=0.1"), steps=6),
    of_example(
        "ImageClassifier",
        "a plateau schedule, BatchNorm",
        *SOON,
        *sets("schedule.name=plateau", "schedule.patience=1"),
    ),
    of_example("LanguageModel", "Muon, tied weights", *sets("optim.name=muon")),
    of_example(
        "HfCausalLM",
        "a model of transformers, four microbatches",
        *sets("train.batch=16", "train.microbatch=4"),
    ),
    of_example("Gan", "two updates a step, an optimizer of its own beside the spec's"),
    of_example(
        "Detector",
        "two terms, each with its count, microbatches",
        *sets("train.batch=16", "train.microbatch=4"),
    ),
    of_example("Halves", "a loss over all pairs of the batch"),
    of_example("OwnOptimizer", "an optimizer and a schedule of the task's own"),
    of_example(
        "HardClasses",
        "state of the task's own, averaged weights, BatchNorm",
        *SOON,
        *sets("optim.ema=0.9"),
    ),
    of_script("plain_loop.py", "a loop of single components, with dropout and shifted images"),
    of_script("attach.py", "surefoot.attach around a loop with a shuffling DataLoader"),
)


def verify(case: Case, data: Path, kills: int) -> dict[str, Any]:
    """The verdict of one case as `--json` gives it, and the seconds that it took."""
    words = [
        *case.words,
        "--kills",
        str(kills),
        *(() if case.wants is None else ("--data", str(data / case.wants))),
    ]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        words = [word.replace(TASKS, str(ROOT / TASKS)) for word in words]
        done = subprocess.run(
            [sys.executable, "-m", "surefoot", "verify", *words, "--json"],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
    if not done.stdout:
        return {"name": case.name, "what": case.what, "error": done.stderr.strip()}
    return {
        "name": case.name,
        "what": case.what,
        "seconds": time.perf_counter() - started_s,
        **json.loads(done.stdout),
    }


def render(rows: list[dict[str, Any]]) -> str:
    return markdown(
        ("what", "stands for", "steps", "kills", "verdict", "seconds"),
        [tuple(_cells(row)) for row in rows],
    )


def _cells(row: dict[str, Any]) -> Iterator[str]:
    yield from (f"`{row['name']}`", row["what"])
    if "error" in row:
        yield from ("", "", f"could not be tried: {row['error'].splitlines()[0]}", "")
        return
    yield str(row.get("num_steps", "a whole run"))
    cut = sum(is_cut for _, _, is_cut in row["kills"]) if "num_steps" in row else None
    yield f"{len(row['kills'])}" + ("" if cut is None else f", {cut} in a save")
    apart = row["repeat"] or row["resume"]
    yield (
        "goes on exactly"
        if row["holds"]
        else f"parts: {apart if isinstance(apart, str) else apart['component']}"
    )
    yield format_seconds(row["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="these cases alone, and nothing written")
    parser.add_argument(
        "--data", type=Path, default=(ROOT / os.environ.get("DATA", "../shared/data")).resolve()
    )
    parser.add_argument("--kills", type=int, default=4)
    asked = parser.parse_args()
    rows = []
    for case in CASES:
        if not asked.names or case.name in asked.names:
            rows.append(verify(case, asked.data, asked.kills))
            print(
                f"verify: {case.name}: {'; '.join(_cells(rows[-1]))}", file=sys.stderr, flush=True
            )
    if asked.names:
        return
    conditions = find_conditions(("torch", "transformers", "surefoot"))
    RESULTS.parent.mkdir(exist_ok=True)
    text = (
        json.dumps({"conditions": conditions, "rows": rows}, indent=1)
        .replace(f"{ROOT}/", "")
        .replace(sys.executable, "python")
    )
    RESULTS.write_text(text + "\n")
    show(
        {
            "results": render(rows),
            "conditions": markdown(("condition", "value"), list(conditions.items())),
        },
        FOLDER / "README.md",
    )


if __name__ == "__main__":
    main()
