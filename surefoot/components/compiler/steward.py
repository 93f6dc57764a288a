"""Compilations and recompilations in this process: the code, the reason, the time, graph breaks.

torch keeps records of its last compilations (`torch._dynamo.utils.get_compilation_metrics`) and of
every graph break (`graph_break_reasons` in the same module). Both names are private; if torch lacks
them, nothing is reported. https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch

from surefoot.contract.state import Compilation

_AFTER_A_BREAK = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")
_OF_TORCH = os.path.dirname(torch.__file__) + os.sep
RECORDS, BREAKS = "get_compilation_metrics", "graph_break_reasons"
_JUMP = "Data-dependent branching: the value of a tensor decides which branch runs"


class Steward:
    """Reader of the compilations in this process, which returns each compilation once.

    Compilations from before the reader was created are left out.
    """

    def __init__(self) -> None:
        self._last = {
            name: next(reversed(_torch_records(name)), None) for name in (RECORDS, BREAKS)
        }

    def take(self) -> list[Compilation]:
        """Return the compilations since the last call of this method.

        torch keeps only its last records, so that the oldest compilations may be missing.
        """
        records = self._take_new(RECORDS)
        ended = self._read_break_reasons(records)
        return [_read(record, ended.get(id(record))) for record in records]

    def _take_new(self, name: str) -> list[Any]:
        """Return the records that torch keeps under `name`, except those returned before.

        If torch has dropped the record that was returned last, for example after a reset, all
        records are returned.
        """
        kept, new = _torch_records(name), list[Any]()
        for each in reversed(kept):
            if each is self._last[name]:
                break
            new.append(each)
        if kept:
            self._last[name] = kept[-1]
        return new[::-1]

    def _read_break_reasons(self, records: Sequence[Any]) -> Mapping[int, str]:
        """Return the reasons of the graph breaks since the last call of this method.

        They are indexed by the `id` of the compilation record of the function in which the graph
        breaks.
        """
        ended: dict[int, str] = {}
        for each in self._take_new(BREAKS):
            if not each.user_stack:
                continue
            # the frame of the compiled function; the last frame is the innermost
            outer = each.user_stack[0]
            inner = next(
                (
                    frame
                    for frame in reversed(each.user_stack)
                    if not frame.filename.startswith(_OF_TORCH)
                ),
                outer,
            )
            mine = [
                record
                for record in records
                if (record.co_filename, record.co_name) == (outer.filename, outer.name)
                and record.co_firstlineno <= outer.lineno
                and id(record) not in ended
            ]
            if mine:
                ended[id(max(mine, key=lambda record: record.co_firstlineno))] = _describe_break(
                    each.reason, inner.filename, inner.lineno
                )
        return ended


def _torch_records(name: str) -> Sequence[Any]:
    """Return the records in `torch._dynamo.utils` under `name`, as a list.

    The attribute may be a list, or a function that returns one.
    """
    kept: Any = getattr(sys.modules.get("torch._dynamo.utils"), name, ())
    return list(kept() if callable(kept) else kept)


def _read(record: Any, ended_early: str | None) -> Compilation:
    function, file, line = (
        record.co_name or "",
        record.co_filename or "",
        record.co_firstlineno or 0,
    )
    resumed = _AFTER_A_BREAK.fullmatch(function)
    if resumed is not None:  # the code after a graph break: its first line is that of the break
        function, line = resumed.group(1), int(resumed.group(2))
    # a break without code to compile after it, as in a loop
    if record.fail_reason and not ended_early:
        words = _describe_break(
            record.fail_reason,
            record.fail_user_frame_filename or file,
            record.fail_user_frame_lineno or line,
        )
        ended_early = f"no part of it is compiled: {words}"
    return Compilation(
        function=function,
        file=file,
        line=line,
        elapsed_s=(record.duration_us or 0) / 1e6,
        num_operators=record.graph_op_count or 0,
        is_backward=record.is_forward is False,
        why_again=record.recompile_reason,
        ended_early=ended_early,
    )


def _describe_break(reason: str, file: str, line: int) -> str:
    """Return why a graph ends, and the line of the user's code at which it ends.

    torch's hints and links are left out.
    """
    lines = [part.strip() for part in reason.splitlines() if part.strip()]
    explained = next(
        (part.removeprefix("Explanation: ") for part in lines if part.startswith("Explanation: ")),
        "",
    )
    why = f"{lines[0]}: {explained}" if explained else lines[0] if lines else "no reason given"
    why = _JUMP if why.startswith("generic_jump") else why
    return f"{why}; at {PurePath(file).name}:{line}: {linecache.getline(file, line).strip()}"
