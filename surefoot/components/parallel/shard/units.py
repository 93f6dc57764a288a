"""Units of a model, which are modules whose weights all ranks gather together.

The gathers of each unit are counted. If the counts of the ranks differ, an error is raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from surefoot.core.errors import LostRank, UserCodeError
from surefoot.core.units import name_some
from surefoot.runtime.comm.host_memory import DIFFERENT

HINT = (
    "weights are gathered by all ranks together: call the same blocks on every rank in every pass, "
    "branch inside of a block (memory.blocks names larger ones), or set layout.zero_stage = 1"
)
MAX_NAMED = 6
ROOT = "the model outside of its blocks"


class Units:
    """Units of a model, which are modules whose weights all ranks gather together.

    They are in the order of `modules`, which begins with the model itself.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        found = {id(module): name for name, module in model.named_modules()}
        self.names = tuple(found[id(module)] for module in modules)
        own = {name: _own_parameters(model, name, self.names) for name in self.names}
        self._titles = {name: _title(name, parameters) for name, parameters in own.items()}
        self._empty = {name for name, parameters in own.items() if not parameters}
        self._gathered = dict.fromkeys(self.names, 0)
        self._order: list[str] = []  # the order of first gathers on this rank in this step
        # the same order in the previous step, or in a trial before the first step
        self._order_before: list[str] = []

    def begin(self) -> None:
        """Start a step, and reset the counts of gathers."""
        self._order_before, self._order = self._order, []
        self._gathered = dict.fromkeys(self.names, 0)

    def counts(self) -> list[float]:
        """Return the number of times that this rank has gathered each unit in this step, and a 1.

        If the lists of all ranks are added, their last number is the number of ranks.
        """
        return [*map(float, self._gathered.values()), 1.0]

    def check(self, sums: Sequence[float]) -> None:
        """Raise UserCodeError unless all ranks have gathered each unit the same number of times.

        `sums` are the `counts` of all ranks, added.
        """
        *counts, num_ranks = sums
        for (name, mine), count in zip(self._gathered.items(), counts, strict=True):
            if count != mine * num_ranks:
                raise UserCodeError(
                    "the ranks do not call the same blocks: "
                    f"this one has gathered {self._titles[name]} {mine} times in this step, "
                    f"and all {num_ranks:g} ranks {count:g} times",
                    hint=HINT,
                )

    @contextmanager
    def count_gather(self, name: str) -> Iterator[None]:
        """Count a gather of the unit `name`, which runs inside this context.

        Raises UserCodeError if a different collective runs on another rank at the same time.
        """
        self._gathered[name] += 1
        if name not in self._order:
            self._order.append(name)
        with self._explain_mismatch("gathers", name):
            yield

    @contextmanager
    def run_reduce_scatter(self, name: str) -> Iterator[None]:
        """Provide a context for the reduce-scatter of the gradients of the unit `name`.

        Raises UserCodeError if a different collective runs on another rank at the same time.
        """
        with self._explain_mismatch("sums the gradients of", name, looks_ahead=False):
            yield

    @contextmanager
    def _explain_mismatch(
        self, does: str, name: str, *, looks_ahead: bool = True
    ) -> Iterator[None]:
        try:
            yield
        except LostRank as error:
            if not error.message.startswith(DIFFERENT):
                raise
            # units that came later in the previous step may still come
            comes = looks_ahead and name in self._order_before
            later = self._order_before[self._order_before.index(name) :] if comes else []
            done = {
                *later,
                *self._empty,
                *(each for each, count in self._gathered.items() if count),
            }
            skipped = [title for each, title in self._titles.items() if each not in done]
            listed = name_some(skipped, MAX_NAMED)
            more = f", and has not called in this step: {listed}" if skipped else ""
            raise UserCodeError(
                f"{error.message}: this rank {does} {self._titles[name]}{more}", hint=HINT
            ) from error


def _own_parameters(model: nn.Module, name: str, names: Sequence[str]) -> list[str]:
    """Return the names of the parameters that are gathered with the unit `name`.

    Parameters of units inside of it are left out.
    """
    prefix = f"{name}." if name else ""
    inner = tuple(f"{each}." for each in names if each != name and each.startswith(prefix))
    split = [
        each for each, parameter in model.named_parameters() if hasattr(parameter, "device_mesh")
    ]
    return [each for each in split if each.startswith(prefix) and not each.startswith(inner)]


def _title(name: str, own: Sequence[str]) -> str:
    """Return the text for a unit in errors, such as `block 'head' (head.weight, head.bias)`."""
    listed = f" ({', '.join(own[:3])}{', ...' if len(own) > 3 else ''})" if own else ""
    return f"block {name!r}{listed}" if name else f"{ROOT}{listed}"
