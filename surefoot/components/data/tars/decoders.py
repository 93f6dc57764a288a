"""Decoders of tar members, selected by extension; none of them can execute code.

Sizes are checked before memory is allocated: the size of an image before its pixels are decoded,
and the size of an array before it is created.
"""

# H height, W width, C channels

from __future__ import annotations

import functools
import io
import json
import math
import re
import tokenize
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors.numpy

from surefoot.components.data.tars.shards import Sample
from surefoot.core.errors import DataError, require_package

MAX_PIXELS = 1 << 26  # of an image: 192 MiB of colors
WHOLE_NUMBER = re.compile(rb"^\s*\d{1,9}\s*$")
# Pillow's names of formats, by extension
IMAGES = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP"}
KINDS = tuple(dict.fromkeys(IMAGES.values()))
ORIENTATION = 0x0112  # the tag in EXIF; from 5 on width and height are exchanged
SIDEWAYS = (5, 6, 7, 8)


def decode(sample: Sample, extension: str) -> Any:
    """Return the decoded content of one member of a sample.

    `extension` is the extension of the member; its last suffix selects the decoder, so that
    `seg.png` is decoded as PNG. An image (jpg, jpeg, png, webp) is uint8 (H, W, 3), rotated as its
    EXIF orientation says; the format in the file may differ from the extension. An npy member is an
    array, cls an int, txt a str, json any JSON value, and safetensors a dict of arrays.

    Raises DataError, with file, member and reason, for any other extension, and for a member that
    is damaged or too large. Raises MissingExtra if Pillow is needed but not installed.
    """
    return find_decoder(extension)(sample, extension)


def find_decoder(extension: str) -> Decoder:
    """Return the decoder for an extension, or a function that raises DataError if there is none."""
    return DECODERS.get(extension.rpartition(".")[2], _refuse)


def _refuse(sample: Sample, extension: str) -> Any:
    raise sample.fault(
        extension,
        "has an extension that is not decoded",
        f"the decoded extensions are {', '.join(DECODERS)}",
    )


def decode_jpeg(sample: Sample, *, height: int, width: int, extension: str = "jpg") -> np.ndarray:
    """Return the JPEG of a sample as uint8 (H, W, 3), rotated as its EXIF orientation says.

    Raises DataError for a damaged file, and for an image that is not `height` x `width`, before its
    pixels are decoded. Raises MissingExtra without Pillow.
    """
    return _decode_image(sample, extension, kind="JPEG", size=(width, height))


def decode_class(sample: Sample, *, num_classes: int, extension: str = "cls") -> int:
    """Return the class index of a sample, written in decimal digits.

    Raises DataError for anything but an integer from 0 to `num_classes` - 1.
    """
    number = _decode_number(sample, extension, f"a class number from 0 to {num_classes - 1}")
    if number >= num_classes:
        raise sample.fault(extension, f"is {number}, not a class from 0 to {num_classes - 1}")
    return number


def _decode_image(
    sample: Sample, extension: str, *, kind: str, size: tuple[int, int] | None = None
) -> np.ndarray:
    pillow, turning = _pillow(kind)
    try:
        # many PNGs are called .jpg
        image = pillow.open(io.BytesIO(sample.parts[extension]), formats=KINDS)
        orientation = image.getexif().get(ORIENTATION, 1) if "exif" in image.info else 1
        width, height = image.size[::-1] if orientation in SIDEWAYS else image.size
        if size is not None and (width, height) != size:
            raise sample.fault(
                extension, f"is an image of {width} x {height} pixels, not {size[0]} x {size[1]}"
            )
        if width * height > MAX_PIXELS:
            raise sample.fault(
                extension,
                f"is an image of {width:,} x {height:,} pixels, {MAX_PIXELS:,} are allowed",
            )
        if image.mode != "RGB":
            if image.mode.startswith(("I", "F")):
                raise sample.fault(
                    extension,
                    f"has the mode {image.mode}, but only 8 bits per channel are supported",
                    "write it with 8 bits per channel, or as npy",
                )
            image = image.convert("RGB")
        if orientation != 1:
            image = turning.exif_transpose(image)
        return np.frombuffer(image.tobytes(), np.uint8).reshape(height, width, 3)
    except (
        OSError,
        SyntaxError,
        ValueError,
        pillow.DecompressionBombError,
    ) as error:  # Pillow's errors for damaged files
        if "BytesIO" in str(error):
            what, hint = (
                f"is not an image of the formats {', '.join(KINDS)}",
                "convert it, or copy the file again if it is cut",
            )
            raise sample.fault(extension, what, hint) from None
        raise sample.fault(
            extension, f"is a damaged {kind}: {error}", "copy the file again"
        ) from None


