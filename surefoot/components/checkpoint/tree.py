"""Conversion of nested values to JSON and named tensors, and back, without pickle.

Values that JSON supports are stored unchanged. Any other value becomes a JSON object with the key
"$": a tensor, an array, a non-finite number, bytes, a tuple, a dict whose keys are not plain
strings, a dtype, a text of NumPy, the version of torch, or a container of `collections`. A value
that would be restored as a different type is refused.
"""

from __future__ import annotations

import contextlib
import enum
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from surefoot.core.errors import RunFolderError, TaskError

MARK = "$"
# nesting of lists, tuples and dicts: a deeper tree contains itself, or no JSON reader can parse it
MAX_DEPTH = 100
MAX_INT_BITS = 8192  # Python parses at most 4,300 digits
SHOWN = 120  # characters of a path that a message shows
# RecursionError is a RuntimeError
ODD = (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError)
CONTAINERS = {
    OrderedDict: "OrderedDict",
    Counter: "Counter",
    defaultdict: "defaultdict",
    deque: "deque",
    torch.Size: "size",
}
PLAIN = (dict, list, tuple, str, int, float, bytes, bytearray)  # types whose classes are refused
FACTORIES: dict[str, Any] = {
    "int": int,
    "float": float,
    "list": list,
    "dict": dict,
    "set": set,
    "str": str,
    "None": None,
}
TEXTS: dict[str, type[str]] = {"numpy text": np.str_, "version": TorchVersion}
TENSOR_HINT = "keep a plain tensor: value.as_subclass(torch.Tensor)"
NAMED_HINT = (
    "define the class at the top level of its module, under its own name, or give a plain value: "
    "tuple(value)"
)
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def split(tree: Any, place: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """Split nested values into a tree that JSON can represent, and tensors by name.

    The tensors are not copied. `place` is the name of the outermost value, with which the names of
    the tensors begin. Raises TaskError, with the path of the value, for a value that a checkpoint
    cannot store.
    """
    tensors: dict[str, Tensor] = {}
    return _split(tree, place, tensors), tensors


def _split(value: Any, place: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise TaskError(
            f"{place[:SHOWN]}... is nested more than {MAX_DEPTH} levels deep, or contains itself",
            hint="keep the state flat, with each object in it once",
        )
    if isinstance(value, enum.Enum):
        raise TaskError(
            f"{place} is {value!r}, a member of an Enum, which a checkpoint cannot store",
            hint="give its .value",
        )
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        if value.bit_length() > MAX_INT_BITS:
            raise TaskError(
                (
                    f"{place} is an integer of {value.bit_length():,} bits, but a checkpoint "
                    f"stores up to {MAX_INT_BITS:,}"
                ),
                hint="store it as bytes: number.to_bytes(...)",
            )
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {MARK: "float", "value": str(value)}
    if isinstance(value, Tensor):
        return _split_tensor(value, place, tensors)
    if type(value) in TEXTS.values():
        return {
            MARK: next(name for name, kind in TEXTS.items() if kind is type(value)),
            "text": str(value),
        }
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return {
            MARK: "array",
            "name": _add_tensor(_as_tensor(value, place), place, tensors),
            "scalar": isinstance(value, np.generic),
        }
    if type(value) in (bytes, bytearray):
        return {
            MARK: type(value).__name__,
            "name": _add_tensor(
                torch.frombuffer(bytearray(value) or bytearray(1), dtype=torch.uint8)[: len(value)],
                place,
                tensors,
            ),
        }
    if isinstance(value, torch.dtype):
        return {MARK: "dtype", "value": str(value)}
    if type(value) in CONTAINERS or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return _split_container(value, place, tensors, depth + 1)
    if type(value) is list:
        return _split_items(value, place, tensors, depth + 1)
    if type(value) is tuple:
        return {MARK: "tuple", "items": _split_items(value, place, tensors, depth + 1)}
    if type(value) is dict:
        return _split_mapping(value, place, tensors, depth + 1)
    raise _refuse(value, place)


def _refuse(value: Any, place: str, hint: str = "") -> TaskError:
    if isinstance(value, np.ma.MaskedArray):
        hint = "give its data and its mask: value.data, numpy.ma.getmaskarray(value)"
    elif isinstance(value, np.ndarray):
        hint = "give a plain array: numpy.array(value, subok=False)"
    kind = next((kind.__name__ for kind in PLAIN if isinstance(value, kind)), None)
    if kind:
        hint = hint or f"give a plain value: {kind}(value)"
    return TaskError(
        f"{place} is {name_kind(value)}, which a checkpoint cannot store",
        hint=hint
        or "keep state in tensors, arrays, numbers, text, and lists, tuples and dicts of them",
    )


def _split_tensor(value: Tensor, place: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a tensor, a parameter, or a tensor of a class that a later process can find."""
    kind, made = type(value), dict[str, Any]({MARK: "tensor"})
    if kind is not Tensor:
        made["type"] = known = f"{kind.__module__}:{kind.__qualname__}"
        is_parameter = kind is nn.Parameter
        if not is_parameter and (vars(value) or _find_loaded(known, _is_tensor_class) is not kind):
            raise _refuse(value, place, TENSOR_HINT)
    if value.is_leaf and value.requires_grad:
        made["requires_grad"] = True
    return {**made, "name": _add_tensor(value.detach(), place, tensors)}


def _join_tensor(value: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[value["name"]]
    if "type" in value:
        tensor = tensor.as_subclass(_find_class(value["type"], _is_tensor_class))
    return tensor.requires_grad_() if value.get("requires_grad") else tensor


def _split_items(
    items: Sequence[Any], place: str, tensors: dict[str, Tensor], depth: int
) -> list[Any]:
    # the state of Python's random generator has 625 integers, and a checkpoint several of them
    is_flat = depth <= MAX_DEPTH and set(map(type, items)) == {int}
    if is_flat and max(map(int.bit_length, items)) <= MAX_INT_BITS:
        return list(items)
    return [_split(part, f"{place}/{number}", tensors, depth) for number, part in enumerate(items)]


def name_kind(value: Any) -> str:
    """Return the type of a value in words, for a message.

    >>> name_kind([]), name_kind(Counter), name_kind(len)
    ('a list', 'the class Counter', 'the function len')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = getattr(value, "__name__", None)
    return (
        f"a {type(value).__name__}"
        if not callable(value) or name is None
        else f"the function {name}"
    )


def _split_container(value: Any, place: str, tensors: dict[str, Tensor], depth: int) -> Any:
    """Convert a container of `collections`, a namedtuple, or a torch.Size to a JSON object."""
    if isinstance(value, Mapping):
        made = {
            MARK: CONTAINERS[type(value)],
            "value": _split_mapping(value, place, tensors, depth),
        }
        if isinstance(value, defaultdict):
            factory = value.default_factory
            name = next((name for name, known in FACTORIES.items() if known is factory), None)
            if name is None:
                raise TaskError(
                    f"{place} is a defaultdict of {factory!r}, which a checkpoint cannot store",
                    hint=f"use one of {', '.join(FACTORIES)}, or give a dict",
                )
            made["factory"] = name
        return made
    items = [_split(part, f"{place}/{number}", tensors, depth) for number, part in enumerate(value)]
    if isinstance(value, deque):
        return {MARK: "deque", "items": items, "maxlen": value.maxlen}
    if isinstance(value, torch.Size):
        return {MARK: "size", "items": items}
    kind, fields = type(value), tuple(value._fields)
    known = f"{kind.__module__}:{kind.__qualname__}"
    if _find_loaded(known, _has_fields(fields)) is not kind or getattr(value, "__dict__", None):
        raise _refuse(value, place, NAMED_HINT)
    return {MARK: "namedtuple", "items": items, "fields": list(fields), "type": known}


def _join_container(kind: str, value: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    if "value" in value:
        held = _join(value["value"], tensors)
        if kind == "defaultdict":
            return defaultdict(FACTORIES[value["factory"]], held)
        return Counter(held) if kind == "Counter" else OrderedDict(held)
    items = [_join(part, tensors) for part in value["items"]]
    if kind == "deque":
        return deque(items, maxlen=value["maxlen"])
    if kind == "size":
        return torch.Size(items)
    return _named_type(value["type"], tuple(value["fields"]))._make(items)


def _named_type(known: str, fields: tuple[str, ...]) -> Any:
    """Return the namedtuple class `known` ("module:name") with these fields.

    A class that was defined in a function, of which an earlier version stored the name, is replaced
    by a new class with this name and these fields. Raises RunFolderError if no module defines it.
    """
    if "<locals>" in known:
        # the fields are those in a file
        return namedtuple(known.rpartition(".")[2], fields)  # noqa: PYI024
    return _find_class(known, _has_fields(fields))


def _has_fields(fields: tuple[str, ...]) -> Callable[[type], bool]:
    return lambda kind: issubclass(kind, tuple) and getattr(kind, "_fields", None) == fields


def _is_tensor_class(kind: type) -> bool:
    """Return whether `as_subclass` makes tensors of this class, which only wrap no other tensor."""
    return issubclass(kind, Tensor) and kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def _find_class(known: str, fits: Callable[[type], bool]) -> Any:
    """Return the loaded class `known` ("module:name") that `fits`.

    A script has another module name if surefoot imports it: without the class in the named module,
    the only class of this name in the other modules is returned. No module is imported. Raises
    RunFolderError if there is none.
    """
    found = _find_loaded(known, fits)
    if found is not None:
        return found
    _, _, name = known.partition(":")
    others = [_find_loaded(f"{module}:{name}", fits) for module in list(sys.modules)]
    unique = {id(each): each for each in others if each is not None and each.__qualname__ == name}
    if len(unique) != 1:
        raise RunFolderError(
            f"the saved state has a value of the class {name!r} of the module "
            f"{known.partition(':')[0]!r}, which is not loaded",
            hint="import the module that defines the class before the run resumes",
        )
    return next(iter(unique.values()))


def _find_loaded(known: str, fits: Callable[[type], bool]) -> Any:
    """Return the class `known` ("module:name") of a loaded module that `fits`, or None."""
    module, _, name = known.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        # without getattr, which imports parts of a module that loads them late
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and fits(found) else None


def _split_mapping(
    value: Mapping[Any, Any], place: str, tensors: dict[str, Tensor], depth: int
) -> Any:
    if all(type(key) is str and key != MARK for key in value):
        return {key: _split(part, f"{place}/{key}", tensors, depth) for key, part in value.items()}
    pairs = [
        [_split(key, place, tensors, depth), _split(part, f"{place}/{key}", tensors, depth)]
        for key, part in value.items()
    ]
    return {MARK: "dict", "items": pairs}


def _add_tensor(tensor: Tensor, place: str, tensors: dict[str, Tensor]) -> str:
    name, number = place, 1
    while name in tensors:
        number += 1
        name = f"{place}#{number}"
    tensors[name] = tensor
    return name


def _as_tensor(value: Any, place: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(value))
    except (TypeError, ValueError):  # text, objects, or a byte order other than this machine's
        raise TaskError(
            f"{place} is an array of {np.asarray(value).dtype}, which a checkpoint cannot store",
            hint="use numbers or booleans, in the native byte order",
        ) from None


def join(skeleton: Any, tensors: Mapping[str, Tensor], place: object = "the state") -> Any:
    """Return the nested values that `split` has converted.

    Raises RunFolderError, with `place` in its message, for contents that `split` never writes.
    """
    try:
        return _join(skeleton, tensors)
    except RunFolderError as error:
        raise RunFolderError(f"{place}: {error.message}", hint=error.hint) from None
    except ODD as error:
        raise _mismatch_error(place, error) from None


@contextlib.contextmanager
def as_run_folder_errors(place: object) -> Iterator[None]:
    """Convert the exceptions of a restoration, such as KeyError, to RunFolderError.

    They occur if the names or values of a saved state do not fit, which a matching digest does not
    exclude. `place` names the state in the message.
    """
    try:
        yield
    except ODD as error:
        raise _mismatch_error(place, error) from None


def _mismatch_error(place: object, error: Exception) -> RunFolderError:
    return RunFolderError(f"{place} is not a state of this run: {error!r}"[:300])


def _join(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_join(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {key: _join(part, tensors) for key, part in value.items()}
    kind = value[MARK]
    if kind == "tensor":
        return _join_tensor(value, tensors)
    if kind == "array":
        array = tensors[value["name"]].numpy()
        return array[()] if value["scalar"] else array
    if kind in ("bytes", "bytearray"):
        made = tensors[value["name"]].numpy().tobytes()
        return made if kind == "bytes" else bytearray(made)
    if kind == "float":
        return float(value["value"])
    if kind in TEXTS:
        return TEXTS[kind](value["text"])
    if kind == "dtype":
        return DTYPES[value["value"]]
    if kind == "tuple":
        return tuple(_join(part, tensors) for part in value["items"])
    if kind == "dict":
        return {_join(key, tensors): _join(part, tensors) for key, part in value["items"]}
    if kind in (*CONTAINERS.values(), "namedtuple"):
        return _join_container(kind, value, tensors)
    raise RunFolderError(f"the saved state has a value of the unknown kind {str(kind)[:40]!r}")
