"""Who may import whom: the floors, the two wings, imports inside functions, declared packages."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.laws.sizes import PUBLIC
from tests.laws.tree import Import, Module, Violation, called_names, modules, package_module

PROJECT = Path(__file__).resolve().parents[2]
FLOORS = {
    "core": 1,
    "native": 1,
    "contract": 2,
    "runtime": 3,
    "control": 3,
    "components": 4,
    "train": 5,
    "tasks": 5,
    "trial": 6,
    "prove": 7,
    "tune": 7,
    "cli": 8,
}
FLOOR_0 = ("errors", "units")  # of core; the rest of core stands on floor 1
NESTED = ("runtime", "control", "components")  # each folder inside is a room of its own
TRAINING_WING = ("runtime", "components", "train", "tasks")
LIGHT = ("core", "native", "contract", "control", "cli")  # never import torch
HEAVY = (
    "torch",
    "torchvision",
    "torchmetrics",
    "transformers",
    "lightning",
    "accelerate",
    "safetensors.torch",
)
IMPORT_NAMES = {"pillow": "PIL", "scikit-learn": "sklearn"}
# ships with torch, works only with the tensorboard package
PART_OF_AN_EXTRA = ("torch.utils.tensorboard",)
# half of what torch itself takes
COSTLY = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.device_mesh")
# what `surefoot train digits` imports by name; all else that it loads these import at their top
PLAIN_RUN = (
    "surefoot.cli.entry",
    "surefoot.cli.main",
    "surefoot.cli.train.train",
    "surefoot.contract.events",
    "surefoot.contract.spec_file",
    "surefoot.tasks.digits",
    "surefoot.train.run",
)
MAX_LOADED = 200
USE_WHERE_NEEDED = "import it in the function that uses it"


def room_of(name: str) -> tuple[str, int] | None:
    """The room and floor of a module of the package.

    None for the package itself and for what lies outside the floors.
    """
    parts = name.split(".")[1:]
    if not parts or parts[0] not in FLOORS:
        return None
    top, floor = parts[0], FLOORS[parts[0]]
    if top == "core":
        return "core", 0 if len(parts) == 1 or parts[1] in FLOOR_0 else 1
    if top in NESTED and len(parts) > 1:
        return f"{top}/{parts[1]}", 4 if (top, parts[1]) == ("control", "report") else floor
    return top, floor


def floors(root: Path) -> list[Violation]:
    """A module imports its own room and rooms on floors below; the two wings never meet."""
    return [
        Violation(module.at(one.line), why)
        for module in modules(root)
        for one in module.imports
        for why in _too_high(root, module, one)
    ]


def _too_high(root: Path, module: Module, one: Import) -> Iterator[str]:
    if one.type_checking or not f"{one.target}.".startswith("surefoot."):
        return
    target = package_module(root, one.target) or one.target
    here, there = room_of(module.name), room_of(target)
    if here is None:
        if module.name not in (
            "surefoot",
            "surefoot.__main__",
            *(f"surefoot.{name}" for name in PUBLIC),
        ):
            yield f"{module.name} stands on no floor; the floors are in docs/architecture.md"
        return
    if there is None:
        if not (target == "surefoot" and one.target.startswith("surefoot.__")):
            yield f"{here[0]} imports {one.target} through the package; import the room that has it"
        return
    if module.path.as_posix() in (
        "surefoot/core/__init__.py",
        *(f"surefoot/{top}/__init__.py" for top in NESTED),
    ):
        yield (
            f"{module.path.as_posix()} imports {target}; it runs before every room inside it "
            "and stays empty"
        )
    elif here[0] == there[0]:
        if there[1] > here[1]:
            yield f"{module.name} stands on floor 0 and imports {target} of floor 1"
        elif module.name == "surefoot.core.errors":
            yield f"surefoot.core.errors imports {target}; it imports nothing of ours"
    elif there[1] >= here[1]:
        yield (
            f"{here[0]} (floor {here[1]}) imports {there[0]} (floor {there[1]}); "
            "a room imports only floors below its own"
        )
    elif _wing(here[0]) and _wing(there[0]) and _wing(here[0]) != _wing(there[0]):
        yield (
            f"{here[0]} imports {there[0]}; the training wing and the control wing meet only "
            "through documents"
        )


def _wing(room: str) -> str | None:
    top = room.partition("/")[0]
    return "control" if top == "control" else "training" if top in TRAINING_WING else None


def cycles(root: Path) -> list[Violation]:
    """No module imports itself through others when it is loaded."""
    graph: dict[str, set[str]] = {}
    for module in modules(root):
        targets = (
            package_module(root, one.target)
            for one in module.imports
            if not one.in_function and not one.type_checking
        )
        graph[module.name] = {
            target
            for target in targets
            if target and target.startswith("surefoot.") and target != module.name
        }
    found: list[Violation] = []
    done: set[str] = set()
    for start in sorted(graph):
        loop = _find_loop(graph, start, (), done)
        if loop:
            found.append(
                Violation(
                    loop[0],
                    f"imports itself: {' -> '.join(loop)}; move what both need to a module below",
                )
            )
    return found


def _find_loop(
    graph: dict[str, set[str]], name: str, path: tuple[str, ...], done: set[str]
) -> tuple[str, ...]:
    if name in path:
        return (*path[path.index(name) :], name)
    if name in done:
        return ()
    for target in sorted(graph.get(name, ())):
        loop = _find_loop(graph, target, (*path, name), done)
        if loop:
            return loop
    done.add(name)
    return ()


def local_imports(root: Path) -> list[Violation]:
    """An import inside a function is for optional packages, and for what a plain run does without.

    cli and contract/task.py (which loads code by name) are free.
    """
    found, loaded = [], loaded_by_a_plain_run(root)
    for module in modules(root):
        if (
            module.path.as_posix().startswith("surefoot/cli/")
            or module.path.as_posix() == "surefoot/contract/task.py"
        ):
            continue
        for one in module.imports:
            optional, costly = _is_optional(root, one.target), _begins(one.target, COSTLY)
            own = package_module(root, one.target) if one.target.startswith("surefoot.") else None
            spared = one.in_function and own is not None and own not in loaded
            if one.type_checking or spared or one.in_function == (costly or optional):
                continue
            if one.in_function:
                what = f"imports {one.target} inside a function; move it to the top of the file"
            elif costly:
                what = f"makes every process import {one.target}; {USE_WHERE_NEEDED}"
            else:
                what = f"needs the optional package {one.target} to load; {USE_WHERE_NEEDED}"
            found.append(Violation(module.at(one.line), what))
    return found


def loaded_by_a_plain_run(root: Path) -> set[str]:
    """The modules of ours that `surefoot train digits` imports, by the imports at their top."""
    by_name = {module.name: module for module in modules(root)}
    found: set[str] = set()
    waiting = [name for name in PLAIN_RUN if name in by_name]
    while waiting:
        name = waiting.pop()
        if name in found or name not in by_name:
            continue
        found.add(name)
        if "." in name:
            waiting.append(name.rpartition(".")[0])
        waiting += [
            target
            for one in by_name[name].imports
            if not one.in_function and not one.type_checking
            if (target := package_module(root, one.target)) is not None
        ]
    return {name for name in found if name.partition(".")[0] == "surefoot"}


def weight_of_a_plain_run(root: Path) -> list[Violation]:
    """A plain run loads fewer than 200 modules of ours: those that it uses."""
    num_loaded = len(loaded_by_a_plain_run(root))
    return (
        [
            Violation(
                "surefoot/train/run.py",
                f"`surefoot train digits` loads {num_loaded} modules of surefoot, and fewer than "
                f"{MAX_LOADED} are allowed; {USE_WHERE_NEEDED}",
            )
        ]
        if num_loaded >= MAX_LOADED
        else []
    )


def loads_by_name(root: Path) -> list[Violation]:
    """Code is loaded by name in contract/task.py alone.

    The package's own lazy names and the verbs of cli are ours already.
    """
    free = ("surefoot/__init__.py", "surefoot/contract/task.py", "surefoot/core/old_homes.py")
    loaders = {
        "importlib.import_module",
        "__import__",
        "importlib.__import__",
        "runpy.run_path",
        "runpy.run_module",
        "importlib.util.spec_from_file_location",
    }
    return [
        Violation(module.at(line), f"{name} loads code by name; only contract/task.py does")
        for module in modules(root)
        if module.path.as_posix() not in free
        and not module.path.as_posix().startswith("surefoot/cli/")
        for name, line in called_names(module)
        if name in loaders
    ]


def torch_at_the_top(root: Path) -> list[Violation]:
    """Floors 0 to 2, the control wing and cli name no heavy package at the top of a file."""
    return [
        Violation(
            module.at(one.line),
            f"imports {one.target} when loaded; floors 0 to 2, control and cli stay free of torch",
        )
        for module in modules(root)
        if module.path.parts[1] in LIGHT
        for one in module.imports
        if not one.in_function and not one.type_checking and _begins(one.target, HEAVY)
    ]


def declared(root: Path) -> list[Violation]:
    """Every package that is imported is in the standard library or declared in pyproject.toml."""
    core, extras = declared_packages(root)
    known = {
        "surefoot",
        "tests",
        "examples",
        "benchmarks",
        *core,
        *extras,
        *sys.stdlib_module_names,
    }
    return [
        Violation(
            module.at(one.line),
            f"imports {one.target.partition('.')[0]}, which pyproject.toml does not declare",
        )
        for module in modules(root)
        for one in module.imports
        if one.target.partition(".")[0] not in known
    ]


@cache
def declared_packages(root: Path) -> tuple[frozenset[str], frozenset[str]]:
    """The import names of the core dependencies and of the extras."""
    path = root / "pyproject.toml"
    project = tomllib.loads((path if path.is_file() else PROJECT / "pyproject.toml").read_text())[
        "project"
    ]
    core = frozenset(map(_import_name, project["dependencies"]))
    extras = frozenset(
        _import_name(one) for lines in project["optional-dependencies"].values() for one in lines
    )
    return core, extras - core - {"surefoot"}


def _import_name(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert name is not None, requirement
    return IMPORT_NAMES.get(name[0].lower(), name[0].lower().replace("-", "_"))


def _is_optional(root: Path, target: str) -> bool:
    return (
        _begins(target, PART_OF_AN_EXTRA) or target.partition(".")[0] in declared_packages(root)[1]
    )


def _begins(target: str, packages: tuple[str, ...]) -> bool:
    return any(f"{target}.".startswith(f"{package}.") for package in packages)
