"""Writes docs/reference/models.md: every case of this folder, compared.

python -m tests.models.table [WORD ...]
"""

from __future__ import annotations

import importlib
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from tests.models.compared import BOUND, COMPARISONS, STEPS, WIDE, Case, check

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
MODULES = {
    "transformers": ("test_transformers", "test_transformers_media"),
    "timm": ("test_timm",),
    "torch_geometric": ("test_torch_geometric",),
}
TEXT = """# Third-party models

Models of three packages in small configurations, each trained by a plain PyTorch loop and by a \
`Run`, {steps} steps.
`python -m tests.models.table` trains all of them and writes this page; `tests/models` tests the \
comparisons, for a few models of each package in `make test` and for all in `make test-faults`.

| comparison | compared results |
| --- | --- |
| plain loop | whole batches compared with a loop of `backward()` and `step()`, without dropout: \
losses, weights, buffers, an evaluation |
| microbatches | each batch split in two, compared with the same loop; models marked * compared \
with a loop that accumulates the same parts (below) |
| two ranks | two processes compared with one, with the same microbatches and the model's own \
dropout, layer drop and masking |
| sharded | the same with `layout.shard = 2`; the stage is in brackets |
| resumed | a run that is killed (`SIGKILL`) after step 3 and resumes from the checkpoint of step \
2, compared with an uninterrupted run, with dropout: bitwise identical |

Each value is the largest difference: of losses, relative to the loss; of tensors, relative to \
the change of the tensor by training (at least a thousandth of the largest change of any tensor).
No difference may exceed the bound of its case: {bound:g} in float64, {wide:g} in float32.
A case marked *refused* is refused before step 1; [refusals](refusals.md) gives the reason.

Models marked * combine the samples of a forward pass (BatchNorm), or count the padding of a \
batch in the loss: PyTorch itself computes other results for two halves of a batch than for the \
whole batch.

Made with Python {python}, torch {torch}, {packages}, on a CPU.

| model | package | {heads} | bound |
| --- | --- | {lines} | --- |
{rows}
"""


def cases() -> list[tuple[str, str, Case]]:
    """Each case with its package."""
    return [
        (package, name, case)
        for package, modules in MODULES.items()
        for module in modules
        for name, case in importlib.import_module(f"tests.models.{module}").CASES.items()
    ]


def row(package: str, name: str, case: Case) -> str:
    found = check(case)
    found["two ranks sharded"] += f" ({case.stage})"
    cells = " | ".join(found[what] for what in COMPARISONS)
    return f"| {name}{' *' if case.joins_samples else ''} | {package} | {cells} | {case.bound:g} |"


def read_rows() -> dict[tuple[str, str], str]:
    """The rows that the page has, by package and name."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.is_file() else []
    cells = {
        line: [cell.strip(" *") for cell in line.split("|")]
        for line in lines
        if line.startswith("| ")
    }
    return {(found[2], found[1]): line for line, found in cells.items() if found[2] in MODULES}


def write(rows: dict[tuple[str, str], str]) -> None:
    heads = [
        what.removeprefix("two ranks ") if what.endswith("sharded") else what
        for what in COMPARISONS
    ]
    in_order = [rows[package, name] for package, name, _ in cases() if (package, name) in rows]
    text = TEXT.format(
        steps=STEPS,
        bound=BOUND,
        wide=WIDE,
        python=platform.python_version(),
        torch=torch.__version__.partition("+")[0],
        packages=", ".join(f"{name} {version(name)}" for name in MODULES),
        heads=" | ".join(heads),
        lines=" | ".join("---" for _ in heads),
        rows="\n".join(in_order),
    )
    PAGE.write_text(text, encoding="utf-8")


def main(words: list[str]) -> None:
    """Compare the cases whose package and name have one of `words`, or all; write their rows."""
    torch.set_num_threads(1)
    for package, name, case in cases():
        if not words or any(word in f"{package} {name}" for word in words):
            made = row(package, name, case)
            print(made, flush=True)
            write({**read_rows(), (package, name): made})


if __name__ == "__main__":
    main(sys.argv[1:])
