"""One arm: a set of tars is indexed from the page cache, or an index of ten million samples opened.

python -m benchmarks.data.arms index|open FOLDER REPORT
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
import tempfile
import time
from dataclasses import asdict
from io import BytesIO
from pathlib import Path

import numpy as np

from surefoot.components.data.tars.index import ALIGNED, open_index
from surefoot.trial import resident_bytes, write_report

# 4 GiB of what photographs take
SHARDS, SHARD_BYTES, IMAGE_BYTES = 64, 64 << 20, (8 << 10, 120 << 10)
LARGE_SHARDS, LARGE_SAMPLES = 100, 100_000  # ten million samples


def write_set(folder: Path, *, shards: int = SHARDS, shard_bytes: int = SHARD_BYTES) -> None:
    """Tars of samples of two members: as many random bytes as a photograph has, and a class."""
    drawn = np.random.default_rng(0)
    noise = drawn.bytes(IMAGE_BYTES[1] * 2)
    for number in range(shards):
        size = sample = 0
        with tarfile.open(folder / f"{number:05d}.tar", "w") as archive:
            while size < shard_bytes:
                begin, length = (
                    int(drawn.integers(IMAGE_BYTES[1])),
                    int(drawn.integers(*IMAGE_BYTES)),
                )
                for extension, content in (
                    ("jpg", noise[begin : begin + length]),
                    ("cls", b"%d" % drawn.integers(1000)),
                ):
                    member = tarfile.TarInfo(f"{number:05d}{sample:07d}.{extension}")
                    member.size = len(content)
                    archive.addfile(member, BytesIO(content))
                size, sample = size + length + 2048, sample + 1


def write_large_index(folder: Path) -> None:
    """Tars of nothing, and the index that ten million samples in them would have."""
    paths = [folder / f"{number:05d}.tar" for number in range(LARGE_SHARDS)]
    for path in paths:
        with tarfile.open(path, "w") as archive:
            member = tarfile.TarInfo("0.cls")
            member.size = 1
            archive.addfile(member, BytesIO(b"0"))
    made = open_index(paths, folder, beside=True)
    rows = []
    for path, shard in zip(paths, made.shards, strict=True):
        os.truncate(path, (LARGE_SAMPLES + 1) * 512)  # as long as its samples would be
        status = path.stat()
        changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
        rows.append(
            {
                **asdict(shard),
                "num_samples": LARGE_SAMPLES,
                "num_bytes": status.st_size,
                "changed_ns": changed_ns,
            }
        )
    head = (
        json.dumps({**json.loads(made.place.read_bytes().splitlines()[0]), "shards": rows}).encode()
        + b"\n"
    )
    starts = np.tile(np.arange(LARGE_SAMPLES + 1, dtype="<i8") * 512, LARGE_SHARDS)
    made.place.write_bytes(head + bytes(-len(head) % ALIGNED) + starts.tobytes())


def index(folder: Path, report: str) -> None:
    paths = sorted(folder.glob("*.tar"))
    num_bytes = sum(len(path.read_bytes()) for path in paths)  # from now on in the page cache
    with tempfile.TemporaryDirectory() as cache:
        begun_s = time.perf_counter()
        made = open_index(paths, Path(cache))
        took_s = time.perf_counter() - begun_s
    write_report(
        report, {"bytes_per_s": num_bytes / took_s, "took_s": took_s, "samples": float(len(made))}
    )


def open_large(folder: Path, report: str) -> None:
    paths = sorted(folder.glob("*.tar"))
    before = resident_bytes()
    begun_s = time.perf_counter()
    made = open_index(paths, folder)
    took_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    made.locate(np.random.default_rng(0).integers(0, len(made), 256))
    located_s = time.perf_counter() - begun_s
    measures = {
        "open_s": took_s,
        "batch_s": located_s,
        "resident_bytes": float(resident_bytes() - before),
        "samples": float(len(made)),
    }
    write_report(report, measures)


def main() -> None:
    what, folder, report = sys.argv[1:]
    {"index": index, "open": open_large}[what](Path(folder), report)


if __name__ == "__main__":
    main()
