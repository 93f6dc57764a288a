"""The ladders of real tasks: `surefoot ladder` as anybody would call it.

Every rung there is on one core, and those that take more on two.

python -m benchmarks.ladder.tasks [--data DIR] [--show]
                          [--only wikitext2|cifar10_quick|wikitext2_cores|cifar10_quick_cores]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measured import ROOT, show
from surefoot.prove.attempts import find_last_error
from surefoot.prove.ladder.workbench import OUTCOMES

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
TASKS = {  # what makes a run of 16 steps take seconds on one core
    "wikitext2": ("train.batch=2",),
    "cifar10_quick": ("train.batch=50", "task.widths=[16, 64, 64]"),
    "wikitext2_cores": ("train.batch=2",),
    "cifar10_quick_cores": ("train.batch=50", "task.widths=[16, 64, 64]"),
}
# of a ladder with the rungs that were kept on one core, and those that take more than one
CORES = "_cores"
RUNGS = {
    "wikitext2_cores": "bf16,threads,data parallel",
    "cifar10_quick_cores": "fused,bf16,threads,workers,data parallel",
}
PAIRS = 7


def make_command(name: str, data: str, out: Path) -> list[str]:
    stated = [word for text in TASKS[name] for word in ("--set", text)]
    stated += ["--rungs", RUNGS[name]] if name in RUNGS else []
    words = [
        sys.executable,
        "-P",
        "-m",
        "surefoot",
        "ladder",
        name.removesuffix(CORES),
        "--data",
        data,
        *stated,
    ]
    return [*words, "--pairs", str(PAIRS), "--skip-refused", "--out", str(out)]


def keep(climbed: Path, name: str) -> None:
    """The tables, the picture and the raw outcomes.

    Of an error its last words, not where this machine keeps its files.
    """
    folder = RESULTS / name
    folder.mkdir(parents=True, exist_ok=True)
    for kept in ("ladder.json", "ladder.md", "ladder.svg"):
        shutil.copy(climbed / kept, folder / kept)
    rows = map(json.loads, (climbed / OUTCOMES).read_text().splitlines())
    short = [
        {**row, "error": find_last_error(row["error"])} if row.get("error") else row for row in rows
    ]
    (folder / OUTCOMES).write_text("".join(f"{json.dumps(row)}\n" for row in short))


def render(name: str) -> str:
    """The tables of a ladder, below a heading of this document."""
    _, _, tables = (RESULTS / name / "ladder.md").read_text().partition("\n\n")
    return tables.replace("\n## ", "\n#### ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=(ROOT / os.environ.get("DATA", "../shared/data")).resolve()
    )
    parser.add_argument(
        "--only", choices=TASKS, help="this alone; the others stay as they were measured before"
    )
    parser.add_argument(
        "--show",
        action="store_true",
        help="measure nothing, put the tables into the document again",
    )
    asked = parser.parse_args()
    for name in () if asked.show else (asked.only,) if asked.only else TASKS:
        with tempfile.TemporaryDirectory(prefix="surefoot-ladder-") as folder:
            climbed = Path(folder) / name
            subprocess.run(make_command(name, str(asked.data), climbed), cwd=ROOT, check=True)
            keep(climbed, name)
    show(
        {name: render(name) for name in TASKS if (RESULTS / name / "ladder.md").is_file()},
        FOLDER / "README.md",
    )


if __name__ == "__main__":
    main()
