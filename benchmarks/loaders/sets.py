"""CIFAR-10's training tars in the form that each peer reads.

The bytes of every JPEG stay as they are.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from surefoot.components.data.tars.shards import read_shard

COLUMNS = {"jpg": "bytes", "cls": "int"}


def read_set(tars: Path) -> Iterator[tuple[int, bytes, int]]:
    """Number, JPEG and class of each image."""
    number = 0
    for shard in sorted(tars.glob("train-*.tar")):
        for sample in read_shard(shard, needs=("jpg", "cls")):
            yield number, sample.parts["jpg"], int(sample.parts["cls"])
            number += 1


def write_files(tars: Path, folder: Path) -> None:
    """A folder for each class, as torchvision's ImageFolder reads them."""
    for number, jpeg, label in read_set(tars):
        home = folder / str(label)
        home.mkdir(parents=True, exist_ok=True)
        (home / f"{number:05d}.jpg").write_bytes(jpeg)


def write_litdata(tars: Path, folder: Path) -> None:
    """Chunks of litdata, written by its own writer in this process."""
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir(parents=True)
    writer = BinaryWriter(str(folder), chunk_bytes="16MB")
    for number, jpeg, label in read_set(tars):
        writer[number] = {"jpg": jpeg, "cls": label}
    writer.done()
    writer.merge()


def write_streaming(tars: Path, folder: Path) -> None:
    """Shards of mosaicml-streaming."""
    stand_in_for_torchvision()
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns=COLUMNS, size_limit="16mb") as writer:
        for _, jpeg, label in read_set(tars):
            writer.write({"jpg": jpeg, "cls": label})


def stand_in_for_torchvision() -> None:
    """mosaicml-streaming imports torchvision for data sets of its own, which are not used here.

    Its wheels bring CUDA along.
    """
    for name in (
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.functional",
        "torchvision.datasets",
    ):
        made = types.ModuleType(name)
        made.__spec__ = ModuleSpec(name, None)
        made.__dict__.update(to_tensor=None, VisionDataset=object, functional=None, transforms=None)
        sys.modules.setdefault(name, made)
