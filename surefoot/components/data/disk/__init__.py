"""Samples on disks: written as tars, copied to faster storage, and how fast they are read there."""

from surefoot.components.data.disk.convert import Converted, Layout, convert
from surefoot.components.data.disk.given import Folder, Samples, of_arrays
from surefoot.components.data.disk.stage import Staged, stage

__all__ = ["Converted", "Folder", "Layout", "Samples", "Staged", "convert", "of_arrays", "stage"]