@functools.cache
def _pillow(kind: str) -> tuple[Any, Any]:
    """Return Pillow's modules `Image` and `ImageOps`, imported once.

    An import statement in each call would take a tenth of the time of decoding a small image.
    Raises MissingExtra without Pillow.
    """
    with require_package("pillow", "PIL", extra="images", needed_for=f"decoding {kind} images"):
        from PIL import Image, ImageOps
    return Image, ImageOps


def _decode_array(sample: Sample, extension: str) -> np.ndarray:
    content = sample.parts[extension]
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, in_fortran, dtype = read(file)
    except (
        ValueError,
        SyntaxError,
        TypeError,
        RecursionError,
        OverflowError,
        tokenize.TokenError,
    ) as error:
        raise sample.fault(
            extension, f"is not a valid npy file: {error}", "copy the file again"
        ) from None
    held = len(content) - file.tell()
    if dtype.hasobject:
        raise sample.fault(
            extension,
            "holds Python objects, which could run code",
            "write numbers: numpy.save(..., allow_pickle=False)",
        )
    if math.prod(shape) * dtype.itemsize != held or min(shape, default=0) < 0:
        raise sample.fault(
            extension,
            f"has a header for {dtype} {shape}, but {held:,} bytes of data",
            "copy the file again",
        )
    try:
        flat = np.frombuffer(content, dtype=dtype, offset=file.tell()).copy()
        return flat.reshape(shape, order="F" if in_fortran else "C")
    except (ValueError, OverflowError) as error:
        raise sample.fault(
            extension, f"is {dtype} {shape}, which is not a valid array: {error}"
        ) from None


def _decode_number(
    sample: Sample, extension: str, wanted: str = "an integer of up to 9 digits"
) -> int:
    text = sample.parts[extension]
    if not (text.isdigit() and len(text) <= 9) and not WHOLE_NUMBER.match(text):
        raise sample.fault(extension, f"is {text[:20]!r}, not {wanted}")
    return int(text)


def _decode_text(sample: Sample, extension: str) -> str:
    try:
        return sample.parts[extension].decode("utf-8")
    except UnicodeDecodeError as error:
        raise sample.fault(
            extension, f"is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from None


def _decode_json(sample: Sample, extension: str) -> Any:
    try:
        return json.loads(sample.parts[extension])
    except (ValueError, RecursionError) as error:
        raise sample.fault(extension, f"is not valid JSON: {error}") from None


def _decode_tensors(sample: Sample, extension: str) -> dict[str, np.ndarray]:
    try:
        return dict(safetensors.numpy.load(sample.parts[extension]))
    except KeyError as error:
        raise sample.fault(
            extension,
            f"has a dtype that NumPy does not support: {error}",
            "write them as F32 or F16",
        ) from None
    except (safetensors.SafetensorError, ValueError, TypeError) as error:
        raise sample.fault(
            extension, f"is not a valid safetensors file: {error}", "copy the file again"
        ) from None


Decoder = Callable[[Sample, str], Any]
DECODERS: dict[str, Decoder] = {
    **{
        extension: functools.partial(_decode_image, kind=kind) for extension, kind in IMAGES.items()
    },
    "npy": _decode_array,
    "cls": _decode_number,
    "txt": _decode_text,
    "json": _decode_json,
    "safetensors": _decode_tensors,
}

__all__ = ["DECODERS", "DataError", "decode", "decode_class", "decode_jpeg"]
