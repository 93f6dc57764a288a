"""Throughput meter, and the writers and displays that read the event stream."""

from surefoot.components.observe.console import Console, final_table
from surefoot.components.observe.journal import Journal, NoJournal
from surefoot.components.observe.memory_use import peak_resident_bytes, take_device_memory
from surefoot.components.observe.meter import Meter, Summary
from surefoot.components.observe.tensorboard import TensorBoard

__all__ = [
    "Console",
    "Journal",
    "Meter",
    "NoJournal",
    "Summary",
    "TensorBoard",
    "final_table",
    "peak_resident_bytes",
    "take_device_memory",
]
