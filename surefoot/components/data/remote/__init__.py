"""Shards on a server or in an object store, downloaded into a limited cache or streamed.

Each downloaded shard is verified against its digest.
"""

from surefoot.core.old_homes import moved_to

__getattr__ = moved_to("surefoot.data", __name__)
