"""CIFAR-10: what is read, how it is augmented and averaged, and how bad data is refused.

Small tars of real samples.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
import tarfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from surefoot.cli.main import main
from surefoot.components.data.order import Keys
from surefoot.components.data.tars.decoders import decode_class
from surefoot.components.data.tars.shards import read_shard
from surefoot.contract import spec_file
from surefoot.core.errors import DataError, TaskError
from surefoot.tasks.cifar10 import (
    PIXEL_DEVIATION,
    PIXEL_MEAN,
    Cifar10,
    NormalizeImages,
    find_whitening_filters,
)

NUM_TRAIN, NUM_TEST = 80, 20


def write_shard(path: Path, samples: list[tuple[str, dict[str, bytes]]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for key, parts in samples:
            for extension, content in sorted(parts.items()):
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture(scope="session")
def small_set(cifar10_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first samples of the real set: two train tars and one test tar."""
    folder = tmp_path_factory.mktemp("cifar10")
    for split, count in (("train", NUM_TRAIN), ("test", NUM_TEST)):
        rows = [
            (sample.key, sample.parts)
            for sample in islice(read_shard(cifar10_folder / f"{split}-00000.tar"), count)
        ]
        parts = (rows[: count // 2], rows[count // 2 :]) if split == "train" else (rows,)
        for number, part in enumerate(parts):
            write_shard(folder / f"{split}-{number:05d}.tar", part)
    return folder


@pytest.fixture(scope="session")
def task(small_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Cifar10:
    return Cifar10(
        folder=str(small_set), cache=str(tmp_path_factory.mktemp("cache")), widths=(8, 8, 8)
    )


def first(task: Cifar10, count: int) -> tuple[Tensor, Tensor]:
    images, labels = task.data("train").read(np.arange(count, dtype=np.int64))
    return images, labels


def keys(ids: list[int], epoch: int = 0) -> Keys:
    return Keys(seed=3, epoch=epoch, ids=np.array(ids, dtype=np.int64))


@pytest.mark.slow
def test_the_real_set_has_50000_and_10000_images_equally_many_of_each_class(
    cifar10_folder: Path,
) -> None:
    for split, each in (("train", 5000), ("test", 1000)):
        labels = [
            decode_class(sample, num_classes=10)
            for shard in sorted(cifar10_folder.glob(f"{split}-*.tar"))
            for sample in read_shard(shard, needs=("jpg", "cls"))
        ]
        assert np.bincount(labels).tolist() == [each] * 10


def test_both_splits_are_read_whole_in_the_order_of_their_tars(
    task: Cifar10, cifar10_folder: Path
) -> None:
    assert (len(task.data("train")), len(task.data("test"))) == (NUM_TRAIN, NUM_TEST)
    expected = [
        decode_class(sample, num_classes=10)
        for sample in islice(read_shard(cifar10_folder / "train-00000.tar"), NUM_TRAIN)
    ]
    images, labels = first(task, NUM_TRAIN)
    assert labels.tolist() == expected
    assert (images.shape, images.dtype) == ((NUM_TRAIN, 32, 32, 3), torch.uint8)
    assert task.data("train").digest != task.data("test").digest


def test_the_set_is_also_found_below_its_parent(small_set: Path, tmp_path: Path) -> None:
    shutil.copytree(small_set, tmp_path / "cifar10-webdataset")
    assert (
        len(Cifar10(folder=str(tmp_path), cache=str(tmp_path / "cache")).data("test")) == NUM_TEST
    )


def test_augmentation_of_a_sample_does_not_depend_on_the_batch_it_comes_in(task: Cifar10) -> None:
    source = task.data("train")
    for epoch in (0, 1):
        whole, _ = task.augment(
            source.read(np.arange(40, dtype=np.int64)), keys(list(range(40)), epoch)
        )
        alone, _ = task.augment(
            source.read(np.array([31, 7], dtype=np.int64)), keys([31, 7], epoch)
        )
        assert torch.equal(alone, whole[[31, 7]])
    again, _ = task.augment(source.read(np.arange(40, dtype=np.int64)), keys(list(range(40)), 0))
    assert not torch.equal(again, whole)


def test_two_epochs_in_a_row_show_both_sides_of_every_image(
    small_set: Path, tmp_path: Path
) -> None:
    still = Cifar10(folder=str(small_set), cache=str(tmp_path), translate=0)
    images, labels = first(still, 64)
    even, odd = (
        still.augment((images, labels), keys(list(range(64)), epoch))[0] for epoch in (0, 1)
    )
    mirrored = (even != images).flatten(1).any(1)
    assert torch.equal(odd, even.flip(2))
    assert 16 < int(mirrored.sum()) < 48  # half of 64, four standard deviations either way
    assert torch.equal(even[mirrored], images[mirrored].flip(2))


def test_pixels_are_normalized_with_the_statistics_of_their_channel(task: Cifar10) -> None:
    images, _ = first(task, 5)
    expected = (images.double() - torch.tensor(PIXEL_MEAN)) / torch.tensor(PIXEL_DEVIATION)
    torch.testing.assert_close(NormalizeImages()(images), expected.permute(0, 3, 1, 2).float())


def test_whitened_patches_are_uncorrelated_with_unit_variance(task: Cifar10) -> None:
    pixels = NormalizeImages()(first(task, NUM_TRAIN)[0])
    out = (
        torch.nn.functional.conv2d(pixels, find_whitening_filters(pixels))
        .transpose(0, 1)
        .flatten(1)
        .double()
    )
    covariance = out @ out.T / out.shape[1]
    off_diagonal = covariance - covariance.diag().diag()
    assert float(off_diagonal.abs().max()) < 1e-3
    # the large ones; the faint stay below 1 by the floor
    assert float(covariance.diag()[-6:].sub(1).abs().max()) < 0.1
    assert float(covariance.diag().max()) < 1.001


def test_the_model_is_a_function_of_seed_and_training_images(task: Cifar10) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        states.append(task.model().state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert "whiten.filters" in states[0]
    assert "whiten.filters" not in dict(task.model().named_parameters())


def test_evaluation_averages_six_views_and_training_takes_one(task: Cifar10) -> None:
    torch.manual_seed(0)
    model, batch = task.model().eval(), first(task, 6)
    padded = torch.from_numpy(
        np.pad(batch[0].numpy(), ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    )
    views = [(batch[0], 0.25), (padded[:, :32, :32], 0.125), (padded[:, 2:, 2:], 0.125)]
    with torch.no_grad():
        expected = sum(weight * (model(view) + model(view.flip(2))) for view, weight in views)
        torch.testing.assert_close(task.forward(model, batch), expected)
        task_of_one_view = Cifar10(
            folder=task.folder, cache=str(task.cache), widths=(8, 8, 8), views=1
        )
        torch.testing.assert_close(task_of_one_view.forward(model, batch), model(batch[0]))
        both = task.forward(model, (batch[0].flip(2), batch[1]))
    assert not torch.allclose(expected, model(batch[0]), atol=1e-4)
    assert both.shape == (6, 10)
    model.train()
    model.requires_grad_(False)
    torch.testing.assert_close(task.forward(model, batch), model(batch[0]))


def test_the_loss_is_a_sum_over_samples_with_their_count(task: Cifar10) -> None:
    logits, labels = torch.randn(8, 10, dtype=torch.float32), torch.arange(8)
    (whole,) = task.loss(logits, (logits, labels)).terms
    halves = [
        task.loss(logits[part], (logits, labels[part])).terms[0]
        for part in (slice(0, 3), slice(3, 8))
    ]
    assert whole.count == 8
    torch.testing.assert_close(whole.total, halves[0].total + halves[1].total)


@pytest.mark.parametrize(
    "changes",
    [
        {"widths": (8, 8)},
        {"widths": (0, 8, 8)},
        {"translate": 32},
        {"smoothing": 1.0},
        {"views": 3},
    ],
)
def test_parameters_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(TaskError, match="cannot be built"):
        Cifar10(**changes)  # type: ignore[arg-type]


def broken(small_set: Path, tmp_path: Path, extension: str, content: bytes | None) -> Cifar10:
    """The set with one part of its 41st training sample replaced or taken away."""
    folder = shutil.copytree(small_set, tmp_path / "set")
    shard = folder / "train-00001.tar"
    samples = [(sample.key, dict(sample.parts)) for sample in read_shard(shard)]
    if content is None:
        del samples[0][1][extension]
    else:
        samples[0][1][extension] = content
    write_shard(shard, samples)
    return Cifar10(folder=str(folder), cache=str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("extension", "content", "reason"),
    [
        ("cls", b"10", "is 10, not a class from 0 to 9"),
        ("cls", b"cat", "is b'cat', not a class number from 0 to 9"),
        ("cls", None, "is missing; the sample has jpg"),
        ("jpg", None, "is missing; the sample has cls"),
        ("jpg", b"\xff\xd8\xff", "is not an image of the formats JPEG, PNG, WEBP"),
        ("jpg", b"x" * (1 << 21), r"has 2,097,152 bytes, and at most 1,048,576 are allowed"),
    ],
)
def test_a_bad_sample_is_refused_with_its_tar_and_name(
    small_set: Path, tmp_path: Path, extension: str, content: bytes | None, reason: str
) -> None:
    with pytest.raises(DataError, match=rf"train-00001\.tar: 000040\.{extension} {reason}"):
        broken(small_set, tmp_path, extension, content).data("train")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_truncated_tar_is_refused_with_its_name(small_set: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small_set, tmp_path / "set")
    whole = (folder / "test-00000.tar").read_bytes()
    (folder / "test-00000.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"test-00000\.tar"):
        Cifar10(folder=str(folder), cache=str(tmp_path / "cache")).data("test")


def test_a_missing_folder_and_an_unknown_split_are_refused(task: Cifar10, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone is missing"):
        Cifar10(folder=str(tmp_path / "gone"), cache=str(tmp_path)).data("train")
    with pytest.raises(DataError, match="no split 'valid'"):
        task.data("valid")


def test_the_quick_recipe_is_the_full_one_with_two_epochs() -> None:
    full, quick = (spec_file.read(name).spec for name in ("cifar10", "cifar10_quick"))
    assert quick.train.length == "2 epochs"
    assert quick.optim.name == full.optim.name == "muon"
    assert quick.task.use == full.task.use == "cifar10"


def command(monkeypatch: pytest.MonkeyPatch, folder: Path, cache: Path, *words: str) -> int:
    """The exit code of `surefoot train cifar10` with a small net on one thread.

    Its run folder is `run` beside the cache.
    """
    small = (
        "task.widths=[8,8,8]",
        f"task.cache='{cache}'",
        "train.batch=40",
        "train.threads=1",
        "observe.tensorboard=false",
    )
    settings = [word for setting in small for word in ("--set", setting)]
    run = ("--run", str(cache.parent / "run"))
    monkeypatch.setattr(
        sys,
        "argv",
        ["surefoot", "train", "cifar10", "--data", str(folder), *run, *settings, *words],
    )
    with pytest.raises(SystemExit) as left:
        main()
    assert isinstance(left.value.code, int)
    return left.value.code


def test_the_recipe_trains_by_name_and_prints_its_accuracy(
    small_set: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, small_set, tmp_path / "cache", "--steps", "3") == 0
    assert re.search(r"accuracy +\d+(\.\d+)? %", capsys.readouterr().out)


@pytest.mark.parametrize("content", [b"10", None], ids=["label out of range", "no label"])
def test_a_bad_set_ends_the_command_with_code_2_and_nothing_written(
    content: bytes | None,
    small_set: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken(small_set, tmp_path, "cls", content)
    assert command(monkeypatch, tmp_path / "set", tmp_path / "cache") == 2
    shown = capsys.readouterr()
    assert "train-00001.tar: 000040.cls" in " ".join((shown.out + shown.err).split())
    assert "Traceback" not in shown.out + shown.err
    assert not (tmp_path / "run").exists()
