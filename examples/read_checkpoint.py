"""A commit of surefoot read without surefoot.

numpy and json alone verify every digest and give the tensors.

python examples/read_checkpoint.py runs/mine/checkpoints/step-000000000020
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

CHUNK = 16 << 20
DTYPES = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "I16": "<i2",
    "U16": "<u2",
    "I32": "<i4",
    "U32": "<u4",
    "I64": "<i8",
    "U64": "<u8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "C64": "<c8",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
}
# numpy has no bfloat16 and no float8: their bits


def digest(data: bytes) -> bytes:
    """SHA-256 over the SHA-256 of every 16 MiB."""
    chunks = (data[start : start + CHUNK] for start in range(0, max(len(data), 1), CHUNK))
    return hashlib.sha256(b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)).digest()


def read(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor by `file:name`. Raises AssertionError for whatever is damaged."""
    manifest = json.loads((folder / "manifest.json").read_text())
    stated = manifest.pop("sha256")
    assert hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest() == stated, (
        "the manifest is damaged"
    )
    tensors = {}
    for file in manifest["files"]:
        data = (folder / file["name"]).read_bytes()
        found = digest(data)
        # a file of tensors: over the digests of its header and of its tensors
        if file["tensors"] is not None:
            body = 8 + int.from_bytes(data[:8], "little")
            parts = [digest(data[:body])]
            for name, piece in sorted(
                file["tensors"].items(),
                key=lambda each: (each[1]["start"], np.prod(each[1]["shape"]), each[0]),
            ):
                count = int(np.prod(piece["shape"], dtype=int))
                tensor = np.frombuffer(
                    data, DTYPES[piece["dtype"]], count, body + piece["start"] if count else 0
                )
                parts.append(digest(tensor.tobytes()))
                assert parts[-1].hex() == piece["sha256"], f"{file['name']}: {name} is damaged"
                tensors[f"{file['name']}:{name}"] = tensor.reshape(piece["shape"])
            found = hashlib.sha256(b"".join(parts)).digest()
        assert (len(data), found.hex()) == (file["num_bytes"], file["sha256"]), (
            f"{file['name']} is damaged"
        )
    return tensors


if __name__ == "__main__":
    for name, tensor in read(Path(sys.argv[1])).items():
        print(f"{name}  {tensor.dtype} {list(tensor.shape)}")
