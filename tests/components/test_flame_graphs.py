"""Tests of flame graphs.

Their widths add up to the window, and a name is never more than words.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from surefoot.components.profiler.tracing import flame, fold, trace
from surefoot.components.profiler.tracing.analysis import analyze, draw
from tests.components.recorded import recorded, write

__all__ = ["recorded"]  # a fixture


def test_the_widths_of_every_flame_graph_add_up_to_the_window(recorded: Path) -> None:
    found = trace.read(recorded)
    first_ns, last_ns = found.window
    for root in (fold.by_stack(found), fold.by_module(found)):
        waiting = [root]
        while waiting:
            frame = waiting.pop()
            assert frame.self_ns >= 0
            waiting.extend(frame.children.values())
        assert root.total_ns == last_ns - first_ns
        drawn = list(flame.boxes(root))
        assert drawn[0].total_ns == last_ns - first_ns
        for box in drawn:
            inside = [
                each
                for each in drawn
                if each.row == box.row + 1
                and box.left_ns <= each.left_ns < box.left_ns + box.total_ns
            ]
            assert sum(each.total_ns for each in inside) <= box.total_ns


def names(root: fold.StackFrame) -> set[tuple[str, ...]]:
    found, waiting = set(), [(root, (root.name,))]
    while waiting:
        frame, path = waiting.pop()
        found.add(path)
        waiting += [(child, (*path, child.name)) for child in frame.children.values()]
    return found


def test_the_backward_pass_of_an_operator_stands_under_the_module_that_called_it(
    recorded: Path,
) -> None:
    paths = names(fold.by_module(trace.read(recorded)))
    node = "autograd::engine::evaluate_function: "
    assert ("the window", "module Sequential", "module 0", "aten::linear") in paths
    backward = ("the window", "backward", "module Sequential")
    assert (*backward, "module 0", f"{node}AddmmBackward0") in paths
    assert (*backward, "module 1", f"{node}ReluBackward0") in paths
    assert (*backward, "module 2", f"{node}ReluBackward0") not in paths


def test_python_stacks_lead_to_the_operator(recorded: Path) -> None:
    paths = names(fold.by_stack(trace.read(recorded)))
    assert any("take_step" in " ".join(path) and path[-1] == "aten::addmm" for path in paths)


def event(category: str, name: str, *, ts: int, dur: int) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur}


HOSTILE = '</title><script>alert(1)</script><g onclick="x" a=\'&\x00\ud800\x1b]'


def test_a_hostile_name_is_shown_as_text(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "ProfilerStep#1", ts=0, dur=10),
        event("cpu_op", HOSTILE, ts=1, dur=8),
    ]
    found = analyze(write(tmp_path / "trace.json", {"traceEvents": events}))
    for path in draw(found, tmp_path / "out"):
        if path.suffix == ".svg":
            root = ET.fromstring(path.read_text())
            scripts = [each for each in root.iter() if each.tag.endswith("script")]
            assert len(scripts) == 1
            assert "alert" not in (scripts[0].text or "")
            assert not [
                each
                for each in root.iter()
                for key in each.attrib
                if key.startswith("on") or "href" in key
            ]
            assert any(
                "alert(1)" in (each.text or "")
                for each in root.iter()
                if each.tag.endswith("title")
            )


def test_a_drawing_names_nothing_outside_itself(recorded: Path, tmp_path: Path) -> None:
    for path in draw(analyze(recorded), tmp_path):
        text = path.read_text()
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "url(" not in text
        assert "@import" not in text


def test_device_work_stands_under_the_operator_that_launched_it(tmp_path: Path) -> None:
    linked = {"args": {"External id": 7}}
    events = [
        event("user_annotation", "ProfilerStep#1", ts=0, dur=10),
        event("user_annotation", "module a", ts=1, dur=4),
        event("cpu_op", "aten::mm", ts=2, dur=2) | linked,
        event("kernel", "gemm", ts=5, dur=90) | linked | {"pid": 0, "tid": 7},
    ]
    found = analyze(write(tmp_path / "trace.json", {"traceEvents": events}))
    assert found.by_device is not None
    assert ("device time", "module a", "aten::mm", "gemm") in names(found.by_device)
    assert found.by_device.total_ns == 90_000
    assert [(each.name, each.self_device_s) for each in found.operators] == [("aten::mm", 90e-6)]
