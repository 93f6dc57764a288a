"""URLs of shards: brace patterns, supported schemes, and removal of secrets from a URL."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from surefoot.core.errors import DataError, require_package

EXTRA = "store"
SCHEMES = ("https", "http", "s3")
MAX_SHARDS = 1_000_000  # shards
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
LIKE_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)|pipe:")


def is_url(text: object) -> bool:
    """Return whether `text` names something other than a local file.

    It may be a URL with any scheme, even if this scheme is not supported, or begin with `pipe:`.
    """
    return isinstance(text, str) and LIKE_URL.match(text) is not None


@dataclass(frozen=True)
class ShardUrl:
    """URL of one shard.

    `shown` is the URL without user, password and query, which may contain secrets. `name` is the
    last component of its path.
    """

    url: str
    shown: str
    name: str

    def sibling_url(self, name: str) -> ShardUrl:
        """Return the URL of the file `name` in the same folder, with the same query."""
        base, mark, query = (
            self.url.partition("?") if self.url.startswith("http") else (self.url, "", "")
        )
        return ShardUrl(
            f"{base.rpartition('/')[0]}/{name}{mark}{query}",
            f"{self.shown.rpartition('/')[0]}/{name}",
            name,
        )


def find_places(urls: str | Sequence[str]) -> list[ShardUrl]:
    """Expand patterns such as `{000..099}` and `{a,b}` in URLs; return the shards, sorted by name.

    Raises DataError for a scheme that is not supported, for names with characters other than
    letters, digits, '.', '_' and '-', for duplicates, and for shards in several folders.
    """
    given = [urls] if isinstance(urls, str) else list(urls)
    places = sorted(
        (_read(url) for pattern in given for url in expand(pattern)), key=lambda place: place.name
    )
    check_set(
        [place.name for place in places], {place.shown.rpartition("/")[0] for place in places}
    )
    return places


def check_set(names: Sequence[str], folders: Collection[str | Path]) -> None:
    """Raise DataError unless there is a shard, all are in one folder, and no name is repeated."""
    if not names:
        raise DataError("no shard is given", hint="give one shard or more")
    if len(folders) != 1:
        raise DataError(
            f"the shards are in {len(folders)} folders",
            hint="give only shards of the same folder",
        )
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"the shard {twice} is given twice", hint="give each shard once")


def expand(pattern: str) -> list[str]:
    """Expand the braces in a pattern, as bash does; return all resulting texts.

    >>> expand("s3://b/{08..10}-{a,b}.tar")[:3]
    ['s3://b/08-a.tar', 's3://b/08-b.tar', 's3://b/09-a.tar']
    """
    if "{" not in pattern:
        return [pattern]
    with require_package("braceexpand", "braceexpand", extra=EXTRA, needed_for="braces in a URL"):
        from braceexpand import braceexpand
    try:
        urls = list(itertools.islice(braceexpand(pattern, escape=False), MAX_SHARDS + 1))
    except ValueError as error:  # unbalanced braces
        raise DataError(
            f"{pattern[:200]} is not a pattern: {error}", hint="write {000..099} or {a,b}"
        ) from None
    if len(urls) > MAX_SHARDS:
        raise DataError(
            f"{pattern[:200]} expands to more than {MAX_SHARDS:,} shards", hint="make larger shards"
        )
    return urls


def _read(url: str) -> ShardUrl:
    parts = urlsplit(url)
    hint = (
        "give https://host/folder/name.tar, or s3://bucket/folder/name.tar; the schemes "
        f"are {', '.join(SCHEMES)}"
    )
    if parts.scheme not in SCHEMES or "::" in url:
        raise DataError(
            f"shards are not read from {parts.scheme or url[:40]}: {_display_url(url)}", hint=hint
        )
    path = url.removeprefix(f"s3://{parts.netloc}") if parts.scheme == "s3" else parts.path
    name = path.rpartition("/")[2]
    if not parts.netloc or not PLAIN.match(name):
        raise DataError(
            f"{_display_url(url)} names no shard",
            hint=f"{hint}; a name has letters, digits, '.', '_' and '-'",
        )
    return ShardUrl(url, _display_url(url), name)


def _display_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme in ("http", "https"):
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:300]
    return url[:300] if parts.scheme == "s3" else url.split("?")[0][:80]
