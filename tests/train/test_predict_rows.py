"""What `surefoot predict` writes has one row for each sample.

Or the error says which dimension is not the batch's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from surefoot.components.observe import console
from surefoot.core.errors import TaskError
from surefoot.train.record.outputs import Outputs
from tests.train.small import WHOLE_BATCHES, call, write_task

SIZES = (4, 4, 3)  # of three batches
ROWS = torch.arange(44, dtype=torch.float32).reshape(11, 4)


def batches(make: Any) -> list[Any]:
    return [make(rows, number) for number, rows in enumerate(ROWS.split(list(SIZES)))]


def collect(make: Any) -> Outputs:
    outputs = Outputs()
    for made, size in zip(batches(make), SIZES, strict=True):
        outputs.add(made, size)
    return outputs


NAMED = {
    "a tensor": (lambda rows, n: rows, ["output"]),
    "a tuple in a dict": (
        lambda rows, n: {"logits": rows, "hidden": (rows, rows * 2)},
        ["logits", "hidden.0", "hidden.1"],
    ),
    "a dict in a tuple": (lambda rows, n: (rows, {"deep": {"er": rows}}), ["0", "1.deep.er"]),
    "a tensor that carries a gradient": (
        lambda rows, n: rows.clone().requires_grad_() * 1.0,
        ["output"],
    ),
    "bf16": (lambda rows, n: rows.bfloat16(), ["output"]),
    "a list of tensors of whole batches": (
        lambda rows, n: [rows, rows, rows, rows],
        ["0", "1", "2", "3"],
    ),
}


@pytest.mark.parametrize("kind", NAMED)
def test_every_tensor_of_an_output_is_written_by_its_name(kind: str) -> None:
    make, names = NAMED[kind]
    arrays = collect(make).arrays()
    assert list(arrays) == names
    assert all(array.shape == (11, 4) for array in arrays.values())
    assert np.array_equal(arrays[names[0]], ROWS.numpy())


RAGGED = {
    "padded per batch": lambda rows, n: torch.cat([rows, rows.new_ones(len(rows), n)], dim=1),
    "two dimensions": lambda rows, n: rows.unsqueeze(2).expand(-1, 4, n + 1),
    "nested": lambda rows, n: torch.nested.nested_tensor(
        [row[: place + 1] for place, row in enumerate(rows)]
    ),
    "of detectors": lambda rows, n: [
        {"output": row[:place].unsqueeze(1)} for place, row in enumerate(rows)
    ],
    "a list for each sample": lambda rows, n: [row[: place + 1] for place, row in enumerate(rows)],
}


@pytest.mark.parametrize("kind", RAGGED)
def test_rows_of_unlike_shapes_are_padded_and_their_shapes_written(kind: str) -> None:
    arrays = collect(RAGGED[kind]).arrays()
    assert list(arrays) == ["output", "output.shape"]
    expected = (
        [
            row.numpy()
            for made in batches(RAGGED[kind])
            for row in (made.unbind() if isinstance(made, Tensor) else made)
        ]
        if kind != "of detectors"
        else [one["output"].numpy() for made in batches(RAGGED[kind]) for one in made]
    )
    assert len(arrays["output"]) == len(arrays["output.shape"]) == len(expected) == 11
    for row, shape, wanted in zip(arrays["output"], arrays["output.shape"], expected, strict=True):
        assert np.array_equal(row[tuple(slice(length) for length in shape)], wanted)
        assert row.sum() == wanted.sum()  # zeros behind


REFUSED = {
    "time first": (
        lambda rows, n: rows.T.unsqueeze(2)[:, None][:2].squeeze(1),
        "dimension 0 has 2 rows for a batch of 4",
        "batch first",
    ),
    "maps of attention": (
        lambda rows, n: rows.new_zeros(2, 7, len(rows)),
        "its dimension 2 is the batch's",
        "movedim(2, 0)",
    ),
    "one for all": (
        lambda rows, n: rows.mean(),
        "forward returned a Tensor without a row",
        "first dimension is the batch's",
    ),
    "a text": (
        lambda rows, n: "text",
        "forward returned a str without a row",
        "first dimension is the batch's",
    ),
    "another dimension": (
        lambda rows, n: rows if n else rows.unsqueeze(2),
        "2 dimensions in one batch and 3",
        "for every batch",
    ),
    "not in every batch": (
        lambda rows, n: {"a": rows, **({"b": rows} if n else {})},
        "'b' for 7 of 11 samples",
        "for every batch",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_row_for_each_sample_is_refused_with_the_dimension(kind: str) -> None:
    make, words, hint = REFUSED[kind]
    with pytest.raises(TaskError) as caught:
        collect(make).arrays()
    assert words in caught.value.message
    assert hint in str(caught.value.hint)


def test_parts_without_rows_beside_others_are_left_out_and_named() -> None:
    outputs = collect(
        lambda rows, n: {
            "logits": rows,
            "loss": rows.mean(),
            "cache": object(),
            "positions": torch.arange(9),
        }
    )
    assert list(outputs.arrays()) == ["logits"]
    assert outputs.left_out == {
        "loss": "a tensor without dimensions",
        "cache": "of type object",
        "positions": "of shape (9,): dimension 0 has 9 rows for a batch of 3 samples",
    }


def test_predict_writes_ragged_rows_and_names_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = (
        "{'wide': torch.cat([model(batch[0]), batch[0][:, :int(batch[1][0])]], 1), "
        "'deep': (batch[0],), 'none': None}"
    )
    task = write_task(tmp_path, change=("        return model(batch[0])", f"        return {made}"))
    path = tmp_path / "mine.py"
    path.write_text(
        path.read_text().replace("cross_entropy(output,", "cross_entropy(output['wide'][:, :3],")
    )
    run = str(tmp_path / "a")
    assert (
        call(
            monkeypatch,
            "train",
            task,
            "--steps",
            "2",
            "--set",
            "train.batch=4",
            "--quiet",
            "--run",
            run,
        )
        == 0
    )
    assert call(monkeypatch, "predict", run, "--output", str(tmp_path / "out.npz"), "--quiet") == 0
    arrays = np.load(tmp_path / "out.npz")
    assert {name: array.shape for name, array in arrays.items()} == {
        "wide": (24, 5),
        "wide.shape": (24, 1),
        "deep.0": (24, 4),
    }
    assert arrays["wide.shape"][:12:4, 0].tolist() == [3, 4, 5]
    assert "'none' is left out, of type NoneType" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["predict", "evaluate"])
@pytest.mark.parametrize(
    ("data", "lines"), [("Arrays", ["16/24", "24/24"]), ("DataLoader", ["9", "18", "24"])]
)
def test_progress_counts_done_and_total_in_samples(
    verb: str,
    data: str,
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    task = write_task(tmp_path, change=WHOLE_BATCHES if data == "DataLoader" else ("", ""))
    run = str(tmp_path / "a")
    assert (
        call(
            monkeypatch,
            "train",
            task,
            "--steps",
            "2",
            "--set",
            "evaluate.batch=16",
            "--quiet",
            "--run",
            run,
        )
        == 0
    )
    monkeypatch.setattr(console, "LINE_EVERY_S", -1.0)
    capsys.readouterr()
    assert call(monkeypatch, verb, run) == 0
    assert capsys.readouterr().err.splitlines() == [f"test {done} samples" for done in lines]


@pytest.mark.parametrize("batch", [3, 4, 6])
def test_a_time_as_long_as_the_batch_is_told_from_it(
    batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = f"model(batch[0])[None].expand({batch}, -1, -1)"
    task = write_task(tmp_path, change=("        return model(batch[0])", f"        return {made}"))
    path = tmp_path / "mine.py"
    path.write_text(path.read_text().replace("cross_entropy(output,", "cross_entropy(output[-1],"))
    run = str(tmp_path / "a")
    assert (
        call(
            monkeypatch,
            "train",
            task,
            "--steps",
            "2",
            "--set",
            f"train.batch={batch}",
            "--quiet",
            "--run",
            run,
        )
        == 0
    )
    assert call(monkeypatch, "predict", run, "--quiet") == 2
    said = capsys.readouterr().err
    assert f"its dimension 0 has {batch} rows, not" in said
    assert "output.movedim(1, 0)" in said
