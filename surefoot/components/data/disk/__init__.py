"""Samples on disk: conversion to tars, copies on faster storage, and measured read speed."""

from surefoot.components.data.disk.convert import ConvertedShards, ShardNaming, convert
from surefoot.components.data.disk.given import Folder, Samples, of_arrays
from surefoot.components.data.disk.stage import Staged, stage

__all__ = [
    "ConvertedShards",
    "Folder",
    "ShardNaming",
    "Samples",
    "Staged",
    "convert",
    "of_arrays",
    "stage",
]
