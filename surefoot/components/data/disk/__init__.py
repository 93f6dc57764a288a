"""Samples on disk: images written as tars, copies on faster storage, and measured read speed."""

from surefoot.components.data.disk.convert import ConvertedShards, ShardNaming, convert
from surefoot.components.data.disk.stage import Staged, stage

__all__ = ["ConvertedShards", "ShardNaming", "Staged", "convert", "stage"]
