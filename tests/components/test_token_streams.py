"""Tests of token streams.

Windows and packed documents give every token to predict once, and no document sees another.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.components.data.sources import tokens as streams
from surefoot.components.data.sources.packed import (
    Packed,
    TokenFile,
    block_diagonal,
    find_documents,
    pack,
)
from surefoot.components.data.sources.tokens import Tokens
from surefoot.core.errors import DataError
from surefoot.tasks.pycorpus import PyCorpus
from surefoot.tasks.transformer import Transformer

IGNORED, END = -100, 9


def write_stream(path: Path, count: int = 1000, dtype: str = "uint16") -> np.ndarray:
    ids = (np.arange(count) % 5000).astype(dtype)
    ids.tofile(path)
    return ids


def by_hand(ids: np.ndarray, length: int, number: int) -> tuple[list[int], list[int]]:
    window = ids[number * length : number * length + length + 1].tolist()
    missing = length + 1 - len(window)
    return window[:-1] + [0] * missing, window[1:] + [IGNORED] * missing


# ---- windows


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64", "uint64"])
def test_windows_equal_those_cut_by_hand_for_every_dtype(dtype: str) -> None:
    ids = (np.arange(103) % 200).astype(dtype)
    for length in (1, 7, 10, 102, 103, 500):  # 102 divides, 500 is longer than the stream
        source = Tokens(ids, length)
        order = np.random.default_rng(0).permutation(len(source))
        batch = source.read(order)
        expected = [by_hand(ids, length, number) for number in order]
        assert batch["inputs"].tolist() == [inputs for inputs, _ in expected]
        assert batch["targets"].tolist() == [targets for _, targets in expected]
        assert batch["inputs"].dtype == batch["targets"].dtype == torch.int64


def test_a_token_file_reads_the_windows_of_its_numbers_and_is_mapped_again_in_another_process(
    tmp_path: Path,
) -> None:
    ids = write_stream(tmp_path / "train.bin")
    np.save(tmp_path / "train.npy", ids.astype(np.int32))
    for source in (TokenFile(tmp_path / "train.bin", 64), TokenFile(tmp_path / "train.npy", 64)):
        sent = pickle.dumps(source)
        assert len(sent) < 500
        for each in (source, pickle.loads(sent)):
            assert torch.equal(
                each.read(np.array([3, 15]))["inputs"],
                Tokens(ids, 64).read(np.array([3, 15]))["inputs"],
            )
    assert TokenFile(tmp_path / "train.bin", 64).digest == Tokens(ids, 64).digest


def test_a_long_stream_is_known_by_pieces_and_a_short_one_by_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "WHOLE_BYTES", 1 << 16)
    short, long = np.arange(30_000, dtype=np.uint16), np.arange(10_000_000, dtype=np.int32)
    for ids, changed in ((short, 12_345), (long, len(long) - 1), (long, 0)):
        other = ids.copy()
        other[changed] += 1
        assert Tokens(ids, 8).digest == Tokens(ids.copy(), 8).digest != Tokens(other, 8).digest
    alike = np.zeros(10_000_000, dtype=np.int32)
    kinds = (alike, alike[:-1], alike.view(np.uint32), alike.view(np.int16))
    assert len({Tokens(ids, 8).digest for ids in kinds}) == 4


def test_opening_a_large_map_reads_little_of_it(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(4 << 30)  # a hole: reading all of it would take seconds
    before = resident_bytes()
    source = TokenFile(path, 1024)
    batch = source.read(np.array([0, len(source) - 1]))
    assert batch["targets"][1, -1] == IGNORED
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


BAD_FILES: dict[str, tuple[bytes | None, dict[str, Any], str]] = {
    "missing": (None, {}, "cannot be read: No such file"),
    "empty": (b"", {}, "is empty"),
    "odd size": (b"abc", {}, "3 bytes, which is not a multiple of the 2 bytes of uint16"),
    "one token": (b"ab", {}, "nothing to predict"),
    "floats": (b"abcdefgh", {"dtype": "float32"}, "tokens of dtype float32 are not token ids"),
    "not a dtype": (b"abcdefgh", {"dtype": "int17"}, "'int17' is not a dtype"),
    "two ways to end": (b"abcdefgh", {"end": 1, "offsets": "x.npy"}, "an end token and offsets"),
    "an end that is not there": (b"abcdefgh", {"end": 1}, "the token 1 does not occur"),
    "offsets that are not there": (
        b"abcdefgh",
        {"offsets": "missing.npy"},
        r"missing\.npy cannot be read",
    ),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_file_that_is_no_stream_of_tokens_is_refused_in_words(what: str, tmp_path: Path) -> None:
    content, how, says = BAD_FILES[what]
    if content is not None:
        (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        TokenFile(tmp_path / "a.bin", 4, **how)
    assert caught.value.hint


@pytest.mark.parametrize("content", [b"\x93NUMPY", b"", b"PK\3\4", b"\x93NUMPY\1\0\4\0{{{{"])
def test_an_npy_file_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(DataError, match="cannot be mapped"):
        TokenFile(tmp_path / "a.npy", 4)
    np.save(tmp_path / "b.npy", np.array([{}, {}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be mapped"):
        TokenFile(tmp_path / "b.npy", 4)


def test_tokens_that_are_none_and_samples_that_are_none_are_refused() -> None:
    with pytest.raises(DataError, match="float32 are not token ids"):
        Tokens(np.zeros(10, dtype=np.float32), 4)
    with pytest.raises(DataError, match="contains the token -1"):
        Tokens(np.array([0, 1, -1, 3, 4, 5]), 2).read(np.array([0]))
    with pytest.raises(DataError, match="contains the token -7"):
        Tokens(np.array([0, 1, 2, -7]), 2)
    for source in (Tokens(np.arange(9), 4), Packed(np.arange(9), np.array([0, 4]), 4)):
        for wrong in (-1, 2):
            with pytest.raises(DataError, match=f"sample {wrong} was requested"):
                source.read(np.array([0, wrong]))


# ---- packing


def documents_of(batch: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int], list[int]]]:
    """(inputs, targets, positions) of each document of each row."""
    found = []
    for row in range(len(batch["inputs"])):
        parts = {name: values[row] for name, values in batch.items()}
        for number in range(int(parts["documents"].max()) + 1):
            mine = parts["documents"] == number
            found.append(
                (
                    parts["inputs"][mine].tolist(),
                    parts["targets"][mine].tolist(),
                    parts["positions"][mine].tolist(),
                )
            )
    return found


@pytest.mark.parametrize("seed", range(5))
def test_every_token_but_the_first_of_a_document_is_a_target_once(seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths, width = draw.integers(1, 40, size=60), 16
    ids = np.arange(lengths.sum()) + 1  # each token once, so that a target tells where it stood
    offsets = np.append(0, np.cumsum(lengths))
    source = Packed(ids.astype(np.uint16), offsets, width)
    batch = source.read(draw.permutation(len(source)))
    targets = batch["targets"][batch["targets"] != IGNORED]
    firsts = ids[offsets[:-1]]
    assert sorted(targets.tolist()) == [each for each in ids.tolist() if each not in firsts]
    for inputs, after, positions in documents_of(batch):
        assert positions == list(range(len(inputs)))
        assert inputs == list(range(inputs[0], inputs[0] + len(inputs)))
        ends = inputs[-1] in ids[offsets[1:] - 1]
        assert after == [*inputs[1:], IGNORED if ends else inputs[-1] + 1]
    padding = batch["documents"] == -1
    assert (batch["inputs"][padding] == 0).all()
    assert (batch["targets"][padding] == IGNORED).all()
    assert source.num_tokens == int((~padding).sum())
    assert source.efficiency == source.num_tokens / padding.numel()


def test_a_packing_is_best_fit_decreasing() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        width = int(draw.integers(2, 24))
        lengths = draw.integers(1, width + 1, size=int(draw.integers(1, 60)))
        spaces: list[int] = []
        for length in sorted(lengths.tolist(), reverse=True):
            fitting = [space for space in spaces if space >= length]
            if fitting:
                spaces.remove(min(fitting))
            spaces.append((min(fitting) if fitting else width) - length)
        order, rows = pack(lengths, width)
        assert sorted(order.tolist()) == list(range(len(lengths)))
        assert sorted(width - np.add.reduceat(lengths[order], rows[:-1])) == sorted(spaces)


def test_documents_of_a_file_end_at_the_end_token_or_begin_where_an_index_says(
    tmp_path: Path,
) -> None:
    ids = np.array([1, 2, END, 3, 4, 5, END, 6, 7], dtype=np.uint16)
    ids.tofile(tmp_path / "a.bin")
    offsets = find_documents(ids, END)
    assert offsets.tolist() == [0, 3, 7, 9]
    np.save(tmp_path / "a.npy", offsets)
    offsets[:-1].astype("<i8").tofile(tmp_path / "a.idx")  # without the last one, as some write it
    by_end = TokenFile(tmp_path / "a.bin", 6, end=END)
    batch = by_end.read(np.arange(len(by_end)))
    assert sorted(inputs for inputs, _, _ in documents_of(batch)) == [
        [1, 2, END],
        [3, 4, 5, END],
        [6, 7],
    ]
    assert (
        "9 tokens of 3 documents packed into 2 rows of 6: 75.00% of their tokens are real"
        in by_end.describe()
    )
    for name in ("a.npy", "a.idx"):
        same = TokenFile(tmp_path / "a.bin", 6, offsets=tmp_path / name)
        assert same.digest == by_end.digest
        assert torch.equal(
            pickle.loads(pickle.dumps(same)).read(np.array([1]))["inputs"], batch["inputs"][[1]]
        )
    assert TokenFile(tmp_path / "a.bin", 5, end=END).digest != by_end.digest


@pytest.mark.parametrize(
    ("offsets", "says"),
    [
        ([0, 4, 4], "document 1 begins at token 4 and ends at 4"),
        ([0, 5, 3, 9], "document 1 begins at token 5"),
        ([1, 4], "go from 1"),
        ([0, 12], "go from 0 to 12"),
        ([-3, 4], "go from -3"),
        ([], "offsets must be a 1-D int64 array"),
        ([[0, 4]], "offsets must be a 1-D int64 array"),
        ([0.0, 4.0], "float64"),
        (list(range(10)), "one token each"),
    ],
)
def test_offsets_that_are_none_are_refused(offsets: list[Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        Packed(np.arange(9), np.array(offsets), 4)


def small_transformer(length: int) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(64, layers=3, width=32, heads=4, length=length).eval()
    for parameter in model.parameters():
        # parts that begin as the identity would hide a leak
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_the_logits_of_a_packed_document_equal_those_of_it_alone() -> None:
    draw = np.random.default_rng(1)
    lengths = draw.integers(2, 30, size=40)
    ids = draw.integers(0, 64, size=lengths.sum()).astype(np.uint16)
    source = Packed(ids, np.append(0, np.cumsum(lengths)), 24)
    model = small_transformer(24)
    batch = source.read(np.arange(len(source)))
    with torch.no_grad():
        together = model(batch["inputs"], batch["positions"], batch["documents"])
        mixed = model(batch["inputs"])
        worst, leaked, compared = 0.0, 0.0, 0
        for row in range(len(source)):
            for number in range(int(batch["documents"][row].max()) + 1):
                mine = batch["documents"][row] == number
                alone = model(batch["inputs"][row][mine][None])[0]
                worst = max(worst, float((together[row][mine] - alone).abs().max()))
                leaked = max(leaked, float((mixed[row][mine] - alone).abs().max()))
                compared += 1
    assert compared > 40
    assert worst < 1e-5
    assert leaked > 0.1  # the same rows without the mask


def test_positions_are_those_given() -> None:
    model, ids = small_transformer(24), torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids, torch.arange(20)[None]), model(ids))
        assert not torch.allclose(model(ids, torch.zeros(1, 20, dtype=torch.int64)), model(ids))


def test_the_mask_lets_a_token_see_its_own_document_up_to_itself() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, -1, -1]])
    mask = block_diagonal(documents)
    assert mask.shape == (1, 1, 7, 7)
    expected = [
        [(documents[0, i] == documents[0, j]).item() and j <= i for j in range(7)] for i in range(7)
    ]
    assert mask[0, 0].tolist() == expected
    assert mask.any(-1).all()  # a row without any would be NaN


def test_pycorpus_trains_packed_and_a_file_s_loss_is_the_same_whatever_lies_beside_it(
    tmp_path: Path,
) -> None:
    for number in range(12):
        (tmp_path / f"m{number}.py").write_text(f"x{number} = {'1' * (5 + 7 * number)}\n")
    task = PyCorpus(str(tmp_path), layers=2, width=16, heads=2, length=32, packed=True)
    source = task.data("train")
    assert "packed" in source.describe()
    model = task.model()
    batch = source.read(np.arange(len(source)))
    loss = task.loss(task.forward(model, batch), batch).terms[0]
    loss.total.backward()
    assert int(loss.count) == int((batch["targets"] != IGNORED).sum())
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )
