"""Where both cores train, what must a save take from them?

The CPU time of its parts, and what the disk alone costs a step.

python benchmarks/checkpoint/parts.py [FOLDER]     the disk of FOLDER is what is measured
"""

from __future__ import annotations

import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.checkpoint.arms import flat, make_state
from benchmarks.checkpoint.stall import BATCH, Wide
from surefoot.components.checkpoint import tensor_files as files
from surefoot.components.checkpoint.direct import BUFFER_BYTES
from surefoot.components.checkpoint.save import Content, Stamp, commit
from surefoot.contract import commits, digest, manifest

MEGABYTES, REPEATS, CALM_STEPS = 400, 5, 5
DISK = {
    "written": "dd if=/dev/zero of={file} bs=4M count=95 oflag=direct conv=fsync",
    "read": "dd if={file} of=/dev/null bs=1M iflag=direct",
    "deleted": "rm {file} && sync {folder}",
}


def time_parts(folder: Path) -> dict[str, list[float]]:
    """CPU milliseconds of this process, for each part and time."""
    tensors = flat(make_state(MEGABYTES))
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    block = np.empty(BUFFER_BYTES, np.uint8)

    def copy() -> None:
        for name, tensor in tensors.items():
            np.copyto(copies[name].numpy(), tensor.numpy())

    def hash_all() -> None:
        with commits.hashing() as pool:
            digest.begin(
                pool, {name: files.as_buffer(tensor) for name, tensor in tensors.items()}
            ).finish()

    def fill_blocks() -> None:
        for tensor in tensors.values():
            whole = tensor.view(torch.uint8).numpy()
            for start in range(0, len(whole), BUFFER_BYTES):
                part = whole[start : start + BUFFER_BYTES]
                np.copyto(block[: len(part)], part)

    parts: dict[str, Callable[[], object]] = {
        "the copy of the state": copy,
        "digests": hash_all,
        "whether all is finite": lambda: [files.is_finite(tensor) for tensor in tensors.values()],
        "blocks for the disk": fill_blocks,
    }
    found = {what: [_cpu_ms(call) for _ in range(REPEATS)] for what, call in parts.items()}
    content = Content(step=1, tensors={"model.safetensors": tensors}, finite=frozenset(tensors))
    found["a whole commit"] = [
        _cpu_ms(lambda: commit(folder, content, Stamp(), link=False)) for _ in range(REPEATS)
    ]
    found["reading it back"] = [
        _cpu_ms(lambda: commits.check(manifest.step_folder(folder, 1))) for _ in range(REPEATS)
    ]
    return found


def _cpu_ms(call: Callable[[], object]) -> float:
    started_s = time.process_time()
    call()
    return (time.process_time() - started_s) * 1e3


def time_disk(folder: Path) -> dict[str, list[float]]:
    """Milliseconds that training on two threads loses while another process uses the disk.

    One value for each time that the other process writes, reads or deletes as much.
    """
    torch.set_num_threads(2)
    task = Wide()
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = task.numbers().split(BATCH)

    def step_s() -> float:
        started_s = time.perf_counter()
        optimizer.zero_grad()
        model(batches[0]).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - started_s

    lost: dict[str, list[float]] = {what: [] for what in DISK}
    for _ in range(REPEATS):
        for what, command in DISK.items():
            calm_s = statistics.median(step_s() for _ in range(CALM_STEPS))
            words = command.format(
                file=shlex.quote(str(folder / "bytes")), folder=shlex.quote(str(folder))
            )
            beside = subprocess.Popen(("sh", "-c", words), stderr=subprocess.DEVNULL)
            extra_s, is_done = 0.0, False
            while not is_done:
                is_done = beside.poll() is not None  # the step in which it ends counts, too
                extra_s += step_s() - calm_s
            lost[what].append(extra_s * 1e3)
    return lost


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as made:
        torch.set_num_threads(1)
        parts, disk = time_parts(Path(made)), time_disk(Path(made))
    for what, found in parts.items():
        _say(f"{what}: {{}} ms of CPU time", found)
    for what, found in disk.items():
        _say(f"{MEGABYTES} MB {what} by another process: steps take {{}} ms more", found)


def _say(words: str, found: list[float]) -> None:
    number = (
        f"{statistics.median(found):.0f} ({min(found):.0f} to {max(found):.0f}, n = {len(found)})"
    )
    print(words.format(number), file=sys.stderr)


if __name__ == "__main__":
    main()
