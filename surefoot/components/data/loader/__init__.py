"""Data loader: batches read ahead by workers, in the order of the run."""

from surefoot.components.data.loader.ahead import Ahead
from surefoot.components.data.loader.bad import ReadResult, Sound, read_sound
from surefoot.components.data.loader.batches import StepBatches, bytes_of
from surefoot.components.data.loader.jobs import Job, Reader, look
from surefoot.components.data.loader.loader import Loader
from surefoot.components.data.loader.settings import Kind, LoaderNotice, LoaderSettings

__all__ = [
    "Ahead",
    "Job",
    "Kind",
    "Loader",
    "ReadResult",
    "Reader",
    "LoaderSettings",
    "Sound",
    "StepBatches",
    "LoaderNotice",
    "bytes_of",
    "look",
    "read_sound",
]
