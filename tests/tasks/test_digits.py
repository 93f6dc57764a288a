"""The digits: which images are trained on, how they are moved, and that a run reaches its score."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from surefoot import Run
from surefoot.components.data.order import Keys
from surefoot.contract import spec_file
from surefoot.core.errors import DataError, MissingExtra, TaskError
from surefoot.core.units import Duration
from surefoot.tasks import digits
from surefoot.tasks.digits import Digits

load_digits = pytest.importorskip("sklearn.datasets", reason="needs the extra 'demo'").load_digits


def keys(ids: list[int]) -> Keys:
    return Keys(seed=0, epoch=0, ids=np.array(ids, dtype=np.int64))


def everything(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    source = Digits().data(split)
    images, labels = source.read(np.arange(len(source)))
    return images, labels


def test_the_two_splits_are_1437_and_360_of_the_1797_images_and_share_none() -> None:
    (train, train_labels), (test, test_labels) = everything("train"), everything("test")
    assert (len(train), len(test)) == (1437, 360)
    both = np.concatenate([train, test]).reshape(1797, -1)
    assert len(np.unique(both, axis=0)) == 1797
    assert (float(both.min()), float(both.max())) == (0.0, 1.0)
    assert train_labels.dtype == test_labels.dtype == torch.int64


def test_the_split_is_stratified_so_each_digit_has_a_fifth_of_its_images_in_the_test() -> None:
    train, test = (
        torch.bincount(everything(split)[1], minlength=10) for split in ("train", "test")
    )
    assert float((test - (train + test) / 5).abs().max()) <= 1.0


def test_a_digit_moves_by_at_most_the_shift_and_a_sample_s_move_does_not_depend_on_its_batch() -> (
    None
):
    images = torch.zeros(50, 1, 8, 8)
    images[:, 0, 3, 4] = 1.0
    moved, _ = Digits(shift=1.0).augment((images, torch.zeros(50)), keys(list(range(50))))
    along = torch.arange(8.0)
    # the ink's center
    rows, columns = moved.sum((1, 3)) @ along - 3.0, moved.sum((1, 2)) @ along - 4.0
    assert float(torch.stack([rows, columns]).abs().max()) <= 1.0
    assert float(rows.std()) > 0.4  # uniform in [-1, 1] has 0.58
    assert float(columns.std()) > 0.4
    torch.testing.assert_close(moved.sum((1, 2, 3)), torch.ones(50))
    alone, _ = Digits(shift=1.0).augment((images[:1], torch.zeros(1)), keys([17]))
    torch.testing.assert_close(alone[0], moved[17], rtol=0.0, atol=0.0)


def test_ink_that_leaves_the_image_is_gone_and_blank_comes_in() -> None:
    moved, _ = Digits(shift=7.9).augment(
        (torch.ones(200, 1, 8, 8), torch.zeros(200)), keys(list(range(200)))
    )
    assert float(moved.min()) == 0.0
    assert float(moved.sum((1, 2, 3)).min()) < 8.0


def test_without_a_shift_images_stay_as_they_are() -> None:
    images, labels = everything("train")
    moved, _ = Digits(shift=0.0).augment((images, labels), keys(list(range(len(images)))))
    torch.testing.assert_close(moved, images, rtol=0.0, atol=0.0)


def test_evaluation_averages_the_logits_of_five_views_and_training_looks_once() -> None:
    torch.manual_seed(0)
    task, batch = Digits(width=4, reach=1.0), everything("test")
    model = task.model().eval()
    still = [
        Digits(width=4, reach=0.0).forward(model, (moved, batch[1]))
        for moved in five_views(batch[0])
    ]
    torch.testing.assert_close(
        task.forward(model, batch), torch.stack(still).mean(0), rtol=1e-5, atol=1e-6
    )
    model.train()
    torch.manual_seed(1)
    looked = task.forward(model, batch)
    torch.manual_seed(1)
    torch.testing.assert_close(looked, model(batch[0]), rtol=0.0, atol=0.0)


def five_views(images: torch.Tensor) -> list[torch.Tensor]:
    """As it is, and one whole pixel each way, by slices."""
    up, down, left, right = (torch.zeros_like(images) for _ in range(4))
    up[..., :-1, :], down[..., 1:, :] = images[..., 1:, :], images[..., :-1, :]
    left[..., :-1], right[..., 1:] = images[..., 1:], images[..., :-1]
    return [images, up, down, left, right]


def forget(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Let `package` be imported anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)


def test_an_unknown_split_a_size_of_nothing_and_a_missing_package_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(DataError, match='use "train" or "test"'):
        Digits().data("valid")
    with pytest.raises(ValueError, match="width of 1 or more"):
        Digits(width=0)
    with pytest.raises(ValueError, match="under 1"):
        Digits(dropout=1.0)
    with (
        pytest.raises(TaskError, match="cannot be built"),
        Run(spec_file.read("digits", [("task.shift", 8.0, "--set")]).spec),
    ):
        pass
    forget(monkeypatch, "sklearn")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingExtra, match=r"surefoot\[demo\]"):
        Digits().data("train")


def test_the_data_are_those_of_scikit_learn() -> None:
    pixels, labels = load_digits(return_X_y=True)
    read, named = digits._read()
    np.testing.assert_array_equal(read, pixels)
    np.testing.assert_array_equal(named, labels)


def test_a_package_that_is_there_and_broken_is_not_called_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").write_text("import a_part_of_its_own")
    forget(monkeypatch, "sklearn")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_part_of_its_own"):
        Digits().data("train")


def test_its_recipe_sees_at_most_60000_samples() -> None:
    length = Duration.parse(spec_file.read("digits").spec.train.length)
    assert length.unit == "epochs"
    assert length.value * 1437 <= 60_000


def test_a_narrow_net_reads_93_percent_of_the_test_digits_after_three_passes(
    tmp_path: Path,
) -> None:
    changes = [
        ("task.width", 8, ""),
        ("train.length", "3 epochs", ""),
        ("optim.lr", 0.01, ""),
        ("schedule.warmup", "5 steps", ""),
    ]
    with Run(spec_file.read("digits", changes).spec, folder=tmp_path / "run", quiet=True) as run:
        for _ in run.steps():
            pass
        assert run.evaluate().metrics["accuracy"] > 0.93
