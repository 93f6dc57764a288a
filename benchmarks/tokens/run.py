"""Batches of windows out of a memory map of tokens, against the faster of two ways by hand.

python -m benchmarks.tokens.run [--rounds 15]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.input.run import render
from benchmarks.measured import ROOT, make_parser, measure, render_conditions, show
from benchmarks.tokens.arms import WAYS, write_tokens
from surefoot.trial import Arm, read_trial

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "tokens.json"


def make_arms(file: Path) -> list[Arm]:
    words = (sys.executable, "-m", "benchmarks.tokens.arms")
    return [
        Arm(name=name, command=(*words, name, str(file), "{report}"), folder=ROOT) for name in WAYS
    ]


def main() -> None:
    asked = make_parser(__doc__, RESULTS).parse_args()
    if not asked.show:
        with tempfile.TemporaryDirectory() as folder:
            arms = make_arms(write_tokens(Path(folder, "tokens.bin")))
            measure(
                "tokens",
                arms,
                rounds=asked.rounds,
                packages=("torch", "numpy", "surefoot"),
                out=asked.out,
            )
    trial = read_trial(asked.out)
    parts = {"conditions": render_conditions(trial), "results": render(trial)}
    show(parts, FOLDER / "README.md" if asked.out == RESULTS else None)


if __name__ == "__main__":
    main()
