"""Compilation of regions of a model, or of a function, with torch.compile.

A region that cannot be compiled runs in eager mode, and the reason is recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surefoot.components.compiler import instructions
from surefoot.components.compiler.pace import CompilePayback
from surefoot.components.compiler.quoting import patch_compiler_commands
from surefoot.components.compiler.steward import Steward
from surefoot.core.errors import InputError, TaskError
from surefoot.core.process.frames import is_of_library

Mode = Literal["default", "reduce-overhead", "max-autotune"]
OnFailure = Literal["eager", "stop"]


class CompiledRegions:
    """Result of `compile_regions` or `compile_function`.

    `regions` are the names of the compiled regions of a model. `failed` gives the reason for each
    region that could not be compiled.
    """

    def __init__(
        self, regions: Mapping[str, nn.Module], on_failure: OnFailure, words: str | None = None
    ) -> None:
        self.failed: dict[str, str] = {}
        self.was_called = False
        self.is_eager = False  # true inside eager()
        self.on_failure = on_failure
        self.steward, self.pace = Steward(), CompilePayback()
        self._regions, self._words = dict(regions), words

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(self._regions)

    @property
    def words(self) -> str:
        """Line for the log that names the regions that will be compiled."""
        if self._words is not None:
            return self._words
        names = self.regions
        listed = ", ".join(names if len(names) < 4 else (*names[:2], "...", names[-1]))
        return (
            f"{len(names)} region{'s' * (len(names) > 1)} of the model will be compiled at "
            f"the first call: {listed}"
        )

    def undo(self) -> None:
        """Make every region run in eager mode from now on, without torch.compile."""
        for region in self._regions.values():
            region._compiled_call_impl = None

    def fail(self, name: str, error: BaseException) -> None:
        """Record that the region `name` cannot be compiled, with `error` as the reason.

        Raises TaskError if `on_failure` is "stop".
        """
        words = _describe_error(error)
        if self.on_failure == "stop":
            raise TaskError(
                f"{name} cannot be compiled: {words}",
                hint='compile.on_failure = "eager" runs it uncompiled; or leave out [compile]',
            ) from error
        self.failed[name] = words

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run every region in eager mode inside the `with` block, and compiled again after it."""
        seats = {name: region._compiled_call_impl for name, region in self._regions.items()}
        self.undo()
        self.is_eager = True
        try:
            yield
        finally:
            self.is_eager = False
            for name, region in self._regions.items():
                region._compiled_call_impl = seats[name]


def compile_regions(
    regions: nn.Module | Mapping[str, nn.Module],
    *,
    mode: Mode = "default",
    dynamic: bool | None = None,
    on_failure: OnFailure = "eager",
    deterministic: bool = True,
    backend: Any = "inductor",
) -> CompiledRegions:
    """Compile a model, or regions of it by name, with torch.compile, in place.

    A region is compiled at its first call. Regions with equal code share the compiled code. Random
    numbers are those of eager mode, so that dropout draws the same values.

    Args:
        regions: A module, or modules by name.
        mode: The mode of torch.compile.
        dynamic: Whether sizes may differ from call to call; None leaves that to torch, which
            assumes it after the second size.
        on_failure: Handling of a region that cannot be compiled: "eager" runs it in eager mode from
            then on, "stop" raises TaskError.
        deterministic: Restrict the compiler to choices that are the same in every process.
        backend: The backend of torch.compile.

    Raises:
        InputError: For an unknown mode, and for a region that is compiled already.

    >>> compile_regions(nn.Linear(2, 2), backend="eager").regions
    ('model',)
    """
    named = {"model": regions} if isinstance(regions, nn.Module) else dict(regions)
    made = CompiledRegions(named, on_failure)
    for name, region in named.items():
        if region._compiled_call_impl is not None:
            raise InputError(
                f"{name} is compiled already",
                hint="compile a model once, by [compile] or by torch.compile",
            )
        region._compiled_call_impl = _Region(
            name, region, made, _options(mode, dynamic, deterministic, backend), dynamic, backend
        )
    return made


