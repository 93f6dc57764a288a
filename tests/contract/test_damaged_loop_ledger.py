"""A damaged row of a loop's ledger costs that row: it is named, and all behind it are read."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.contract import loop_ledger
from surefoot.contract.ledger import FILE, HEADER_BYTES
from surefoot.contract.loop_ledger import (
    CHECKSUM,
    FORMAT,
    HEAD,
    ID_BYTES,
    PREVIOUS_FORMAT,
    Batch,
    LoopGuarantee,
    LoopLedger,
)

NUM_ROWS, SIZE = 12, 4
ROW = HEAD.size + ID_BYTES * SIZE + CHECKSUM.size
COUNT = 16  # where the number of ids stands in a row


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written = LoopLedger(tmp_path, LoopGuarantee(samples=24, once=True, all=True), 1)
    for step in range(NUM_ROWS):
        number, place = divmod(step, 6)
        written.add(step + 1, number, place, range(SIZE * place, SIZE * place + SIZE))
    written.sync()
    written.close()
    assert loop_ledger.check(tmp_path).holds
    return tmp_path


def damage(folder: Path, row: int, at: int, value: int) -> None:
    with (folder / FILE).open("r+b") as file:
        file.seek(HEADER_BYTES + ROW * row + at)
        file.write(struct.pack("<I", value))


DAMAGES: dict[str, tuple[Callable[[Path], None], set[int]]] = {
    "a length beyond the file": (lambda folder: damage(folder, 4, COUNT, 1 << 30), {5}),
    "a length of another row's end": (lambda folder: damage(folder, 4, COUNT, SIZE + 9), {5}),
    "a length too large by one": (lambda folder: damage(folder, 4, COUNT, SIZE + 1), {5}),
    "a length too small by one": (lambda folder: damage(folder, 4, COUNT, SIZE - 1), {5}),
    "a length of 0": (lambda folder: damage(folder, 4, COUNT, 0), {5}),
    "the first row": (lambda folder: damage(folder, 0, COUNT, 77), {1}),
    "another sample": (lambda folder: damage(folder, 3, HEAD.size, 1), {4}),
    "another step": (lambda folder: damage(folder, 3, 0, 3), {4}),
    "another checksum": (lambda folder: damage(folder, 0, ROW - CHECKSUM.size, 0), {1}),
    "a step of 0": (lambda folder: damage(folder, 7, 0, 0), {8}),
    "two rows": (
        lambda folder: (damage(folder, 2, COUNT, 1 << 20), damage(folder, 8, COUNT, 2))[0],
        {3, 9},
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_costs_the_row_that_it_touches_and_is_named(name: str, folder: Path) -> None:
    harm, lost = DAMAGES[name]
    before = list(loop_ledger.read(folder))
    harm(folder)
    found: list[loop_ledger.DamagedBytes] = []
    assert list(loop_ledger.read(folder, found)) == [row for row in before if row.step not in lost]
    assert [(each.start, each.end) for each in found] == [
        (HEADER_BYTES + ROW * (step - 1), HEADER_BYTES + ROW * step) for step in sorted(lost)
    ]
    faults = loop_ledger.check(folder).faults
    assert [each.kind for each in faults].count("damaged") == len(lost)
    assert f"bytes {found[0].start:,} to {found[0].end:,} of {FILE}" in faults[0].told


@pytest.mark.parametrize("name", DAMAGES)
def test_a_run_that_goes_on_keeps_what_stands_behind_the_damage(name: str, folder: Path) -> None:
    harm, lost = DAMAGES[name]
    harm(folder)
    size = (folder / FILE).stat().st_size
    again = LoopLedger(folder, LoopGuarantee(samples=24, once=True, all=True), 2)
    again.add(NUM_ROWS + 1, 2, 0, range(SIZE))
    again.sync()
    again.close()
    assert (folder / FILE).stat().st_size == size + ROW
    steps = [row.step for row in loop_ledger.read(folder)]
    assert steps == [step for step in range(1, NUM_ROWS + 2) if step not in lost]


@pytest.mark.parametrize("cut", [1, 4, HEAD.size - 1, HEAD.size, HEAD.size + 5, ROW - 1])
def test_a_part_of_a_row_at_the_end_is_left_out_and_is_no_damage(cut: int, folder: Path) -> None:
    with (folder / FILE).open("r+b") as file:
        file.truncate(HEADER_BYTES + ROW * (NUM_ROWS - 1) + cut)
    found: list[loop_ledger.DamagedBytes] = []
    assert [row.step for row in loop_ledger.read(folder, found)] == list(range(1, NUM_ROWS))
    assert not found


@pytest.mark.parametrize(
    "rows",
    [
        # one is lost
        [Batch(1, 1, 0, 0, (0, 1)), Batch(2, 1, 0, 2, (4, 5)), Batch(3, 1, 0, 3, (6, 7))],
        # one comes twice
        [Batch(1, 1, 0, 0, (0, 1)), Batch(2, 1, 0, 0, (0, 1)), Batch(3, 1, 0, 1, (2, 3))],
        [
            Batch(1, 1, 0, 0, ()),
            Batch(2, 1, 0, 1, ()),
            Batch(2, 2, 0, 1, ()),
            Batch(9, 3, 1, 0, ()),
        ],
        [
            Batch(1, 1, 0, 0, (1, 1, 0, 0, 0, 1, 1, 0, 1, 0)),
            Batch(2, 1, 0, 1, (2, 1, 0, 2, 0)),
            Batch(3, 1, 0, 2, (3, 1, 0, 2, 0)),
        ],
        [Batch(1, 1, 0, 0, (1,)), Batch(5, 1, 0, 1, (2,)), Batch(4, 1, 3, 1, (2,))],
    ],
)
def test_what_a_loop_really_did_is_no_damage(rows: list[Batch], tmp_path: Path) -> None:
    for row in rows:
        written = LoopLedger(tmp_path, LoopGuarantee(), row.generation)
        written.add(row.step, row.number_of_pass, row.place, row.ids)
        written.sync()
        written.close()
    found: list[loop_ledger.DamagedBytes] = []
    assert list(loop_ledger.read(tmp_path, found)) == rows
    assert not found


def of_the_previous_release(folder: Path) -> Path:
    """The same ledger without checksums."""
    path = folder / FILE
    data = path.read_bytes()
    header, rows = data[:HEADER_BYTES], data[HEADER_BYTES:]
    assert len(rows) == NUM_ROWS * ROW
    cut = [rows[at : at + ROW - CHECKSUM.size] for at in range(0, len(rows), ROW)]
    path.write_bytes(header.replace(FORMAT.encode(), PREVIOUS_FORMAT.encode()) + b"".join(cut))
    return folder


def test_a_loop_of_the_previous_release_is_read_and_goes_on_in_its_format(folder: Path) -> None:
    before = list(loop_ledger.read(folder))
    size = (of_the_previous_release(folder) / FILE).stat().st_size
    assert loop_ledger.is_loop_run(folder)
    assert list(loop_ledger.read(folder)) == before
    assert loop_ledger.check(folder).holds
    with (folder / FILE).open("ab") as file:
        file.write(HEAD.pack(13, 1, 2, 0, SIZE))  # a part of a row
    again = LoopLedger(folder, LoopGuarantee(samples=24, once=True, all=True), 2)
    again.add(NUM_ROWS + 1, 2, 0, range(SIZE))
    again.sync()
    again.close()
    assert (folder / FILE).stat().st_size == size + ROW - CHECKSUM.size
    assert list(loop_ledger.read(folder)) == [*before, Batch(13, 2, 2, 0, (0, 1, 2, 3))]
    (folder / "fork").mkdir()
    loop_ledger.begin_fork(folder, folder / "fork", 6)
    assert FORMAT.encode() in (folder / "fork" / FILE).read_bytes()
    forked = list(loop_ledger.read(folder / "fork"))
    assert forked == [row._replace(generation=0) for row in before[:6]]


def test_a_longer_row_of_the_previous_release_ends_the_reading(folder: Path) -> None:
    before = list(loop_ledger.read(folder))
    of_the_previous_release(folder)
    with (folder / FILE).open("r+b") as file:
        file.seek(HEADER_BYTES + 4 * (ROW - CHECKSUM.size) + COUNT)
        file.write(struct.pack("<I", 1 << 30))
    assert list(loop_ledger.read(folder)) == before[:4]
