"""Two checkouts of surefoot train the same runs: are the weights the same bits?

python benchmarks/same_bits/run.py OLD [NEW] [--rows "digits;pycorpus"]

OLD and NEW are folders with a checkout each, and DATA is the folder of the data sets.
Each run is trained and exported by the command of its own checkout, with its own tasks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benchmarks.measured import ROOT, find_checkouts_conditions, make_checkouts_parser, show
from surefoot.trial import markdown

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "same_bits.json"
KINDS = {
    "complex_weights": "Filter",
    "contrastive": "Views",
    "ctc": "Reading",
    "detection": "Boxes",
    "diffusion": "Diffusion",
    "physics": "Equation",
    "reinforcement": "Balance",
    "sparse_embeddings": "Words",
    "swa": "Averaged",
    "truncated": "Echo",
    "wgan": "Wgan",
}
FEW = ["--steps", "6", "--set", "train.batch=4", "--set", "schedule.warmup=2 steps"]
# a part of the standard library: the evaluation of all of it takes a minute and a half
GPT = ["pycorpus", *FEW, "--set", f"task.folder={sysconfig.get_path('stdlib')}/asyncio"]
DIGITS = ["digits", "--steps", "30", "--set", "schedule.warmup=5 steps"]
TWO_RANKS = ["--ranks", "2"]
VIRTUAL = ["--set", "layout.virtual_ranks=2", "--set", "train.threads=1"]
# Muon looks at whole matrices, which a rank of a sharded run does not have
ADAMW = ["--set", "optim.name=adamw", "--set", "optim.lr=1e-3"]
# by name: the words after `surefoot train`, and the greatest relative difference; 0 is bitwise.
# Keys are spelled as before, which both states read
ROWS: dict[str, tuple[list[str], float]] = {
    "digits": (DIGITS, 0.0),
    "digits, batches in microbatches": ([*DIGITS, "--set", "train.microbatch=16"], 0.0),
    "digits, bf16": ([*DIGITS, "--set", "precision.compute=bf16"], 0.0),
    "digits, SGD": ([*DIGITS, "--set", "optim.name=sgd"], 0.0),
    "digits, Muon": ([*DIGITS, "--set", "optim.name=muon"], 0.0),
    "digits, averaged weights": ([*DIGITS, "--set", "optim.ema=0.9"], 0.0),
    "pycorpus": (GPT, 0.0),
    "pycorpus, activation checkpointing": ([*GPT, "--set", "memory.recompute=full"], 0.0),
    "wikitext2": (["wikitext2", *FEW], 0.0),
    "cifar10_quick": (["cifar10_quick", "--steps", "4"], 0.0),
    "digits, two ranks": ([*DIGITS, *TWO_RANKS], 0.0),
    "digits, two virtual ranks": ([*DIGITS, *VIRTUAL], 0.0),
    "pycorpus, two virtual ranks": ([*GPT, *VIRTUAL], 0.0),
    "pycorpus, two ranks": ([*GPT, *TWO_RANKS], 0.0),
    "pycorpus, compiled": ([*GPT, "--set", "compile.what=blocks"], 1e-5),
} | {
    f"pycorpus, two ranks, stage {stage}": (
        [*GPT, *ADAMW, *TWO_RANKS, "--set", "layout.shard=2", "--set", f"layout.stage={stage}"],
        1e-5,
    )
    for stage in (1, 2, 3)
}
ROWS |= {
    f"examples/kinds/{name}": ([f"examples/kinds/{name}.py:{task}", "--steps", "20"], 0.0)
    for name, task in KINDS.items()
}


def train(checkout: Path, words: list[str], folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The weights after a run, as the command of `checkout` exports them."""
    run = folder / "run"
    needs_data = words[0].partition("_")[0] in ("wikitext2", "cifar10")
    data = ["--data", os.environ["DATA"]] if needs_data else []
    call(checkout, "train", *words, *data, "--run", str(run), "--quiet")
    weights = folder / "weights.safetensors"
    call(checkout, "checkpoint", "export", str(run), "--step", "last", "--to", str(weights))
    return load_file(weights)


