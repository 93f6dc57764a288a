"""Tests of samples of tars by number.

What is read is what was written, in any order, in any process, and every bad part has a name.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from PIL import Image

from surefoot.components.data.tars.decoders import DECODERS, decode
from surefoot.components.data.tars.shards import Sample, read_shard
from surefoot.components.data.tars.source import Tars, read_sample
from surefoot.core.errors import DataError
from tests.components.test_index import write_tar


def image(
    kind: str = "PNG", size: tuple[int, int] = (5, 4), mode: str = "RGB", color: int = 7
) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size, color).save(out, kind)
    return out.getvalue()


def array(values: np.ndarray, **how: bool) -> bytes:
    out = io.BytesIO()
    np.save(out, values, **how)
    return out.getvalue()


def members_of(number: int) -> list[tuple[str, bytes]]:
    parts = {
        "png": image(color=number),
        "cls": b"%d" % number,
        "txt": f"text {number}".encode(),
        "json": json.dumps({"n": number}).encode(),
        "npy": array(np.full(3, number, dtype=np.float32)),
        "safetensors": safetensors.numpy.save({"a": np.full(2, number)}),
    }
    return [(f"{number:03d}.{extension}", content) for extension, content in parts.items()]


def write_set(folder: Path, shards: int = 3, samples: int = 5, **how: Any) -> list[Path]:
    return [
        write_tar(
            folder / f"{shard}.tar",
            [each for number in range(samples) for each in members_of(shard * samples + number)],
            **how,
        )
        for shard in range(shards)
    ]


PARTS = {
    "image": "png",
    "label": "cls",
    "text": "txt",
    "row": "json",
    "vector": "npy",
    "tensors": "safetensors",
}


@pytest.mark.parametrize(
    "how", [{}, {"format": tarfile.PAX_FORMAT, "mtime": 1.5}, {"format": tarfile.USTAR_FORMAT}]
)
def test_every_kind_of_part_comes_back_in_the_order_asked_for(
    how: dict[str, Any], tmp_path: Path
) -> None:
    source = Tars(write_set(tmp_path, **how), cache=tmp_path / "cache", **PARTS)
    ids = np.array([14, 0, 7, 7, 5])
    batch = source.read(ids)
    assert len(source) == 15
    assert torch.equal(batch["label"], torch.from_numpy(ids))
    assert batch["image"].dtype == torch.uint8
    assert batch["image"].shape == (5, 4, 5, 3)
    assert batch["text"] == [f"text {number}" for number in ids]
    assert batch["row"] == [{"n": number} for number in ids]
    assert torch.equal(batch["vector"], torch.from_numpy(ids).float()[:, None].expand(5, 3))
    assert [each["a"].tolist() for each in batch["tensors"]] == [[number, number] for number in ids]


def test_names_that_no_single_header_holds_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    names = [f"{'d' * 90}/{'e' * 90}/{number}" for number in range(4)]
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT):
        write_tar(
            path,
            [(f"{name}.cls", b"%d" % number) for number, name in enumerate(names)],
            format=kind,
        )
        source = Tars([path], cache=tmp_path / "cache", label="cls")
        assert source.read(np.array([3, 1]))["label"].tolist() == [3, 1]


def test_a_source_goes_to_another_process(tmp_path: Path) -> None:
    source = Tars(write_set(tmp_path), cache=tmp_path / "cache", label="cls")
    source.read(np.arange(15))
    again = pickle.loads(pickle.dumps(source))
    assert again.read(np.arange(15))["label"].tolist() == list(range(15))
    assert again.digest == source.digest


def test_more_shards_than_files_may_be_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.components.data.tars.source.MAX_OPEN", 2)
    source = Tars(write_set(tmp_path, shards=6, samples=2), cache=tmp_path / "cache", label="cls")
    before = len(os.listdir("/proc/self/fd"))
    assert source.read(np.arange(12)[::-1])["label"].tolist() == list(range(12))[::-1]
    assert len(os.listdir("/proc/self/fd")) <= before + 3  # one more to list them


def test_threads_read_at_once_with_few_shards_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None closes what another one reads."""
    monkeypatch.setattr("surefoot.components.data.tars.source.MAX_OPEN", 2)
    source = Tars(write_set(tmp_path, shards=6, samples=2), cache=tmp_path / "cache", label="cls")
    drawn = [np.random.default_rng(number).integers(0, 12, 40) for number in range(50)]
    with ThreadPoolExecutor(4) as pool:
        assert all(
            read["label"].tolist() == ids.tolist()
            for ids, read in zip(drawn, pool.map(source.read, drawn), strict=True)
        )


