"""Traces of others: what is none, or damaged, is refused in words."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.components.profiler.tracing import trace
from surefoot.components.profiler.tracing.analysis import analyze, draw
from surefoot.core.errors import InputError
from tests.components.recorded import record, recorded, write

__all__ = ["recorded"]  # a fixture


def test_a_trace_that_is_none_is_refused_in_words(tmp_path: Path, recorded: Path) -> None:
    whole = recorded.read_bytes()
    text = gzip.decompress(whole)
    for name, data, words in (
        ("cut.json.gz", whole[: len(whole) // 2], "truncated or damaged"),
        (
            "flipped.json.gz",
            whole[:5000] + bytes([whole[5000] ^ 255]) + whole[5001:],
            "truncated or damaged|not a trace|not valid JSON",
        ),
        ("cut.json", text[: len(text) // 2], "is truncated"),
        ("empty.json", b"", "is not valid JSON"),
        ("picture.json", b"\x89PNG\r\n\x1a\n", "is not valid JSON"),
        ("deep.json", b"[" * 100_000, "truncated|not valid JSON"),
        ("other.json", b'{"version": 1}', "no list of traceEvents"),
        ("number.json", b"7", "no list of traceEvents"),
        (
            "chrome.json",
            b'{"traceEvents": [{"ph": "X", "name": "v8", "cat": "v8", "ts": 1, "dur": 2}]}',
            "holds no operator",
        ),
        (
            "odd.json",
            b'[7, null, {"ph": "X", "cat": "cpu_op", "ts": "1", "dur": NaN}]',
            "holds no operator",
        ),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=words):
            trace.read(tmp_path / name)
    with pytest.raises(InputError, match="cannot be read"):
        trace.read(tmp_path / "nowhere.json")


@pytest.mark.parametrize("damage", [b"\xa0\xc0", b"\x01", b"\xed\xb2\x80"])
def test_a_name_that_is_not_text_costs_that_name_alone(
    tmp_path: Path, recorded: Path, damage: bytes
) -> None:
    text = gzip.decompress(recorded.read_bytes())
    name = b'"name": "aten::addmm"'
    assert name in text
    damaged = tmp_path / "damaged.json.gz"
    damaged.write_bytes(gzip.compress(text.replace(name, name[:-1] + damage + b'"')))
    before, after = trace.read(recorded), trace.read(damaged)
    assert [(each.start_ns, each.end_ns) for each in after.slices] == [
        (each.start_ns, each.end_ns) for each in before.slices
    ]
    assert any(each.name not in {whole.name for whole in before.slices} for each in after.slices)


def test_a_window_closes_whatever_names_torch_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names come out of torch as bytes; only its summaries in Python cannot read them."""

    def fail(*given: Any, **options: Any) -> None:
        raise UnicodeDecodeError("utf-8", b"\xa0", 0, 1, "invalid start byte")

    monkeypatch.setattr(torch.autograd.profiler.profile, "_parse_kineto_results", fail)
    assert trace.read(record(tmp_path)).steps


ODD = ([], {}, [[1]], "x", None, True, -1, 10**400, 1e308, float("nan"))


def product_of(*shapes: Any, **details: Any) -> dict[str, Any]:
    args = {"Input Dims": shapes, "Input type": ["float"] * len(shapes), **details}
    row = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
    return {"traceEvents": [row | {"args": args}]}


@pytest.mark.parametrize(
    "shapes",
    [
        ([10**300, 10**300], [10**300, 4]),
        ([2, -3], [3, 4]),
        ([2**63], [1]),
        ([2**40, 2**40], [2**40, 4]),
        ([0] + [2**62] * 40, [1]),
        ([[2, 3], [10**300]], [3, 4]),
    ],
)
def test_a_trace_with_sizes_that_no_tensor_has_is_refused_in_words(
    shapes: tuple[Any, ...], tmp_path: Path
) -> None:
    with pytest.raises(
        InputError,
        match=r"is damaged: 'aten::mm' was given a tensor of a negative size or of 2\^63 elements",
    ) as told:
        analyze(write(tmp_path / "trace.json", product_of(*shapes)))
    assert told.value.hint


@pytest.mark.parametrize("num_bytes", [10**400, -(10**400), 2**63])
def test_a_trace_with_memory_that_no_machine_has_is_refused_in_words(
    num_bytes: int, tmp_path: Path
) -> None:
    document = product_of([2, 3], [3, 4])
    change = {
        "ph": "i",
        "name": "[memory]",
        "ts": 2,
        "args": {"Addr": 1, "Bytes": num_bytes, "Device Id": -1},
    }
    document["traceEvents"].append(change)
    with pytest.raises(InputError, match=r"is damaged: 2\^63 bytes or more were allocated at once"):
        analyze(write(tmp_path / "trace.json", document))


def test_details_of_other_types_are_left_aside_and_odd_facts_are_damage(
    tmp_path: Path, recorded: Path
) -> None:
    document = json.loads(gzip.decompress(recorded.read_bytes()))
    rows = [each for each in document["traceEvents"] if each.get("cat") == "cpu_op"]
    for row, odd in zip(rows, ODD * 6, strict=False):
        row["args"] = dict.fromkeys(
            ("External id", "Sequence number", "Fwd thread id", "Concrete Inputs"), odd
        )
        row["args"] |= {"Input Dims": [[2, 3], odd, [3, 4]], "Input type": [odd, "float", "float"]}
    document["traceEvents"] += [
        {"ph": "X", "cat": "cpu_op", "name": "odd", "ts": odd, "dur": 1} for odd in ODD
    ]
    draw(analyze(write(tmp_path / "trace.json.gz", document)), tmp_path / "drawn")
    for name in ("num_steps", "step_s", "memory", "first_step"):
        (tmp_path / "facts.json").write_text(
            json.dumps({name: {"before": "x"} if name == "step_s" else "x"})
        )
        with pytest.raises(InputError, match=r"facts\.json is damaged"):
            analyze(tmp_path / "trace.json.gz")
