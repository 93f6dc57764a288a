"""Tars of samples in the layout of WebDataset: read in sequence, or any sample by an index of where each begins."""

from surefoot.components.data.tars.source import Tars
from surefoot.components.data.tars.stream import TarStream

__all__ = ["TarStream", "Tars"]