def test_a_transform_brings_images_to_one_size(tmp_path: Path) -> None:
    path = write_tar(
        tmp_path / "a.tar", [("0.png", image(size=(5, 4))), ("1.png", image(size=(9, 8)))]
    )
    source = Tars([path], cache=tmp_path / "cache", image="png")
    with pytest.raises(
        DataError, match=r"image is uint8 \(4, 5, 3\) in 0 and uint8 \(8, 9, 3\) in 1 of .*a\.tar"
    ):
        source.read(np.arange(2))
    cut = Tars(
        [path],
        cache=tmp_path / "cache",
        image="png",
        transform=lambda row: {"image": torch.from_numpy(row["image"][:4, :4].copy())},
    )
    assert cut.read(np.arange(2))["image"].shape == (2, 4, 4, 3)


def test_a_sample_without_a_part_is_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.png", image()), ("0.cls", b"1"), ("1.png", image())])
    with pytest.raises(DataError, match=r"a\.tar: 1\.cls is missing; the sample has png"):
        Tars([path], cache=tmp_path / "cache", image="png", label="cls").read(np.arange(2))


@pytest.mark.parametrize("what", ["shorter", "other bytes", "another sample"])
def test_a_shard_that_changes_while_it_is_read_is_named(what: str, tmp_path: Path) -> None:
    (path,) = write_set(tmp_path, shards=1)
    source = Tars([path], cache=tmp_path / "cache", label="cls")
    content = bytearray(path.read_bytes())
    if what == "shorter":
        path.write_bytes(content[:2000])
    elif what == "other bytes":
        path.write_bytes(bytes(len(content)))
    else:
        at = content.index(b"004.cls")
        content[at : at + 7] = b"999.cls"
        path.write_bytes(content)
    with pytest.raises(
        DataError,
        match=r"0\.tar (is shorter than when it was|differs from the file that was) indexed",
    ):
        source.read(np.arange(5))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (("1", "2"), torch.int64),
        (("1", "2.5"), list),
        (("1", '"x"'), list),
        (('"x"', "1"), list),
        (("1", "null"), list),
        (("1", "true"), list),
        (("99999999999999999999", "1"), list),
    ],
)
def test_only_whole_numbers_become_a_tensor_of_numbers(
    values: tuple[str, ...], kind: Any, tmp_path: Path
) -> None:
    path = write_tar(
        tmp_path / "a.tar",
        [(f"{number}.json", value.encode()) for number, value in enumerate(values)],
    )
    found = Tars(path, cache=tmp_path / "cache", row="json").read(np.arange(2))["row"]
    assert found.dtype == kind if isinstance(found, torch.Tensor) else isinstance(found, kind)
    assert [each if isinstance(found, list) else each.item() for each in found] == [
        json.loads(value) for value in values
    ]


@pytest.mark.parametrize(
    "values",
    [
        np.array(["a", "b"]),
        np.array([b"a"]),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.zeros(2, "f8,i4"),
    ],
)
def test_arrays_that_torch_does_not_know_stay_arrays(values: np.ndarray, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [(f"{number}.npy", array(values)) for number in range(2)])
    found = Tars(path, cache=tmp_path / "cache", row="npy").read(np.arange(2))["row"]
    assert all(np.array_equal(each, values) for each in found)


def test_no_sample_at_all_is_refused(tmp_path: Path) -> None:
    source = Tars(write_set(tmp_path), cache=tmp_path / "cache", label="cls")
    with pytest.raises(DataError, match="no sample is requested"):
        source.read(np.array([], dtype=np.int64))


@pytest.mark.parametrize("size", [b"-0001000\0", b"0o1", b"+1", b"1_0", b"", b"9"])
def test_bytes_that_are_no_sample_are_refused_and_end(size: bytes, tmp_path: Path) -> None:
    content = bytearray(write_tar(tmp_path / "a.tar", [("a.jpg", b"1")]).read_bytes()[:512])
    content[156:157], content[124:136] = b"x", size.ljust(12, b"\0")
    with pytest.raises(DataError, match="differs from the file that was indexed"):
        read_sample(tmp_path / "a.tar", bytes(content))


