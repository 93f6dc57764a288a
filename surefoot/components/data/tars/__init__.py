"""Tars of samples in the WebDataset layout: read sequentially, or by an index of positions."""

from surefoot.components.data.tars.source import Tars
from surefoot.components.data.tars.stream import TarStream

__all__ = ["TarStream", "Tars"]
