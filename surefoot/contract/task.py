"""The protocol of a task (its source, loss, updates, metrics), and loading a task by name.

Importing this module does not import torch. `resolve` looks up the optional methods of a task once;
a missing one is None.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

from surefoot.contract import signature
from surefoot.core.errors import SurefootError, TaskError
from surefoot.core.process import frames

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn

Batch = Any
Output = Any
Guarantee = Literal["proven", "replayed", "none"]
# an entry of a task's state(): the same on all ranks, or one per rank
OnRanks = Literal["replicated", "per_rank"]
SHOULD_HAVE = ("model", "data", "forward", "loss")
MAY_HAVE = (
    "augment",
    "collate",
    "counts",
    "metrics",
    "blocks",
    "parameter_groups",
    "optimizer",
    "schedule",
    "state",
    "updates",
)
OF_A_FILE = "surefoot_task_"  # prefix of the module name of a task file
# modules that surefoot is importing, outermost first
_imported: ContextVar[tuple[str, ...]] = ContextVar("imported", default=())


@runtime_checkable
class Source(Protocol):
    """Data that returns samples by index, in the order that the caller decides."""

    guarantee: Guarantee
    digest: str

    def __len__(self) -> int: ...

    def read(self, ids: np.ndarray) -> Batch:
        """Return the batch of the samples `ids` (int64 indices, shape (batch,)), in that order."""
        ...

    def describe(self) -> str: ...


@dataclass(frozen=True)
class Term:
    """Term of a loss: the *sum* over `count` items, not their mean.

    The step divides `total` by the count of the global batch.

    Args:
        name: Name of the term in reports and events.
        total: Sum over the items, a scalar tensor. In a batch in which the term does not depend on
            the model, such as images without boxes, it may be a constant.
        count: Number of items, an int or a scalar tensor.
        weight: Multiplier of the term's mean.
        fixed: True for a term that does not depend on the batch, such as a penalty on weights:
            it counts once per step. If the step is divided into microbatches or among ranks,
            the mean of the term over them is used. `counts(batch)` need not contain it.
    """

    name: str
    total: Tensor
    count: int | Tensor
    weight: float = 1.0
    fixed: bool = False


class Loss:
    """Sum of terms, each of which has a total and a count.

    Args:
        *terms: The terms.
        additive: False for a loss that may not be split over microbatches.
    """

    __slots__ = ("additive", "terms")

    def __init__(self, *terms: Term, additive: bool = True) -> None:
        self.terms = terms
        self.additive = additive

    @classmethod
    def sum(
        cls, total: Tensor, count: int | Tensor, *, name: str = "loss", additive: bool = True
    ) -> Loss:
        """Return a loss of one term: `total`, the sum over `count` items.

        `cross_entropy(..., reduction="sum")` returns such a sum.
        """
        return cls(Term(name, total, count), additive=additive)

    def __repr__(self) -> str:
        return f"Loss({', '.join(map(repr, self.terms))}, additive={self.additive})"


def as_loss(made: object, name: str) -> Loss:
    """Return `made` if it is a Loss with scalar totals and counts; raise TaskError otherwise.

    A loss function returned `made`; `name` is the owner of that function, for the message.
    """
    if not isinstance(made, Loss):
        raise TaskError(
            f"the loss of {name} must be a Loss; got a {type(made).__name__}",
            hint=(
                "return Loss.sum(total, count) with a summed total: "
                'cross_entropy(..., reduction="sum")'
            ),
        )
    for term in made.terms:
        for part, value in (("total", term.total), ("count", term.count)):
            if getattr(value, "ndim", 0):
                raise TaskError(
                    f"the {part} of term {term.name} has shape "
                    f"{tuple(getattr(value, 'shape', ()))}",
                    hint="make it a scalar with .sum()",
                )
    return made


@dataclass(frozen=True)
class Update:
    """Optimizer update that is one of several in a step, such as that of a GAN's generator.

    Args:
        name: Name of the update in reports and events.
        loss: Function of (model, batch) that returns a `Loss`.
        parameters: Parameters that this update trains.
        optimizer: Optimizer of these parameters; None for the spec's optimizer.
        every: The update runs in steps whose number is a multiple of this.
    """

    name: str
    loss: Callable[[Any, Batch], Loss]
    parameters: Iterable[nn.Parameter]
    optimizer: torch.optim.Optimizer | None = None
    every: int = 1


class Metric(Protocol):
    """Partial result of a metric on one batch, which can be merged with those of other batches.

    It holds totals and counts, not means.
    """

    better: Literal["higher", "lower"]

    def merge(self, other: Any) -> Metric: ...

    def value(self) -> float | None:
        """Return the value over all merged batches; None if there is no data."""
        ...


class Task(Protocol):
    """Protocol of a task: its four required methods. `ResolvedTask` lists the optional ones.

    A task with `updates(model)` needs no `loss` for training; its `forward` is used in evaluation
    and prediction.
    """

    def model(self) -> nn.Module: ...

    def data(self, split: str) -> Source: ...

    def forward(self, model: Any, batch: Batch) -> Output: ...

    def loss(self, output: Output, batch: Batch) -> Loss: ...


@dataclass(frozen=True, kw_only=True)
class ResolvedTask:
    """Task with its optional methods looked up; None for a method that the task does not have."""

    task: Task
    name: str
    importable: str | None
    unit: str
    augment: Callable[[Batch, Any], Batch] | None
    collate: Callable[[list[Any]], Batch] | None
    counts: Callable[[Batch], Mapping[str, int] | int] | None
    metrics: Callable[[Output, Batch], Mapping[str, Metric]] | None
    blocks: Callable[[Any], Sequence[Any]] | None
    parameter_groups: Callable[[Any], Sequence[dict[str, Any]]] | None
    optimizer: Callable[[Sequence[dict[str, Any]]], torch.optim.Optimizer] | None
    schedule: Callable[[int, int], float] | None
    state: Callable[[], Mapping[str, Any]] | None
    state_on_ranks: Mapping[str, OnRanks]
    updates: Callable[[Any], Sequence[Update]] | None


def resolve(task: Task, importable: str | None = None) -> ResolvedTask:
    """Look up the optional methods of `task`, and check the required ones.

    Raises TaskError if model, data, forward or loss is missing, or an optional method is not
    callable. `updates` replaces `loss`.
    """
    kind = type(task).__name__
    if isinstance(task, type):
        raise TaskError(
            f"the task must be an object; got the class {task.__name__}",
            hint=f"give {task.__name__}()",
        )
    missing = [part for part in SHOULD_HAVE if not callable(getattr(task, part, None))]
    if callable(getattr(task, "updates", None)):
        # `updates` defines the training; `forward` is for evaluation and prediction
        evaluated = any(callable(getattr(task, part, None)) for part in ("metrics", "loss"))
        missing = [part for part in missing if part != "loss" and (part != "forward" or evaluated)]
    if missing:
        source = (
            None if importable is None or len(missing) < 2 else signature.find_source(importable)
        )
        other = "" if source is None else f"{signature.suggest_class(source)}; "
        raise TaskError(
            f"task {kind} has no method {', '.join(missing)}",
            hint=f"{'' if kind in other else other}a task has model(), data(split), "
            "forward(model, batch) and loss(output, batch); with updates(model) it needs no loss, "
            "and forward only to be evaluated",
        )
    parts = {part: getattr(task, part, None) for part in MAY_HAVE}
    bad = [part for part, value in parts.items() if value is not None and not callable(value)]
    if bad:
        raise TaskError(
            f"task {kind}: {', '.join(bad)} is not a method", hint="rename it, or make it a method"
        )
    words = getattr(task, "state_on_ranks", {})
    if not isinstance(words, Mapping) or not all(
        word in get_args(OnRanks) for word in words.values()
    ):
        raise TaskError(
            f"task {kind}: state_on_ranks is {words!r}",
            hint=(
                "make it a dict of entries of state(), "
                "each 'replicated' (the same on all ranks) or 'per_rank' (a separate "
                "value on each rank)"
            ),
        )
    return ResolvedTask(
        task=task,
        name=kind.lower(),
        importable=importable,
        unit=getattr(task, "unit", "samples"),
        state_on_ranks=words,
        **parts,
    )


def load(use: str, parameters: Mapping[str, Any]) -> ResolvedTask:
    """Import the class that `use` names and build the task with `parameters`.

    `use` is a built-in task's name, `file.py:Class` or `package.module:Class`. Raises TaskError if
    the class cannot be found or built; the user's exception is chained.
    """
    module_name, _, class_name = use.partition(":")
    module = _find_main(module_name, class_name)
    try:
        if module is not None:
            pass
        elif not class_name:
            module = importlib.import_module(f"surefoot.tasks.{use}")
            class_name = module.__all__[0]
        elif module_name.endswith(".py"):
            module = import_file(Path(module_name))
        else:
            if (here := str(Path.cwd())) not in sys.path:
                sys.path.append(here)  # where `python -m` and `signature.find_source` look too
            with _record_import(module_name):
                module = importlib.import_module(module_name)
    except TaskError:
        raise
    except ModuleNotFoundError as error:
        if class_name and f"{module_name}.".startswith(f"{error.name}."):
            file = f"{module_name.replace('.', '/')}.py:{class_name}"
            hint = f"change to the folder that holds the module, or name its file: {file}"
            raise _failed_import(use, error, hint) from error
        raise _failed_import(use, error) from error
    except (Exception, SystemExit) as error:
        raise _failed_import(use, error) from error
    made = getattr(module, class_name, None)
    if made is None:
        hint = f"it has: {signature.name_nearest(class_name, _classes(module))}"
        raise TaskError(f"{module_name} has no {class_name}", hint=hint)
    try:
        task = made(**parameters)
    except SurefootError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(
            f"task {use} cannot be built: {type(error).__name__}: {error}{_find_user_line(error)}",
            hint="its parameters are the keys of [task]",
        ) from error
    return resolve(task, importable=use)


def _failed_import(
    use: str,
    error: BaseException,
    hint: str = "run the command with --traceback to see the whole error",
) -> TaskError:
    return TaskError(
        f"task {use!r} does not import: {type(error).__name__}: {error}{_find_user_line(error)}",
        hint=hint,
    )


def _find_main(module_name: str, class_name: str) -> ModuleType | None:
    """Return the running script if it is the named module and defines the class; else None.

    Importing the script would run it a second time.
    """
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if module_name.endswith(".py"):
        is_main = isinstance(file, str) and Path(module_name).resolve() == Path(file).resolve()
    else:
        is_main = getattr(getattr(main, "__spec__", None), "name", None) == module_name
    return main if is_main and hasattr(main, class_name) else None


@contextlib.contextmanager
def _record_import(name: str) -> Iterator[None]:
    """Record that surefoot imports `name` in the block, so that a run cannot start there."""
    token = _imported.set((*_imported.get(), name))
    try:
        yield
    finally:
        _imported.reset(token)


def check_not_importing() -> None:
    """Raise TaskError if the import of a script starts a run.

    Surefoot imports the script for its task, or multiprocessing imports it in a spawned process.
    """
    names = _imported.get()
    # multiprocessing starts no processes where this is set: a spawned one is importing the script
    is_spawned = getattr(
        getattr(sys.modules.get("multiprocessing"), "current_process", lambda: None)(),
        "_inheriting",
        False,
    )
    if names or is_spawned:
        script = getattr(sys.modules.get("__mp_main__"), "__file__", "the script")
        raise _make_unguarded_error(names[-1] if names else str(script))


def _make_unguarded_error(where: str) -> TaskError:
    return TaskError(
        f"{where} starts a run when it is imported, but it is imported only for its definitions",
        hint='write `if __name__ == "__main__":` above the lines that train, and indent them',
    )


def _find_user_line(error: BaseException) -> str:
    """Return the line of user code that led to `error`, as ` (my_task.py:3, in <module>)`."""
    own = frames.find_user_frame(error)
    return "" if own is None else f" ({own.filename}:{own.lineno}, in {own.name})"


def find_use(task: object) -> str | None:
    """Return the name by which a new process can import the class of `task`: `file.py:Class`.

    In a package it is `package.module:Class`; None if the class is defined in a notebook or a
    function.
    """
    kind = type(task)
    module = sys.modules.get(kind.__module__)
    if module is None or getattr(module, kind.__qualname__, None) is not kind:
        return None
    file = Path(getattr(module, "__file__", None) or "")
    found = getattr(module, "__spec__", None)
    if found is not None and (file.parent / "__init__.py").is_file():
        # in a package: its relative imports need the full name
        return f"{found.name}:{kind.__name__}"
    return f"{file.resolve()}:{kind.__name__}" if file.suffix == ".py" else None


def is_named(task: object, use: str) -> bool:
    """Return whether `use` is a name of the class of `task`."""
    kind, path = type(task), signature.find_source(use)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    same_file = path is not None and file is not None and path.resolve() == Path(file).resolve()
    return same_file and (":" not in use or use.rpartition(":")[2] == kind.__name__)


def find_arguments(task: object) -> dict[str, Any] | None:
    """Return the constructor arguments that make an equal task; None if one of them is unknown.

    They are read from the attributes with the names of the parameters, as in a dataclass or after
    `self.width = width`. Arguments that equal the default are left out.
    """
    try:
        parameters = inspect.signature(type(task)).parameters.values()
    except ValueError:
        return None
    if any(
        each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) or each.name not in dir(task)
        for each in parameters
    ):
        return None
    given = {each.name: getattr(task, each.name) for each in parameters}
    if isinstance(given.get("folder"), Path):
        given["folder"] = str(given["folder"])
    changed = {
        each.name: given[each.name]
        for each in parameters
        if not _is_equal(given[each.name], each.default)
    }
    return changed if all(map(_is_plain, changed.values())) else None


def _is_equal(value: Any, default: Any) -> bool:
    return value is default or (_is_plain(value) and _is_plain(default) and bool(value == default))


def _is_plain(value: Any) -> bool:
    """Return whether a value can be written as TOML."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    return (
        all(map(_is_plain, value))
        if isinstance(value, list | tuple)
        else isinstance(value, bool | int | float | str)
    )


def task_files(pickled: bytes) -> list[str]:
    """Return the paths of the imported task files whose classes or functions `pickled` names.

    Another process must import them before it can unpickle the object.
    """
    return [
        str(module.__file__)
        for name, module in list(sys.modules.items())
        if name.startswith(OF_A_FILE) and name.encode() in pickled
    ]


def import_file(path: Path) -> Any:
    """Import a task file and return its module.

    Raises TaskError if the file is missing, or if importing it would start a run.
    """
    if str(path.resolve()) in _imported.get():
        # the file starts a run of its task: use what it has defined so far
        return sys.modules[f"{OF_A_FILE}{path.stem}"]
    if not path.is_file():
        raise TaskError(
            f"there is no task file {path}",
            hint="a task is named file.py:Class or package.module:Class",
        )
    name = f"{OF_A_FILE}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskError(
            f"{path} is not a Python file", hint="the name of a task file must end in .py"
        )
    if (line := signature.find_unguarded_run(path)) is not None:
        # before any of it runs: it may clear its run folder
        raise _make_unguarded_error(f"{path}:{line}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with _record_import(str(path.resolve())):
        spec.loader.exec_module(module)
    return module


def _classes(module: Any) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    )
