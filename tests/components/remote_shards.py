"""Six small tars behind a real server, read through a cache."""

from __future__ import annotations

import hashlib
import io
import os
import random
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surefoot.components.data.remote import fetch
from surefoot.components.data.remote.fetch import RetryPolicy
from surefoot.components.data.remote.shards import Remote
from tests.components.server import Served, serving

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

SHARDS, SAMPLES = 6, 4
QUICK = RetryPolicy(tries=4, first_wait_s=0.01, longest_wait_s=0.02, request_s=2.0)


def make_tar(shard: int, samples: int = SAMPLES) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number in range(shard * samples, (shard + 1) * samples):
            for extension, content in (
                ("cls", b"%d" % number),
                ("txt", random.Random(number).randbytes(600).hex().encode()),
            ):
                member = tarfile.TarInfo(f"{number:04d}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


CONTENT = {f"/d/s-{shard:02d}.tar": make_tar(shard) for shard in range(SHARDS)}
SIZE = len(CONTENT["/d/s-00.tar"])
DIGESTS = {
    path.rpartition("/")[2]: hashlib.sha256(content).hexdigest()
    for path, content in CONTENT.items()
}
URL = "/d/s-{00..05}.tar"


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(dict(CONTENT)) as made:
        yield made


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PIECE_BYTES", 4096)


def remote(served: Served, folder: Path, **how: object) -> Remote:
    how = {"cache_bytes": "1 GiB", "ahead": 0, "patience": QUICK, "digests": DIGESTS} | how
    return Remote(served.url + URL, cache=folder, **how)  # type: ignore[arg-type]


def read(source: Remote, number: int = 0) -> bytes:
    descriptor = source.open(number)
    try:
        return os.pread(descriptor, 1 << 20, 0)
    finally:
        os.close(descriptor)


def files(folder: Path, pattern: str = "*/*.tar") -> list[Path]:
    return sorted(folder.glob(pattern))


def drafts(folder: Path) -> list[Path]:
    return files(folder, "*/.draft-*")


def wait_until(holds: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + 60
    while not holds() and time.monotonic() < until_s:
        time.sleep(0.01)
    return holds()
