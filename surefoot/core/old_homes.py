"""Keep public names of the previous release importable by their old paths, with a warning."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

RENAMED = {"Normalise": "Normalize", "analyse": "analyze"}


def moved_to(home: str, package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose public names are now imported from `home`.

    The names can still be imported from `package` for one release, with a DeprecationWarning. The
    package itself imports nothing, so that a run loads only the modules that it uses.
    """

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        return _find(f"{package}.{name}", home, RENAMED.get(name, name), "path")

    return find


def renamed_in(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of `module`, which finds names by their old spelling in `RENAMED`.

    A name that is found in this way causes a DeprecationWarning.
    """

    def find(name: str) -> Any:
        now = RENAMED.get(name)
        if now is None or not hasattr(importlib.import_module(module), now):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return _find(f"{module}.{name}", module, now, "name")

    return find


def _find(old: str, home: str, now: str, what: str) -> Any:
    value = getattr(importlib.import_module(home), now)
    warnings.warn(
        f"{old} is now {home}.{now}; the old {what} goes in the next release",
        DeprecationWarning,
        stacklevel=3,  # where the name is asked for
    )
    return value
