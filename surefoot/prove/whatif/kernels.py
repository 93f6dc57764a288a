"""Kernels of a compiled step: their source, their fused operators, and the bytes they move."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from surefoot.components.compiler.kernels import Graph, watch_kernels
from surefoot.contract.spec import RunSpec
from surefoot.core.errors import SpecError, StorageError, TaskError
from surefoot.prove.bench.rehearsal import Rehearsal

TABLE = "kernels.json"


def find_kernels(spec: RunSpec) -> list[Graph]:
    """Run one compiled step of `spec` in this process; return its graphs in order.

    If the spec compiles nothing, the whole model is compiled.

    Raises:
        TaskError: If a part cannot be compiled, or nothing was compiled.
        SpecError: For `compile.what = "step"`, since its graph does not show from which call of an
            operator a part comes.
    """
    if spec.compile.what == "step":
        raise SpecError(
            'compile.what = "step" does not go with whatif kernels',
            hint='use compile.what = "model" or "blocks" for it',
        )
    what = "model" if spec.compile.what == "none" else spec.compile.what
    compiled = spec.replace(compile={"what": what, "on_failure": "stop"})
    with Rehearsal(compiled, steps=1) as rehearsal, watch_kernels() as graphs:
        rehearsal.assembly.engine.steps.record.is_on = (
            False  # a step that is recorded is not compiled
        )
        rehearsal.take("step")
    if not graphs:
        raise TaskError(
            "nothing was compiled: the step calls none of what was to be", hint="see compile.what"
        )
    return graphs


def as_row(graph: Graph) -> dict[str, Any]:
    """Return a graph as one object for JSON, without its source."""
    kernels = [asdict(kernel) for kernel in graph.kernels]
    return {
        "graph": graph.name,
        "num_operators": graph.num_operators,
        "num_kernels": len(graph.kernels),
        "eager_bytes": graph.eager_bytes,
        "num_bytes": graph.num_bytes,
        "kernels": kernels,
    }


def write_kernels(graphs: Sequence[Graph], folder: Path) -> list[Path]:
    """Write the source of each graph, and one table of all graphs, to a folder; return the files.

    Raises:
        StorageError: If the folder cannot be written.
    """
    texts = {f"{graph.name}.py": graph.source for graph in graphs}
    texts[TABLE] = json.dumps([as_row(graph) for graph in graphs], indent=1) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written: {error.strerror}",
            hint="name another folder",
        ) from None
    return [folder / name for name in texts]
