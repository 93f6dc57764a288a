"""What torch compiled in this process, again and again: which code, why, for how long, and where a graph had to end.

torch keeps a record of its last compilations (`torch._dynamo.utils.get_compilation_metrics`), which is private; where it is gone the
steward has nothing to tell. https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html
"""

from __future__ import annotations

import linecache
import re
import sys
from pathlib import PurePath
from typing import Any

from surefoot.contract.state import Compilation

_AFTER_A_BREAK = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")


class Steward:
    """Hands out each compilation of this process once; those before it was made belong to somebody else."""

    def __init__(self) -> None:
        self._last = next(reversed(_records()), None)

    def take(self) -> list[Compilation]:
        """What was compiled since the last call; of very many the newest."""
        records = _records()
        new: list[Any] = []
        for record in reversed(records):
            if record is self._last:
                break
            new.append(record)
        if records:
            self._last = records[-1]
        return [_read(record) for record in reversed(new)]


def _records() -> list[Any]:
    loaded = sys.modules.get("torch._dynamo.utils")
    return list(getattr(loaded, "get_compilation_metrics", list)()) if loaded is not None else []


def _read(record: Any) -> Compilation:
    function, file, line = record.co_name or "", record.co_filename or "", record.co_firstlineno or 0
    resumed = _AFTER_A_BREAK.fullmatch(function)
    reasons = [_first_words(reason) for reason in record.restart_reasons or () if not reason.startswith("<class")]  # torch's own
    if resumed is not None:  # what follows a break: its own line is that of the break
        function, line = resumed.group(1), int(resumed.group(2))
        reasons.append(f"at {PurePath(file).name}:{line}: {linecache.getline(file, line).strip()}")
    return Compilation(
        function=function, file=file, line=line, elapsed_s=(record.duration_us or 0) / 1e6, num_operators=record.graph_op_count or 0,
        is_backward=record.is_forward is False, why_again=record.recompile_reason, ended_early="; ".join(reasons) or None,
    )  # fmt: skip


def _first_words(reason: str) -> str:
    """The headline of a reason and its explanation; hints and links stay out."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    explained = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return f"{lines[0]}: {explained}" if explained else lines[0] if lines else "no reason given"