def call(checkout: Path, *words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", *words],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        told = done.stderr.replace(f"{checkout}/", "")[-600:]
        raise RuntimeError(f"surefoot {words[0]} ended with {done.returncode}: {told}")


def differ(
    old: dict[str, np.ndarray[Any, Any]], new: dict[str, np.ndarray[Any, Any]]
) -> tuple[int, float]:
    """Tensors that are not the same bits, and the greatest difference.

    It is relative to the largest absolute value of its tensor, and infinite where a name or a
    shape differs. A second name of a tied weight may be missing on one side.
    """
    if _not_tied(old, new) or _not_tied(new, old):
        return len(old.keys() | new.keys()), float("inf")
    found, most = 0, 0.0
    for name in old.keys() & new.keys():
        one, other = old[name], new[name]
        if one.shape != other.shape:
            return len(old.keys() | new.keys()), float("inf")
        if one.dtype == other.dtype and one.tobytes() == other.tobytes():
            continue
        found += 1
        scale = float(np.abs(one).max()) or 1.0
        apart = np.abs(one.astype(np.complex128) - other.astype(np.complex128))
        most = max(most, float(apart.max()) / scale)
    return found, most


def _not_tied(
    one: dict[str, np.ndarray[Any, Any]], other: dict[str, np.ndarray[Any, Any]]
) -> list[str]:
    """The names that `other` lacks, and whose tensor has no other name in `one`."""
    shared = {one[name].tobytes() for name in one.keys() & other.keys()}
    return [name for name in one.keys() - other.keys() if one[name].tobytes() not in shared]


def compare(old: Path, new: Path, name: str) -> dict[str, Any]:
    """One row: what the two runs' weights have in common, or why there are none."""
    words, _ = ROWS[name]
    sides = []
    for which, checkout in (("old", old), ("new", new)):
        with tempfile.TemporaryDirectory() as folder:
            try:
                sides.append(train(checkout, words, Path(folder)))
            except RuntimeError as error:
                return {"failed": f"{which}: {error}"}
    found, most = differ(*sides)
    return {"tensors": len(sides[1]), "other_bits": found, "most": most}


def standing(each: dict[str, Any], bound: float) -> str:
    if "failed" in each:
        return "not compared"
    return "holds" if each["most"] <= bound and (bound or not each["other_bits"]) else "fails"


def render(found: dict[str, Any]) -> str:
    rows = []
    for name, each in found["rows"].items():
        bound = ROWS[name][1]
        if "failed" in each:
            measured = each["failed"].splitlines()[0]
        elif each["other_bits"]:
            measured = f"{each['other_bits']} of {each['tensors']} differ, by {each['most']:.1e}"
        else:
            measured = f"{each['tensors']} tensors, the same bits"
        rows.append((name, measured, f"{bound:g}" if bound else "bitwise", standing(each, bound)))
    return markdown(("run", "weights, old against new", "bound", "verdict"), rows)


def read_rows(results: Path) -> dict[str, Any]:
    """The rows that were compared before, of those that there still are."""
    rows = json.loads(results.read_text())["rows"] if results.exists() else {}
    return {name: row for name, row in rows.items() if name in ROWS}


def main() -> None:
    parser = make_checkouts_parser(__doc__, RESULTS)
    parser.add_argument(
        "--rows", help="compare these alone, separated by semicolons; the results of others stay"
    )
    asked = parser.parse_args()
    names = asked.rows.split(";") if asked.rows else list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"no row {unknown[0]!r}; the rows are {'; '.join(ROWS)}")
    if asked.old is not None:
        os.environ.setdefault("DATA", str(ROOT.parent / "shared" / "data"))
        found: dict[str, Any] = {
            "conditions": find_checkouts_conditions(asked.old, asked.new),
            "rows": read_rows(asked.out) if asked.rows else {},
        }
        for name in names:
            each = compare(asked.old.resolve(), asked.new.resolve(), name)
            found["rows"][name] = each
            print(f"{name}: {each}", file=sys.stderr, flush=True)
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
    found = json.loads(asked.out.read_text())
    conditions = markdown(("condition", "value"), [*found["conditions"].items()])
    show(
        {"bars": render(found), "conditions": conditions},
        FOLDER / "README.md" if asked.out == RESULTS else None,
    )
    if any(standing(each, ROWS[name][1]) == "fails" for name, each in found["rows"].items()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
