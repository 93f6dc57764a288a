"""Shards on a server or in an object store: downloaded whole into a bounded cache, or streamed.

Each downloaded shard is verified against its digest.
"""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.data", __name__)
