"""Shards on a server or in an object store: fetched whole into a bounded cache, each held against its digest, or streamed."""

from surefoot.components.data.remote.names import is_url
from surefoot.components.data.remote.shards import Remote

__all__ = ["Remote", "is_url"]
