"""Shards on a server or in an object store: downloaded whole into a bounded cache, or streamed.

Each downloaded shard is verified against its digest.
"""

from surefoot.components.data.remote.fetch import RetryPolicy
from surefoot.components.data.remote.names import is_url
from surefoot.components.data.remote.shards import Remote

__all__ = ["Remote", "RetryPolicy", "is_url"]
