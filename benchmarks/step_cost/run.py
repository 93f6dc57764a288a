"""What a step costs: every arm on the three models, interleaved in fresh processes, one thread.

python benchmarks/step_cost/run.py        all arms that are installed, 15 rounds
python benchmarks/step_cost/run.py --arms idiomatic,surefoot --models mlp --rounds 6 --out out.json
python benchmarks/step_cost/run.py --composer-python .venv-composer/bin/python

The last one runs Composer too, under the torch it asks for.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from benchmarks.measured import ROOT, make_parser, measure
from benchmarks.step_cost import tables
from benchmarks.step_cost.tables import RESULTS
from surefoot.trial import Arm

MODELS = "mlp,convnet,gpt"
ARMS = {  # name -> (module, package it needs)
    "idiomatic": ("idiomatic", "torch"),
    "fused": ("fused", "torch"),
    "bare": ("bare", "torch"),
    "surefoot": ("surefoot_run", "surefoot"),
    "fabric": ("peer_fabric", "lightning"),
    "accelerate": ("peer_accelerate", "accelerate"),
    "lightning": ("peer_lightning", "lightning"),
    "hf_trainer": ("peer_hf_trainer", "transformers"),
}
# in an interpreter of their own: its torch is another
COMPOSER = {"composer": "peer_composer", "bare_for_composer": "bare"}
TIMEOUT_S = 300.0


def make_arm(name: str, module: str, models: str, *, python: str = sys.executable) -> Arm:
    """The arm's command: its module under `python`, from the project's root."""
    words = (
        python,
        "-m",
        f"benchmarks.step_cost.arms.{module}",
        "--models",
        models,
        "--report",
        "{report}",
        "--folder",
        "{work}/runs",
    )
    return Arm(name=name, command=words, folder=ROOT, timeout_s=TIMEOUT_S)


def find_arms(
    names: list[str], models: str, composer_python: str | None
) -> tuple[list[Arm], list[str]]:
    """The arms whose package is installed, and the names of the others."""
    installed = [name for name in names if find_spec(ARMS[name][1]) is not None]
    arms = [make_arm(name, ARMS[name][0], models) for name in installed]
    if composer_python is not None:
        arms += [
            make_arm(name, module, models, python=composer_python)
            for name, module in COMPOSER.items()
        ]
    missing = [name for name in names if name not in installed]
    return arms, missing if composer_python is not None else [*missing, "composer"]


def main() -> None:
    parser = make_parser(__doc__, RESULTS)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--models", default=MODELS)
    parser.add_argument(
        "--composer-python", help="an interpreter with mosaicml and the torch that it asks for"
    )
    asked = parser.parse_args()
    if not asked.show:
        arms, missing = find_arms(asked.arms.split(","), asked.models, asked.composer_python)
        packages = ("torch", "numpy", "surefoot", "lightning", "accelerate", "transformers")
        said = {"not installed": ", ".join(missing) or "none"}
        measure("step cost", arms, rounds=asked.rounds, packages=packages, out=asked.out, said=said)
    tables.main(asked.out, in_readme=asked.out == RESULTS)


if __name__ == "__main__":
    main()
