"""Child process of `surefoot bench step`: it times each call of one mode of one spec.

`python -m surefoot.prove.bench.child`
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from surefoot.contract import spec_file
from surefoot.core.errors import SurefootError
from surefoot.prove.bench.rehearsal import MODES, Rehearsal
from surefoot.trial import peak_bytes, write_report


def main(words: Sequence[str] | None = None) -> None:
    """Time the calls that the arguments `words` request, and write a report.

    A call is a forward pass, a forward and backward pass, or a training step. The report has the
    seconds of each call, including the first. If the spec or the task is wrong, the process exits
    with the message of the error.
    """
    asked = _parser().parse_args(words)
    elapsed_s: list[float] = []
    try:
        with Rehearsal(spec_file.read_written(asked.spec), steps=asked.calls) as rehearsal:
            rehearsal.synchronize()
            for _ in range(asked.calls):
                started_s = time.perf_counter()
                rehearsal.take(asked.mode)
                elapsed_s.append(time.perf_counter() - started_s)
            measures = {
                "num_samples": float(rehearsal.num_samples),
                "peak_bytes": float(peak_bytes()),
            }
            if rehearsal.device.type == "cuda":
                measures["device_peak_bytes"] = float(
                    torch.cuda.max_memory_allocated(rehearsal.device)
                )
            facts = {"device": str(rehearsal.device), "threads": str(torch.get_num_threads())}
    except SurefootError as error:
        raise SystemExit(error.message) from None
    write_report(
        asked.report,
        {**measures, **{f"call_s/{i:05d}": value for i, value in enumerate(elapsed_s)}},
        facts=facts,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="surefoot.prove.bench.child")
    parser.add_argument("spec", type=Path)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    return parser


if __name__ == "__main__":
    main()