@pytest.mark.parametrize("extension", DECODERS)
def test_a_part_cut_anywhere_is_refused_by_name(extension: str) -> None:
    whole = {"jpg": image("JPEG"), "jpeg": image("JPEG"), "webp": image("WEBP")} | {
        name.rpartition(".")[2]: content for name, content in members_of(7)
    }
    content = whole[extension]
    decode(Sample(Path("a.tar"), "k", {extension: content}), extension)
    if extension in ("cls", "txt"):
        content = b"\xff\xfe"
    for length in {0, 1, len(content) // 2}:
        with pytest.raises(DataError, match=rf"a\.tar: k\.{extension} "):
            decode(
                Sample(
                    Path("a.tar"),
                    "k",
                    {extension: content[:length] if extension != "txt" else content},
                ),
                extension,
            )


def _said_to_be(png: bytes, side: int) -> bytes:
    """Its header says that it is so wide and high."""
    header = b"IHDR" + side.to_bytes(4, "big") * 2 + png[24:29]
    return png[:12] + header + zlib.crc32(header).to_bytes(4, "big") + png[33:]


def _jpeg_said_to_be(jpeg: bytes, side: int) -> bytes:
    place = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:place] + side.to_bytes(2, "big") * 2 + jpeg[place + 4 :]


@pytest.mark.parametrize(
    ("extension", "content", "words"),
    [
        ("npy", array(np.array([{}]), allow_pickle=True), "Python objects"),
        ("npy", array(np.zeros(3)).replace(b"(3,)", b"(9,)"), "has a header for float64"),
        (
            "npy",
            array(np.zeros(3)).replace(b"(3,), }          ", b"(99999999999,), }"),
            "has a header for",
        ),
        ("npy", array(np.zeros(3)).replace(b"(3,), } ", b"(-3,), }"), "has a header for"),
        ("npy", array(np.zeros(3)).replace(b"(3,), }", b"((((3, "), "not a valid npy file"),
        (
            "npy",
            array(np.zeros(3)).replace(b"(3,), }                 ", b"(0, 99999999999999999)}"),
            "npy",
        ),
        ("npy", array(np.zeros(3, "V1")).replace(b"|V1", b"|V0"), "npy"),
        (
            "safetensors",
            (21 + 44).to_bytes(8, "little")
            + b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'.ljust(65)
            + b"12",
            "NumPy does not",
        ),
        ("png", image("PNG", mode="I;16"), "8 bits per channel"),
        ("json", b"[" * 100_000, "not valid JSON"),
        ("cls", b"-1", "not an integer"),
        ("cls", b"1" * 40, "not an integer"),
        ("pkl", b"cos\nsystem\n", "not decoded"),
        ("py", b"print(1)", "not decoded"),
        ("jpg", image("GIF"), "not an image of the formats JPEG, PNG, WEBP"),
        ("png", _said_to_be(image("PNG"), 2**31 - 1), "."),
        ("jpg", _jpeg_said_to_be(image("JPEG"), 65_000), "pixels"),
        ("pyd", b"MZ", "not decoded"),
        ("pth", b"\x80\x02c__builtin__\neval\n", "not decoded"),
    ],
)
def test_what_could_run_code_or_take_all_memory_is_refused(
    extension: str, content: bytes, words: str
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=words):
        decode(Sample(Path("a.tar"), "k", {extension: content}), extension)
    # KiB: nothing was made as large as it says
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_an_image_that_would_take_all_memory_is_refused_before_it_is_decoded() -> None:
    small = decode(Sample(Path("a.tar"), "k", {"png": _black(16)}), "png")
    assert small.shape == (16, 16, 3)
    bomb, before = _black(20_000), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="pixels"):
        decode(Sample(Path("a.tar"), "k", {"png": bomb}), "png")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def _black(side: int) -> bytes:
    """A black PNG of one bit a pixel, so wide and high."""
    rows = bytes(1 + side // 8) * side  # each begins with the number of its filter
    header = side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    )


def test_real_shards_give_the_samples_that_a_reader_in_sequence_does(
    cifar10_folder: Path, tmp_path: Path
) -> None:
    paths = sorted(cifar10_folder.glob("test-*.tar"))
    source = Tars(paths, cache=tmp_path, image="jpg", label="cls")
    assert len(source) == 10_000
    want = [sample for path in paths for sample in read_shard(path)]
    for number in range(0, 10_000, 997):
        place = [int(each[0]) for each in source.index.locate(np.array([number]))]
        assert source.sample(*place) == want[number]
    assert source.read(np.arange(0, 10_000, 997))["image"].shape == (11, 32, 32, 3)
