"""Kernels that torch.compile generates: their source, operators, and bytes read and written.

    with watch_kernels() as graphs:
        model(batch)
    graphs[0].kernels

Inductor passes the generated source to `GraphLowering.save_output_code` while the graph and its
schedule still exist (`V.graph`); both names are private. Every buffer of a kernel counts once in
its bytes, as in inductor's `get_read_write_buffers_sizes`.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config, ir, scheduler
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx import Node

VIEWS = ("_unsafe_view",)  # in addition to the operators whose schema marks them as views
EPILOGUE = "copy_"  # the copy into an input at the end of a graph, in place of an in-place change


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Kernel launch of a compiled graph, compared with eager mode.

    `operators` are the eager operators that the kernel computes. `num_bytes` is the number of bytes
    that the kernel reads and writes, and `eager_bytes` is that of its operators in eager mode. If
    several kernels compute an operator, its eager bytes count for the first of them. An operator
    that a backward graph recomputes has no eager bytes, because eager mode saves its output. A
    library kernel (`is_library`), such as a matmul, is called and not generated.
    """

    operators: tuple[str, ...]
    is_library: bool
    num_bytes: int
    eager_bytes: int


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Graph that inductor compiled, with its source and its kernels.

    `num_operators` is the number of operators in eager mode, where each is one kernel launch.
    `eager_bytes` is the number of bytes that these operators read and write.
    """

    name: str
    source: str
    num_operators: int
    eager_bytes: int
    kernels: tuple[Kernel, ...]

    @property
    def num_bytes(self) -> int:
        return sum(kernel.num_bytes for kernel in self.kernels)


@contextmanager
def watch_kernels() -> Iterator[list[Graph]]:
    """Collect the graphs for which inductor generates code inside the `with` block, in order.

    Inductor's caches are disabled meanwhile, because no code is generated after a cache hit.
    """
    found: list[Graph] = []

    def keep(source: str) -> None:
        found.append(_read(V.graph, source, len(found) + 1))

    lowering: Any = GraphLowering
    before = lowering.save_output_code
    lowering.save_output_code = keep
    try:
        with config.patch(force_disable_caches=True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
            yield found
    finally:
        lowering.save_output_code = before


def _read(graph: Any, source: str, number: int) -> Graph:
    operators = _find_operators(
        graph.graph.nodes, is_again=_computes_again if graph.is_backward else lambda node: False
    )
    kernels: list[Kernel] = []
    counted: set[int] = set()
    for each in filter(_launches, graph.scheduler.nodes):
        origins = {
            origin
            for part in each.get_nodes()
            if part.node is not None
            for origin in _origins(part)
        }
        inside = [one for one in operators if origins & one.nodes]
        kernels.append(
            Kernel(
                operators=tuple(one.name for one in inside),
                is_library=each.is_extern(),
                num_bytes=each.get_read_write_buffers_sizes(),
                eager_bytes=sum(one.num_bytes for one in inside if id(one) not in counted),
            )
        )
        counted |= set(map(id, inside))
    runs = [one for one in operators if not one.is_again]
    return Graph(
        name=f"graph-{number}-{'backward' if graph.is_backward else 'forward'}",
        source=source,
        num_operators=len(runs),
        eager_bytes=sum(one.num_bytes for one in runs),
        kernels=tuple(kernels),
    )


def _launches(node: Any) -> bool:
    """Return whether a node of inductor's schedule is a kernel launch.

    A no-op is not a launch, nor is one of several outputs of a call.
    """
    return not isinstance(node, scheduler.NopKernelSchedulerNode) and not isinstance(
        node.node, ir.MultiOutput
    )


def _origins(part: Any) -> Collection[Node]:
    """Return the graph nodes that a node of inductor's schedule computes.

    For a library call, this is only the node of that call.
    """
    called = part.node.get_origin_node() if part.is_extern() else None
    return part.node.get_origins() if called is None else (called,)


# ---- the operators of eager mode


@dataclass(frozen=True)
class _Operator:
    """Operator of eager mode: one node of the graph, or all nodes into which it was decomposed.

    `is_again` is True if a backward graph recomputes it.
    """

    name: str
    nodes: frozenset[Node]
    num_bytes: int
    is_again: bool


def _find_operators(nodes: Collection[Node], is_again: Callable[[Node], bool]) -> list[_Operator]:
    parts: dict[Any, set[Node]] = {}
    names: dict[Any, str] = {}
    for node in filter(_computes, nodes):
        whole = node.meta.get("original_aten")
        is_whole = whole is None or _name(whole) == _name(node.target)
        origin = [each.name for each in node.meta.get("from_node") or ()][:1]
        key = node if is_whole else (_name(whole), node.meta.get("seq_nr"), *origin)
        parts.setdefault(key, set()).add(node)
        names[key] = _name(node.target if is_whole else whole)
    found = []
    for key, mine in parts.items():
        again = all(map(is_again, mine))
        found.append(
            _Operator(
                names[key] + " again" * again,
                frozenset(mine),
                0 if again else _count_bytes(mine),
                again,
            )
        )
    return found


def _name(target: Any) -> str:
    """Return the name of an operator without its overload, such as `add` for `aten.add.Tensor`."""
    return str(getattr(target, "overloadpacket", target)).rpartition(".")[2]


def _computes(node: Node) -> bool:
    """Return whether a graph node computes a tensor.

    Inputs, views, `getitem` and sizes do not, nor does the copy at the end of a graph that stands
    for an in-place change of an input.
    """
    if (
        node.op != "call_function"
        or node.target is operator.getitem
        or not _size_of(node.meta.get("val"))
    ):
        return False
    return not (
        getattr(node.target, "is_view", False) or _name(node.target) in VIEWS or _is_epilogue(node)
    )


def _is_epilogue(node: Node) -> bool:
    return (
        _name(node.target) == EPILOGUE
        and isinstance(node.args[0], Node)
        and node.args[0].op == "placeholder"
    )


def _computes_again(node: Node) -> bool:
    """Return whether a node of a backward graph recomputes an operator of the forward pass.

    Eager mode would save the output of the operator instead.
    """
    return bool(node.meta.get("partitioner_tag") == "is_forward")


def _count_bytes(mine: set[Node]) -> int:
    """Return the bytes that the nodes `mine` read from other nodes and write for other nodes.

    A tensor that several of them read counts once.
    """
    reads: dict[Node, int] = {}
    written = 0
    for node in mine:
        for given in node.all_input_nodes:
            source = _source(given)
            if source not in mine:
                reads[source] = max(reads.get(source, 0), _size_of(given.meta.get("val")))
        if any(user not in mine for user in _users(node)):
            written += _size_of(node.meta.get("val"))
    return sum(reads.values()) + written


def _source(node: Node) -> Node:
    """Return the node that computed the tensor of which `node` is a view, or `node` itself."""
    while node.op == "call_function" and not _computes(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _users(node: Node) -> Iterator[Node]:
    """Yield the nodes that use the values of `node`, directly or through views."""
    for user in node.users:
        if user.op == "call_function" and not _computes(user) and not _is_epilogue(user):
            yield from _users(user)
        else:
            yield user


def _size_of(value: Any) -> int:
    """Return the bytes of a tensor, or of a list of tensors; 0 for any other value.

    The elements of an expanded dimension share memory and count once.
    """
    if isinstance(value, Tensor):
        sizes = [
            _hint(size)
            for size, stride in zip(value.shape, value.stride(), strict=True)
            if _hint(stride)
        ]
        return math.prod(sizes) * value.dtype.itemsize
    return sum(map(_size_of, value)) if isinstance(value, list | tuple) else 0


def _hint(size: int | torch.SymInt) -> int:
    """Return a size as an int; for a symbolic size, the value with which it was traced.

    Calling `int` on a symbolic size would specialize the graph to that value.
    """
    return int(size.node.hint or 0) if isinstance(size, torch.SymInt) else size
