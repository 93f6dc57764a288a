"""Observation of the first step of a process: the dtypes of its parameters and operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType

from torch import nn

from surefoot.components.precision.record import DtypeRecord
from surefoot.contract.state import StepReport, master_of
from surefoot.train.step.program import LiveUpdate, StepInput, StepProgram

Context = AbstractContextManager[object]


class FirstStepRecord:
    """Record of the first step that this process trains.

    Attributes:
        is_on: Whether the first step is recorded. A recorded step is not compiled.
        is_first: Whether the current step is recorded.
        found: The record; None before the first step.
    """

    def __init__(self, model: nn.Module, updates: Sequence[LiveUpdate], *, tf32: bool) -> None:
        self._model, self._updates, self._tf32 = model, updates, tf32
        self.is_on, self.is_first = True, False
        self.found: DtypeRecord | None = None

    @contextmanager
    def of_step(self, *, hooked: bool) -> Iterator[DtypeRecord]:
        """Return a context for the first step; the record of a step that fails is discarded."""
        record = self.found = DtypeRecord(self._model, tf32=self._tf32, hooked=hooked)
        self.is_first = True
        try:
            yield record
        except BaseException:
            record.leave()
            self.found = None
            raise
        finally:
            self.is_first = False
        states = (each for update in self._updates for each in update.guarded.states())
        record.see_update(states, master_of)


class RecordedStep:
    """Step program that records the first step of this process.

    Args:
        plain: Program of all other steps.
        observed: Function that returns a program whose passes run within a context.
        record: The record that the first step fills.
        eager: Returns a context without compilation, since compiled operators cannot be observed.
        is_graph: Whether a step runs as one compiled graph, which ignores hooks.
    """

    def __init__(
        self,
        plain: StepProgram,
        observed: Callable[[Context], StepProgram],
        record: FirstStepRecord,
        *,
        eager: Callable[[], AbstractContextManager[None]],
        is_graph: Callable[[int], bool],
    ) -> None:
        self._plain, self._observed, self._record = plain, observed, record
        self._eager, self._is_graph = eager, is_graph

    def __call__(self, given: StepInput) -> StepReport:
        record = self._record
        if record.found is not None or not record.is_on:
            return self._plain(given)
        with record.of_step(hooked=not self._is_graph(given.number)) as dtypes:
            # only in step 1, so that a resumed run computes the same
            program = (
                self._observed(_Within(self._eager, dtypes)) if given.number == 1 else self._plain
            )
            return program(given)


class _Within:
    """Context that enters `eager()` and then `record`, once for each update of a step."""

    def __init__(
        self, eager: Callable[[], AbstractContextManager[None]], record: DtypeRecord
    ) -> None:
        self._eager, self._record = eager, record

    def __enter__(self) -> None:
        with ExitStack() as entered:
            entered.enter_context(self._eager())
            entered.enter_context(self._record)
            self._entered = entered.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.__exit__(kind, error, trace)
