"""A damaged byte in the record of deleted checkpoints costs one line of it."""

from __future__ import annotations

from pathlib import Path

from surefoot.contract.run_folder import removals
from surefoot.contract.run_folder.removals import Removal

LINES = (
    b'\n{"step": 20, "generation": 1, "others": [40]}\n'
    b'\n{"step": 40, "others": [60], "generation": 2}\n'
)
FIRST, SECOND = Removal(20, 1, (40,)), Removal(40, 2, (60,))


def test_any_flipped_bit_leaves_the_other_line(tmp_path: Path) -> None:
    path = tmp_path / removals.FILE
    path.write_bytes(LINES)
    assert removals.read(tmp_path) == [FIRST, SECOND]
    border = LINES.index(b"\n", 1)  # the newlines between belong to both
    for at in range(len(LINES)):
        for bit in range(8):
            data = bytearray(LINES)
            data[at] ^= 1 << bit
            path.write_bytes(data)
            found = removals.read(tmp_path)
            if at < border:
                assert SECOND in found
            elif at > border + 1:
                assert FIRST in found
