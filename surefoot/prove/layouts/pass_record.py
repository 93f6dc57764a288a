"""Record of operators with outputs narrower than float64, and of those that draw random numbers.

Each operator is recorded with its module and its line.

    record = PassRecord()
    record.know(model)
    with record:
        loss(model(batch)).backward()
    record.narrow, record.draws

Based on `torch.utils._python_dispatch.TorchDispatchMode`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.runtime.attributes.rewritten import OperatorMode
from surefoot.runtime.nested_tensors import find_tensors

OUR_FOLDER = Path(__file__).parents[2]
OUTSIDE = ("<", *(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, OUR_FOLDER)))
STANDARD_LIBRARY, INSTALLED = (
    f"{sysconfig.get_path('stdlib')}{os.sep}",
    f"{os.sep}site-packages{os.sep}",
)
BUILT_IN = f"{OUR_FOLDER / 'tasks'}{os.sep}"  # a built-in task counts as the user's code


@dataclass(frozen=True)
class OperatorRecord:
    """Operator that was called by the user's code or by a library that it uses.

    `dtype` is that of its output; `module` is "" outside of the model. `line` is FILE:LINE.
    """

    operator: str
    dtype: str
    module: str
    line: str

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"{self.operator} -> {self.dtype}{where} ({self.line})"


class PassRecord(OperatorMode):
    """Context that records operators with narrow outputs, and operators that draw random numbers.

    An output is narrow if it is floating-point and narrower than float64. `narrow` lists the
    operators that convert wider values or integers to narrow ones. If there are none, it lists
    those that compute with values that were narrow before. Operators that only torch or surefoot
    calls, such as those of an optimizer, are not recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] = {}
        self._is_paused = False
        self._casts: dict[OperatorRecord, None] = {}
        self._others: dict[OperatorRecord, None] = {}
        self._draws: dict[OperatorRecord, None] = {}

    def know(self, model: nn.Module) -> None:
        """Set the model whose modules are named in the records."""
        self._names = {
            id(module): name or type(model).__name__ for name, module in model.named_modules()
        }

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Return a context in which nothing is recorded, for example while data are read."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @property
    def narrow(self) -> tuple[OperatorRecord, ...]:
        return tuple(self._casts or self._others)

    @property
    def draws(self) -> tuple[OperatorRecord, ...]:
        return tuple(self._draws)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._is_paused:
            return out
        made = next((each for each in find_tensors(out) if _is_narrow(each)), None)
        draws = torch.Tag.nondeterministic_seeded in func.tags and _draws_numbers(
            func, args, kwargs or {}
        )
        if made is None and not draws:
            return out
        found = self._find(func, made)
        if found is not None and draws:
            self._draws[found] = None
        if found is not None and made is not None:
            given = list(find_tensors((args, kwargs or {})))
            is_cast = bool(given) and not any(map(_is_narrow, given))
            (self._casts if is_cast else self._others)[found] = None
        return out

    def _find(self, func: Any, made: Tensor | None) -> OperatorRecord | None:
        """Return the record of an operator, with the innermost line of user code and model module.

        Returns None if only torch and surefoot called the operator.
        """
        frame: FrameType | None = sys._getframe(2)
        line, module = "", ""
        while frame is not None and not (line and module):
            file = frame.f_code.co_filename
            if not line and _is_users(file):
                line = f"{file}:{frame.f_lineno}"
            module = module or self._names.get(id(frame.f_locals.get("self")), "")
            frame = frame.f_back
        name = str(func.overloadpacket).removeprefix("aten.")
        dtype = "" if made is None else str(made.dtype).removeprefix("torch.")
        return OperatorRecord(name, dtype, module, line) if line else None


def _is_users(file: str) -> bool:
    """Return whether a file belongs to the user's code or to a library that it uses."""
    if file.startswith(BUILT_IN):
        return True
    return not file.startswith(OUTSIDE) and (
        not file.startswith(STANDARD_LIBRARY) or INSTALLED in file
    )


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < torch.float64.itemsize


def _draws_numbers(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an operator that may draw random numbers does so.

    Fused attention without dropout does not, for example.
    """
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = (
                args[index]
                if index < len(args)
                else kwargs.get("dropout_p", argument.default_value)
            )
            return bool(value)
    return True
