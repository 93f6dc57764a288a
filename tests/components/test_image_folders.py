"""Tests of folders of images.

Every image by number with the class of its folder, and everything that is no image has a name.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from surefoot.components.data.sources.images import ImageFolder
from surefoot.contract.task import Source
from surefoot.core.errors import DataError
from tests.components.test_tars import image


def write_folder(folder: Path, **how: Any) -> Path:
    for number, name in enumerate(
        ("cat/2.png", "cat/10.JPG", "ant/a.webp", "cat/deep/er/1.jpeg", "dog/x.y.png")
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = {"png": "PNG", "webp": "WEBP"}.get(path.suffix[1:].lower(), "JPEG")
        path.write_bytes(image(kind, color=40 * number, **how))
    (folder / ".DS_Store").write_bytes(b"x")
    (folder / "cat" / ".thumb").write_bytes(b"x")
    return folder


NAMES = ["ant/a.webp", "cat/10.JPG", "cat/2.png", "cat/deep/er/1.jpeg", "dog/x.y.png"]


def test_images_are_read_by_number_in_the_order_of_their_names_with_the_class_of_their_folder(
    tmp_path: Path,
) -> None:
    source = ImageFolder(write_folder(tmp_path))
    assert isinstance(source, Source)
    assert source.classes == ("ant", "cat", "dog")
    batch = source.read(np.array([4, 0, 2, 2]))
    assert batch["labels"].tolist() == [2, 0, 1, 1]
    assert batch["images"].shape == (4, 4, 5, 3)
    assert batch["images"].dtype == torch.uint8
    reds = [int(each) for each in batch["images"][:, 0, 0, 0]]
    assert abs(reds[0] - 160) <= 2
    assert reds[2:] == [0, 0]
    assert pickle.loads(pickle.dumps(source)).read(np.array([3]))["labels"].tolist() == [1]
    assert "5 images of 3 classes" in source.describe()


def test_the_digest_covers_names_and_sizes_and_the_place_of_the_folder_does_not_matter(
    tmp_path: Path,
) -> None:
    first, second = (ImageFolder(write_folder(tmp_path / name)) for name in ("a", "b"))
    assert first.digest == second.digest
    (tmp_path / "b" / "cat" / "2.png").rename(tmp_path / "b" / "cat" / "3.png")
    renamed = ImageFolder(tmp_path / "b")
    (tmp_path / "b" / "cat" / "3.png").write_bytes(image(size=(50, 40)))
    assert len({first.digest, renamed.digest, ImageFolder(tmp_path / "b").digest}) == 3


def test_a_transform_brings_images_to_one_size(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "ant" / "large.png").write_bytes(image(size=(50, 40)))
    with pytest.raises(DataError, match="images is uint8"):
        ImageFolder(tmp_path).read(np.array([0, 1]))
    source = ImageFolder(
        tmp_path, transform=lambda row: {**row, "images": row["images"][:4, :5].astype(np.float32)}
    )
    assert source.read(np.array([0, 1]))["images"].shape == (2, 4, 5, 3)


def test_links_are_refused_or_followed_knowingly(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "set")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "z.png").write_bytes(image())
    (folder / "dog" / "z.png").symlink_to(elsewhere / "z.png")
    with pytest.raises(DataError, match=r"z\.png is a link to .*elsewhere"):
        ImageFolder(folder)
    (folder / "owl").symlink_to(elsewhere)
    assert ImageFolder(folder, follow_links=True).classes == ("ant", "cat", "dog", "owl")
    (elsewhere / "circle").symlink_to(elsewhere)
    with pytest.raises(DataError, match="leads back to"):
        ImageFolder(folder, follow_links=True)


def make_text(folder: Path) -> None:
    (folder / "cat" / "notes.txt").write_text("x")


def make_empty_class(folder: Path) -> None:
    (folder / "elk").mkdir()


def make_file_beside(folder: Path) -> None:
    (folder / "labels.csv").write_text("x")


def make_empty_image(folder: Path) -> None:
    (folder / "cat" / "0.png").write_bytes(b"")


def make_giant_image(folder: Path) -> None:
    os.truncate(folder / "cat" / "2.png", 1 << 40)


def make_pipe(folder: Path) -> None:
    os.mkfifo(folder / "cat" / "p.png")


def make_nothing(folder: Path) -> None:
    for path in folder.iterdir():
        path.rename(folder.parent / path.name)


SPOILED: dict[Callable[[Path], None], str] = {
    make_text: r"cat/notes\.txt is not an image",
    make_empty_class: "elk contains no image",
    make_file_beside: r"labels\.csv is not in the folder of a class",
    make_empty_image: r"0\.png has 0 bytes",
    make_giant_image: r"2\.png has 1,099,511,627,776 bytes",
    make_pipe: r"p\.png is not an image",
    make_nothing: "contains no class folder",
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_folder_that_is_no_set_of_images_is_refused_in_words(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "set")
    spoil(folder)
    with pytest.raises(DataError, match=SPOILED[spoil]) as caught:
        ImageFolder(folder)
    assert caught.value.hint
    with pytest.raises(DataError, match="No such file"):
        ImageFolder(tmp_path / "missing")


def test_an_image_that_is_damaged_or_changed_or_gone_has_a_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    source = ImageFolder(folder)
    path = folder / NAMES[2]
    whole = path.read_bytes()
    path.write_bytes(whole[:-20] + bytes(20))
    with pytest.raises(DataError, match=r"cat/2\.png is a damaged PNG"):
        source.read(np.array([2]))
    path.write_bytes(whole + b"x")
    with pytest.raises(DataError, match=f"had {len(whole)} bytes when the folder was listed"):
        source.read(np.array([2]))
    path.unlink()
    with pytest.raises(DataError, match=r"2\.png cannot be read"):
        source.read(np.array([2]))
    with pytest.raises(DataError, match="sample 5 was requested"):
        source.read(np.array([5]))
    with pytest.raises(DataError, match="no sample is requested"):
        source.read(np.array([], dtype=np.int64))


def test_a_size_is_compared_before_a_pixel_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path)
    monkeypatch.setattr("surefoot.components.data.tars.decoders.MAX_PIXELS", 19)
    with pytest.raises(DataError, match="is an image of 5 x 4 pixels, 19 are allowed"):
        ImageFolder(tmp_path).read(np.array([0]))


EXIF_TURNS = {
    1: "as it is",
    2: "mirrored",
    3: "upside down",
    4: "flipped",
    5: "transposed",
    6: "turned right",
    7: "transverse",
    8: "turned left",
}


def photograph(orientation: int, kind: str) -> tuple[bytes, np.ndarray]:
    """A picture of four colors with an orientation, and what a viewer shows of it."""
    pixels = np.zeros((32, 48, 3), np.uint8)
    pixels[:16, :24, 0], pixels[:16, 24:, 1], pixels[16:, :24, 2] = 200, 200, 200
    exif = Image.Exif()
    exif[0x0112] = orientation
    out = io.BytesIO()
    Image.fromarray(pixels).save(
        out, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {})
    )
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(out.getvalue())).convert("RGB"))
    return out.getvalue(), np.asarray(shown)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", EXIF_TURNS, ids=EXIF_TURNS.values())
def test_a_photograph_is_read_upright(orientation: int, kind: str, tmp_path: Path) -> None:
    content, shown = photograph(orientation, kind)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / f"1.{kind.lower()}").write_bytes(content)
    read = ImageFolder(tmp_path).read(np.array([0]))["images"][0].numpy()
    assert read.shape == ((48, 32, 3) if orientation >= 5 else (32, 48, 3))
    assert np.array_equal(read, shown)
    # red is in the corner that these two leave alone
    assert abs(int(read[0, 0, 0]) - 200) < 10 or orientation not in (1, 5)


@pytest.mark.parametrize(
    ("name", "kind"), [("1.jpg", "PNG"), ("1.png", "JPEG"), ("1.webp", "PNG"), ("1.jpeg", "WEBP")]
)
def test_an_image_is_what_its_content_says_and_not_what_it_is_called(
    name: str, kind: str, tmp_path: Path
) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / name).write_bytes(image(kind))
    assert ImageFolder(tmp_path).read(np.array([0]))["images"].shape == (1, 4, 5, 3)


def test_an_image_of_a_kind_that_is_not_read_says_which_are(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(image("GIF"))
    with pytest.raises(DataError, match="is not an image of the formats JPEG, PNG, WEBP") as caught:
        ImageFolder(tmp_path).read(np.array([0]))
    assert "convert it" in str(caught.value.hint)
