"""State of a user's DataLoader in an epoch, and of the samplers and datasets inside it."""

from __future__ import annotations

import copy
import operator
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.components.data.sources.batch_digest import PassDigest, digest_of

MAX_NESTED = 16  # samplers inside each other, and containers in a state
MAX_PLACES = 10_000  # samplers and datasets of a loader
# attributes of a loader, a sampler, or a dataset such as torch's Subset and ConcatDataset
PARTS = ("batch_sampler", "sampler", "dataset", "datasets")
OF_THREADS = ("threading", "queue", "multiprocessing", "concurrent", "asyncio", "socket")


def _saves_state(value: Any) -> bool:
    names = ("state_dict", "load_state_dict")
    has_both = all(callable(getattr(type(value), name, None)) for name in names)
    return has_both and hasattr(value, "__dict__")


def walk_parts(data: Any) -> list[tuple[str, Any]]:
    """Return a loader, its samplers and datasets, and those nested in them, with names, each once.

    An object comes before those that are nested in it. Datasets are searched for more of them in
    their attributes alone, because a property may open a file.
    """
    places, known = [("loader", data)], {id(data)}
    for name, place in places:
        own = getattr(place, "__dict__", {})
        for key in PARTS:
            value = own.get(key) if "dataset" in name else getattr(place, key, None)
            found = {f"{name}.{key}": value}
            if key == "datasets":
                found = {f"{name}.{key}[{index!r}]": each for index, each in _items_of(value)}
            for inner_name, inner in found.items():
                if inner is not None and id(inner) not in known and len(places) < MAX_PLACES:
                    known.add(id(inner))
                    places.append((inner_name, inner))
    return places


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the index or key and the value of each item of a list, tuple or mapping."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


def find_parts(data: Any) -> dict[str, Any]:
    """Return the samplers and datasets of a loader that have a state_dict, by name, each once.

    A loader that has a state_dict itself saves theirs.
    """
    if _saves_state(data):
        return {}
    return {f"state of {name}": each for name, each in walk_parts(data)[1:] if _saves_state(each)}


def read_state(part: Any) -> Any:
    """Return a copy of the state of a sampler or dataset between two epochs, or None.

    None if a checkpoint cannot store the state, or if loading it changes the object. Such an object
    resumes at a position in the epoch, but an epoch is read again from its first batch.
    """
    objects = _objects_in(part)
    before = [dict(vars(each)) for each in objects]
    copies = [
        {
            key: copy.copy(value)
            for key, value in each.items()
            if isinstance(value, dict | list | set | deque)
        }
        for each in before
    ]
    digest = digest_of(before)
    try:
        state = copy.deepcopy(part.state_dict())
        if is_same := _is_storable(state):
            part.load_state_dict(copy.deepcopy(state))
            is_same = digest_of([vars(each) for each in objects]) == digest
    except Exception:  # noqa: BLE001 - the methods of a user's class can raise anything
        state, is_same = None, False
    for each, values, held in zip(objects, before, copies, strict=True):
        for key, content in held.items() if not is_same else ():
            _put_back(values[key], content)
        own = vars(each)
        for key in [key for key in own if key not in values]:
            del own[key]
        own.update(values)  # never cleared, because a thread may read it
    return state if is_same else None


def describe_draws(held: Mapping[str, Any], *, by_sample: bool) -> list[tuple[str, str]]:
    """Return a notice if draws of the dataset depend on something else than before a resume.

    `held` is the saved state of the source. Before the first batch, there is none.
    """
    was_by_sample = held.get("draws") == "sample"
    if was_by_sample == by_sample or "pass" not in held:
        return []
    before, now = ("sample", "batch") if was_by_sample else ("batch", "sample")
    what = (
        "random numbers that the dataset draws from the global generators depend on the "
        f"{now} now, and depended on the {before} before"
    )
    way = 'start a run with data.draws = "sample" to draw the same on any number of ranks'
    return [(what, way)]


def _put_back(value: Any, content: Any) -> None:
    """Give a container its old content, if it has another one: a thread may be reading it."""
    if isinstance(value, dict):
        now, before = [*value, *value.values()], [*content, *content.values()]
    else:
        now, before = list(value), list(content)
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return
    if isinstance(value, list):
        value[:] = content
        return
    value.clear()
    (value.update if isinstance(content, dict | set) else value.extend)(content)


def _is_storable(state: Any, depth: int = 0) -> bool:
    """Return whether a checkpoint can store a state of numbers, texts, tensors and containers."""
    kind = type(state)
    if kind in (dict, OrderedDict, Counter, list, tuple) and depth < MAX_NESTED:
        parts = [*state.keys(), *state.values()] if isinstance(state, dict) else state
        return all(_is_storable(each, depth + 1) for each in parts)
    if kind is Tensor:
        is_plain = state.device.type == "cpu" and state.layout is torch.strided
        return is_plain and not (state.is_nested or state.is_complex() or state.is_quantized)
    if kind is np.ndarray or isinstance(state, np.generic):
        return state.dtype.kind in "biuf" and state.dtype.isnative and state.dtype.itemsize <= 8
    return kind in (bool, int, float, str, bytes, type(None))


def _objects_in(part: Any) -> list[Any]:
    """Return an object and those in its attributes that have attributes.

    Classes are left out, and objects that belong to threads or processes.
    """
    found, depth = [part], {id(part): 0}
    for each in found:
        for value in vars(each).values():
            for inner in value if isinstance(value, list | tuple) and len(value) < 64 else [value]:
                if (
                    hasattr(inner, "__dict__")
                    and not isinstance(inner, type | ModuleType | Tensor)
                    and type(inner).__module__.partition(".")[0] not in OF_THREADS
                    and id(inner) not in depth
                    and depth[id(each)] < 4
                    and len(found) < 64
                ):
                    depth[id(inner)] = depth[id(each)] + 1
                    found.append(inner)
    return found


@dataclass(eq=False)
class EpochState:
    """State at the start of an epoch, and digests of the batches that were read in it."""

    epoch: int = 0
    # states of the data's generators and parts, see ObservedLoader.pass_states
    generators: Mapping[str, Any] = field(default_factory=dict)
    starts_workers: bool | None = None  # see ObservedLoader; None before the first batch
    state: Any = None  # of the iterable, before the first batch
    seen: PassDigest = field(default_factory=PassDigest)

    def as_state(self) -> dict[str, Any]:
        own = {
            "epoch": self.epoch,
            "generators": self.generators,
            "starts_workers": self.starts_workers,
            "state": self.state,
        }
        return {**own, "seen": self.seen.as_state()}

    @classmethod
    def from_state(cls, held: Mapping[str, Any]) -> EpochState:
        from surefoot.components.data.sources.watched import name_states

        epoch = int(held["epoch"])
        return cls(
            epoch,
            name_states(held["generators"]),
            held.get("starts_workers", epoch == 0),  # an older version did not save it
            held["state"],
            PassDigest.from_state(held["seen"]),
        )
