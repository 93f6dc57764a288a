"""Random generators of torch, NumPy and Python: the search for them, and their states.

The states of the global generators are read and restored together.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surefoot.core.process.forked import uses_gpu

OF_TORCH = frozenset(vars(nn.Module()))  # attributes of every module
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
MAX_DEPTH, MAX_OBJECTS = 6, 100_000  # of a search: levels, and visited objects
MAX_PARTS = 64  # entries of a container; longer ones hold samples
CLOSED = (
    Tensor,
    np.ndarray,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    ModuleType,
    BuiltinFunctionType,
)


def is_generator(value: object) -> bool:
    """Return whether `value` is a random generator of torch, NumPy or Python that has a state."""
    return isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)


def generator_state(generator: Any) -> Any:
    """Return a copy of the state of a random generator.

    Its type depends on the library: a tensor for torch, a dict or a tuple for NumPy, a tuple for
    Python.
    """
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def restore_generator(generator: Any, state: Any) -> None:
    """Set a generator to a state that `generator_state` returned.

    Raises:
        ValueError, TypeError, KeyError: If the state is that of a different type of generator.
    """
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def sign_generator(generator: Any) -> object:
    """Return the state of a generator in a form that `==` compares; every draw changes it."""
    return sign_state(generator_state(generator))


def sign_state(state: Any) -> object:
    """Return a state from `generator_state` in a form that `==` compares."""
    if isinstance(state, Tensor):
        return state.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, dict):
        return tuple((key, sign_state(part)) for key, part in state.items())
    return tuple(sign_state(part) for part in state) if isinstance(state, tuple | list) else state


def find_generators(named: Iterable[tuple[str, Any]], max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Return the random generators that can be reached from the named objects, each of them once.

    The search follows attributes, containers of at most MAX_PARTS entries, and the objects that
    functions refer to. It ends after MAX_OBJECTS objects. The global generators are omitted,
    because every checkpoint stores their states.

    Args:
        named: Pairs of a name and the object to search.
        max_depth: Number of levels to search below each object.

    Returns:
        The generators by the expression that reads them, such as `data.sampler.generator`.
    """
    shared = (
        random.random.__self__,  # type: ignore[attr-defined]
        np.random.mtrand._rand,
        torch.default_generator,
        *torch.cuda.default_generators,
    )
    seen = {id(each) for each in shared}
    found = dict[str, Any]()
    waiting = deque((name, value, 0) for name, value in named)
    while waiting and len(seen) < MAX_OBJECTS:
        name, value, depth = waiting.popleft()
        if isinstance(value, CLOSED) or id(value) in seen:
            continue
        seen.add(id(value))
        if is_generator(value):
            found[name] = value
        elif depth < max_depth:
            waiting.extend((f"{name}{key}", part, depth + 1) for key, part in _find_parts(value))
    return found


def _find_parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | list | tuple | deque):
        if len(value) <= MAX_PARTS:
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            yield from ((f"[{key!r}]", part) for key, part in list(pairs))
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules():
            held = {key: part for key, part in vars(module).items() if key not in OF_TORCH}
            yield from (
                (f".{path}.{key}" if path else f".{key}", part) for key, part in held.items()
            )
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f".{name}", cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue
        yield from (
            (f".__defaults__[{number}]", part)
            for number, part in enumerate(value.__defaults__ or ())
        )
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    else:
        attributes = getattr(value, "__dict__", None)
        yield from (
            (f".{key}", part)
            for key, part in (list(attributes.items()) if isinstance(attributes, dict) else ())
        )


def cuda_states() -> list[torch.Tensor]:
    """Return the random state of each GPU; empty if this process has not initialized CUDA.

    Reading a state would initialize CUDA.
    """
    return torch.cuda.get_rng_state_all() if uses_gpu() else []


def random_states() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda_states(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "python": random.getstate(),
    }


def restore_random(saved: Mapping[str, Any]) -> None:
    """Restore the random states that `random_states` returned.

    States of GPUs that this machine does not have are ignored.
    """
    torch.set_rng_state(saved["torch"])
    for index, state in enumerate(saved["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)
    np.random.set_state(saved["numpy"])  # noqa: NPY002
    random.setstate(saved["python"])