class CompiledFunction:
    """Function that is compiled as one graph.

    If the compilation fails, the call records the reason, and returns None without running the
    function.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        plan: CompiledRegions,
        options: dict[str, Any] | None,
        dynamic: bool | None,
        backend: Any,
    ) -> None:
        self._name, self._plan = name, plan
        self._options: dict[str, Any] = {"options": options, "dynamic": dynamic, "backend": backend}
        self.take(function)

    def take(self, function: Callable[..., Any]) -> None:
        """Replace the function by `function`, which is compiled at the next call."""
        # torch counts compilations by code object, and stops after eight
        if isinstance(function, FunctionType):
            code = function.__code__.replace()
            fresh = FunctionType(
                code,
                function.__globals__,
                function.__name__,
                function.__defaults__,
                function.__closure__,
            )
            fresh.__kwdefaults__ = function.__kwdefaults__
            function = fresh
        self._compiled = torch.compile(function, fullgraph=True, **self._options)

    def __call__(self, *args: Any) -> Any:
        self._plan.was_called = True
        try:
            return self._compiled(*args)
        except _failures() as error:
            self._plan.fail(self._name, error)
        return None


def compile_function(
    name: str,
    function: Callable[..., Any],
    *,
    mode: Mode = "default",
    dynamic: bool | None = None,
    on_failure: OnFailure = "eager",
    deterministic: bool = True,
    backend: Any = "inductor",
    on_cpu: bool = False,
) -> tuple[CompiledRegions, CompiledFunction]:
    """Compile `function` as one graph at its first call; it may call torch.autograd.grad.

    `name` stands for the function in messages. `on_cpu` is for a function whose tensors are all on
    the CPU: one C++ program then calls the kernels (`cpp_wrapper`), without Python between them.
    All other arguments are those of `compile_regions`.
    """
    torch._dynamo.config.trace_autograd_ops = True
    made = CompiledRegions(
        {}, on_failure, f"{name} will be compiled as one graph at the first call"
    )
    options = _options(mode, dynamic, deterministic, backend)
    if options is not None:
        options["cpp_wrapper"] = on_cpu
    return made, CompiledFunction(name, function, made, options, dynamic, backend)


def _options(
    mode: str, dynamic: bool | None, deterministic: bool, backend: Any
) -> dict[str, Any] | None:
    """Return the options of torch.compile that stand for `mode` and the other settings.

    Returns None for a backend other than inductor, which has no options. Raises InputError for an
    unknown mode.
    """
    if backend != "inductor":
        return None
    inductor: Any = torch._inductor  # torch imports it at the first access
    try:
        options = dict(inductor.list_mode_options(mode, dynamic))
    except RuntimeError:
        raise InputError(
            f"compile.mode is {mode!r}", hint="use default, reduce-overhead or max-autotune"
        ) from None
    options["fallback_random"] = True
    patch_compiler_commands()
    if instructions.are_known(tuple(inductor.config.cpp.cxx)):
        options["cpp.vec_isa_ok"] = True
    if deterministic and hasattr(inductor.config, "deterministic"):
        options["deterministic"] = True
    return options


class _Region:
    """Replacement for the call of a module: the compiled call.

    If the module cannot be compiled, it is called in eager mode from then on.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        plan: CompiledRegions,
        options: dict[str, Any] | None,
        dynamic: bool | None,
        backend: Any,
    ) -> None:
        self._name, self._module, self._plan = name, module, plan
        self._compiled: Any = torch.compile(
            _find_compile_target(module), options=options, dynamic=dynamic, backend=backend
        )

    def __call__(self, *args: Any, **named: Tensor | Any) -> Any:
        self._plan.was_called = True
        try:
            return self._compiled(*args, **named)
        except _failures() as error:
            self._plan.fail(self._name, error)
            self._module._compiled_call_impl = None
        return self._module(*args, **named)


def _find_compile_target(module: nn.Module) -> Any:
    """Return the callable that torch.compile traces for a module.

    It is the `_call_impl` of the module, or a wrapper of it. Dynamo skips code of torch itself.
    Therefore a module that torch defines, or whose `forward` was replaced, needs a wrapper that is
    not in torch.
    """
    if inspect.ismethod(module.forward) and not torch._dynamo.trace_rules.check(module.forward):
        return module._call_impl

    def call(*args: Any, **named: Tensor | Any) -> Any:
        return module._call_impl(*args, **named)  # type: ignore[no-untyped-call]

    return call


def _failures() -> tuple[type[Exception], ...]:
    """Return the exception types that mean that a compilation failed.

    They are TorchDynamoException and, if torch has it, FailOnRecompileLimitHit, which is not a
    subclass of TorchDynamoException.
    """
    named: Any = torch._dynamo.exc
    too_often = getattr(named, "FailOnRecompileLimitHit", None)
    return (
        (named.TorchDynamoException,)
        if too_often is None
        else (named.TorchDynamoException, too_often)
    )


def _describe_error(error: BaseException) -> str:
    """Return the first two lines of a compiler error, with the user's line of code.

    The line of code is left out if the error does not name it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2])[:300]
    frames = [
        line
        for line in lines
        if line.startswith('File "') and not is_of_library(line.split('"')[1])
    ]
    return f"{said} ({frames[-1]})" if frames else said
