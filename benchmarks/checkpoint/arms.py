"""One process of the benchmark.

Saves and loads a state of a given size in one way, or trains while it is saved.

python -m benchmarks.checkpoint.arms save WAY MEGABYTES REPORT FOLDER
python -m benchmarks.checkpoint.arms stall background|blocking THREADS REPORT FOLDER
python -m benchmarks.checkpoint.arms small - 0 REPORT FOLDER
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.checkpoint.small import measure_small
from benchmarks.checkpoint.stall import measure_stall
from surefoot.components import checkpoint
from surefoot.components.checkpoint import Content, Stamp
from surefoot.trial import write_report

REPEATS = 3
CHUNK = 16 << 20


def make_state(megabytes: int) -> dict[str, dict[str, Tensor]]:
    """A model and its AdamW moments, `megabytes` (10^6 bytes) in all: 24 layers of equal size."""
    numbers = megabytes * 10**6 // 4 // 3 // 24
    generator = torch.Generator().manual_seed(0)
    names = [f"layers.{number}.weight" for number in range(24)]
    model = {name: torch.randn(numbers, generator=generator) for name in names}
    moments = {
        f"{name}.{kind}": torch.randn(numbers, generator=generator)
        for name in names
        for kind in ("exp_avg", "exp_avg_sq")
    }
    return {"model": model, "optimizer": moments}


def flat(state: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        f"{part}.{name}": tensor for part, held in state.items() for name, tensor in held.items()
    }


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# ---- ways: each saves into a folder and loads it back into `into`


def save_raw(state: dict[str, dict[str, Tensor]], folder: Path) -> None:
    """The same bytes, written and synced: what the disk allows."""
    with (folder / "state.bin").open("wb", buffering=0) as file:
        for tensor in flat(state).values():
            buffer = memoryview(tensor.view(torch.uint8).numpy().data)
            for start in range(0, len(buffer), CHUNK):
                os.write(file.fileno(), buffer[start : start + CHUNK])
        os.fsync(file.fileno())


def load_raw(into: dict[str, dict[str, Tensor]], folder: Path) -> None:
    """The same bytes, read and hashed in chunks on two threads: what two cores allow."""
    path = folder / "state.bin"
    with path.open("rb") as file, ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda start: hashlib.sha256(os.pread(file.fileno(), CHUNK, start)).digest(),
                range(0, path.stat().st_size, CHUNK),
            )
        )


def save_surefoot(state: dict[str, dict[str, Tensor]], folder: Path) -> None:
    tensors = {"model.safetensors": state["model"], "optimizer.safetensors": state["optimizer"]}
    finite = frozenset(name for held in tensors.values() for name in held)
    checkpoint.commit(
        folder,
        Content(step=1, tensors=tensors, texts={"state.json": b"{}"}, finite=finite),
        Stamp(),
        link=False,
    )


def load_surefoot(into: dict[str, dict[str, Tensor]], folder: Path) -> None:
    one = checkpoint.Commit(folder, 1)
    for part in into:
        one.read(f"{part}.safetensors", lambda name, piece, part=part: into[part][name])  # type: ignore[misc]


def save_torch(state: dict[str, dict[str, Tensor]], folder: Path) -> None:
    torch.save(state, folder / "state.pt")
    sync(folder / "state.pt")


def load_torch(into: dict[str, dict[str, Tensor]], folder: Path) -> None:
    read = torch.load(folder / "state.pt", weights_only=True)
    copy_into(flat(into), flat(read))


def save_safetensors(state: dict[str, dict[str, Tensor]], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(flat(state), folder / "state.safetensors")
    sync(folder / "state.safetensors")


def load_safetensors(into: dict[str, dict[str, Tensor]], folder: Path) -> None:
    from safetensors.torch import load_file

    copy_into(flat(into), load_file(folder / "state.safetensors"))


def save_dcp(state: dict[str, dict[str, Tensor]], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(flat(state), checkpoint_id=folder / "dcp", no_dist=True)


def load_dcp(into: dict[str, dict[str, Tensor]], folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(flat(into), checkpoint_id=folder / "dcp", no_dist=True)


def copy_into(into: dict[str, Tensor], read: dict[str, Tensor]) -> None:
    for name, tensor in read.items():
        into[name].copy_(tensor)


WAYS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "raw": (save_raw, load_raw),
    "surefoot": (save_surefoot, load_surefoot),
    "torch_save": (save_torch, load_torch),
    "safetensors": (save_safetensors, load_safetensors),
    "dcp": (save_dcp, load_dcp),
}


def measure_way(way: str, megabytes: int, folder: Path) -> dict[str, float]:
    """Seconds of a save and of a load, the median of REPEATS.

    What is read lies on the disk, not in the page cache.
    """
    torch.set_num_threads(1)
    save, load = WAYS[way]
    state = make_state(megabytes)
    into = {
        part: {name: torch.empty_like(tensor) for name, tensor in held.items()}
        for part, held in state.items()
    }
    saves, loads = [], []
    for _ in range(REPEATS):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        saves.append(timed(lambda: save(state, folder)))
        evict(folder)
        loads.append(timed(lambda: load(into, folder)))
    if way != "raw":
        assert all(
            torch.equal(tensor, into[part][name])
            for part, held in state.items()
            for name, tensor in held.items()
        )
    shutil.rmtree(folder)
    return {"save_s": statistics.median(saves), "load_s": statistics.median(loads)}


def evict(folder: Path) -> None:
    """Take what was written out of the page cache, as it is after a restart."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def timed(call: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def main() -> None:
    kind, way, size, report, folder = sys.argv[1:]
    if kind == "save":
        made = measure_way(way, int(size), Path(folder))
    else:
        made = (
            measure_stall(way, int(size), Path(folder))
            if kind == "stall"
            else measure_small(Path(folder))
        )
    write_report(report, made)


if __name__ == "__main__":
    main()
