"""Tests of URLs of shards.

Braces, kinds that are refused, secrets that stay out of errors, packages that are missing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from surefoot.components.data.remote.names import expand, find_places
from surefoot.components.data.remote.shards import Remote
from surefoot.components.data.tars.source import Tars
from surefoot.core.errors import DataError, MissingExtra
from tests.components.remote_shards import QUICK, read, remote, served
from tests.components.server import Served

__all__ = ["served"]  # a fixture


def test_braces_stand_for_shards() -> None:
    assert expand("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expand("{a,b}{9..10}") == ["a9", "a10", "b9", "b10"]
    assert [place.name for place in find_places(["s3://b/x/2.tar", "s3://b/x/1.tar"])] == [
        "1.tar",
        "2.tar",
    ]
    signed = find_places("https://me:secret@host/d/1.tar?key=secret")[0]
    assert "secret" not in signed.shown
    assert signed.sibling_url("SHA256SUMS").url == "https://me:secret@host/d/SHA256SUMS?key=secret"


REFUSED = {
    "pipe:cat /etc/passwd": "shards are not read from pipe",
    "file:///etc/passwd": "shards are not read from file",
    "ftp://host/a.tar": "shards are not read from ftp",
    "simplecache::https://host/a.tar": "shards are not read from",
    "https://host/a.tar::pipe:x": "shards are not read from",
    "https://host/..": "names no shard",
    "https://host/d/": "names no shard",
    "https:///a.tar": "names no shard",
    "s3://b/{x}.tar": "names no shard",
    "s3://b/{0..1.tar": "is not a pattern",
    "s3://b/{0..99999}-{0..99}.tar": "expands to more than 1,000,000 shards",
    "s3://b/{a,a}.tar": "is given twice",
    "s3://b/{c,d}/{1..2}.tar": "are in 2 folders",
}


@pytest.mark.parametrize("url", REFUSED)
def test_other_urls_are_refused_before_anything_is_asked_for(url: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=REFUSED[url]):
        Tars(url, cache=tmp_path, label="cls")


def test_what_cannot_be_is_told(served: Served, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="some shards are URLs and some are files"):
        Tars([served.url + "/a.tar", "b.tar"], cache=tmp_path, label="cls")
    with pytest.raises(DataError, match=r"digests has the entry other\.tar, which is not a shard"):
        remote(served, tmp_path, digests={"other.tar": "0" * 64})
    with pytest.raises(DataError, match=r"the digest of s-00\.tar is 'abc'"):
        remote(served, tmp_path, digests={"s-00.tar": "abc"})
    with pytest.raises(DataError, match="is not possible"):
        remote(served, tmp_path, ahead=-1)


def test_a_secret_in_a_url_is_in_no_error(served: Served, tmp_path: Path) -> None:
    served.fault = lambda asked: 403
    source = Remote(
        f"{served.url}/d/s-00.tar?key=secret", cache=tmp_path, digests={}, patience=QUICK
    )
    with pytest.raises(DataError) as told:
        source.open(0)
    assert "secret" not in str(told.value)


def test_the_package_that_is_missing_is_named(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_aiohttp(url: str) -> None:
        raise ImportError(f"no {url}") from ModuleNotFoundError(
            "No module named 'aiohttp'", name="aiohttp"
        )

    monkeypatch.setattr("fsspec.core.url_to_fs", without_aiohttp)
    with pytest.raises(MissingExtra, match="needs the package aiohttp"):
        read(remote(served, tmp_path))
    monkeypatch.setitem(sys.modules, "braceexpand", None)
    with pytest.raises(MissingExtra, match="needs the package braceexpand"):
        remote(served, tmp_path)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtra, match="needs the package fsspec"):
        read(remote(served, tmp_path))
