"""Samples on disk: images written as tars, copies on faster storage, and measured read speed."""

from surefoot.components.data.disk.convert import ConvertedShards, ShardNaming, convert
from surefoot.components.data.disk.stage import StageResult, stage

__all__ = ["ConvertedShards", "ShardNaming", "StageResult", "convert", "stage"]
