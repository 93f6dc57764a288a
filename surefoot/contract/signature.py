"""Read the parameters of a task's constructor from its source, and check [task] against them.

[task] is a table of the spec. The task is not imported.
"""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.core.errors import SpecError, TaskError, find_nearest, hint_nearest
from surefoot.core.units import name_some

MAX_DEPTH = 8
MAX_CLASSES = 8  # that a hint names
STARTERS = ("Run", "attach")
NAMING = "a task is named file.py:Class or package.module:Class"
METHODS = ("model", "data", "forward", "loss")
# what ast.parse raises for bad text, null bytes, or a nesting too deep
NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
    "list": (list, tuple),
    "tuple": (list, tuple),
    "Sequence": (list, tuple),
    "dict": (dict,),
    "Mapping": (dict,),
}


@dataclass(frozen=True)
class Parameter:
    """Parameter of a task's constructor: its name, annotation and default, read from source code.

    `default_text` is the source text of the default, None if there is no default.
    """

    name: str
    annotation: ast.expr | None
    default_text: str | None

    @property
    def has_default(self) -> bool:
        return self.default_text is not None


def check(use: str, given: Mapping[str, Any], places: Mapping[str, str]) -> None:
    """Check the [task] table of a spec against the constructor of the task `use`.

    A constructor that can only be read by an import, such as one inherited from a different module,
    is not checked.

    Args:
        use: The task: a built-in name, `file.py:Class` or `package.module:Class`.
        given: The keys and values of the table, without `use`.
        places: Where each key was given, by dotted key such as `task.width`.

    Raises:
        TaskError: If the file or the class is missing.
        SpecError: If a key is unknown, a required key is missing, or a value has a wrong type.
    """
    parameters = find_parameters(use)
    if parameters is None:
        return
    known = {parameter.name: parameter for parameter in parameters}
    for key, value in given.items():
        where = places.get(f"task.{key}")
        if key not in known:
            raise SpecError(
                f"{use} has no parameter {key!r}",
                hint=f"{hint_nearest(key, known, 0.5)}it has: {', '.join(known) or 'none'}",
                where=where,
            )
        annotation = known[key].annotation
        if annotation is not None and not _matches_annotation(value, annotation):
            raise SpecError(
                f"task.{key} is {value!r}",
                hint=f"give a value of type {ast.unparse(annotation)}",
                where=where,
            )
    missing = [
        name
        for name, parameter in known.items()
        if not parameter.has_default and name not in given and name != "folder"
    ]
    if missing:
        raise SpecError(
            f"{use} needs {', '.join(missing)}",
            hint=f"add {missing[0]} = ... under [task]",
            where=places.get("task.use"),
        )


def has_parameter(use: str, name: str) -> bool | None:
    """Return whether the constructor of the task `use` has a parameter `name`.

    None if only importing the task can show that.
    """
    parameters = find_parameters(use)
    return None if parameters is None else any(parameter.name == name for parameter in parameters)


def find_source(use: str) -> Path | None:
    """Return the source file of the task `use`, found without importing it; None if not found.

    The file in a `use` such as `file.py:Class` is returned even if it does not exist.
    """
    module, colon, _ = use.partition(":")
    if module.endswith(".py"):
        return Path(module)
    if not colon:
        path = Path(__file__).parents[1] / "tasks" / f"{use}.py"
        return path if _is_file(path) else None
    parts = module.split(".")
    if not all(map(str.isidentifier, parts)):
        return None
    for root in [*sys.path, "."]:
        base = Path(root or ".").joinpath(*parts)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if _is_file(path):
                return path
    return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long for any file
        return False


def find_parameters(use: str) -> list[Parameter] | None:
    """Return the parameters of the constructor of the task `use`, without importing the task.

    None if only an import can show them. Raises TaskError if the file or the class is missing, or
    the file is not valid Python.
    """
    module, colon, name = use.partition(":")
    path = find_source(use)
    if path is None:
        if not colon:
            file = Path(f"{use}.py")
            hint = suggest_class(file) if _is_file(file) else NAMING
            raise TaskError(f"there is no built-in task {use[:500]!r}", hint=hint)
        return None
    if not _is_file(path):
        raise TaskError(f"there is no task file {str(path)[:500]}", hint=NAMING)
    if module.endswith(".py") and not colon:
        raise TaskError(
            f"{path} is a file, but a task is a class in a file", hint=suggest_class(path)
        )
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise TaskError(
            f"{path} cannot be read: {error.strerror}",
            hint="give a task file that you have permission to read",
        ) from None
    except NOT_PYTHON as error:
        raise TaskError(
            f"{path} is not Python: {error}", hint="correct the file, then run the command again"
        ) from None
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if not name:
        name = _first_public(tree) or next(iter(classes), "")
    if name not in classes:
        if _is_bound(tree, name):
            return None
        raise TaskError(f"{path} has no class {name!r}", hint=suggest_class(path, name))
    return _class_parameters(classes[name], classes, tree, 0)


def suggest_class(path: Path, name: str = "") -> str:
    """Return a hint that names the class in a file that is most likely the task.

    It is the class that has the most methods of a task. Of several such classes, one with a name
    similar to `name` is preferred. The file is not imported.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, *NOT_PYTHON):
        return NAMING
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    counts = {each: _count_methods(_methods_of(node, classes, 0)) for each, node in classes.items()}
    likeliest = [each for each, count in counts.items() if count == max(counts.values())]
    if not likeliest:
        return "the file has no class; surefoot init NEW writes a file with a task"
    near = find_nearest(name, likeliest, n=1) or likeliest
    here = Path.cwd()
    file = path.absolute().relative_to(here) if path.absolute().is_relative_to(here) else path
    named = [shlex.quote(f"{file}:{each}") for each in near]
    most, more = " or ".join(named[:MAX_CLASSES]), len(named) - MAX_CLASSES
    rest = f" or one of {more:,} more" if more > 0 else ""
    return f"name {'its class' if len(near) == 1 else 'one of its classes'}: {most}{rest}"


def name_nearest(name: str, classes: Sequence[str]) -> str:
    """Return a text with the names of at most eight classes, those similar to `name` first."""
    near = find_nearest(name, classes)
    rest = [each for each in classes if each not in near]
    return name_some([*near, *rest], MAX_CLASSES) or "no class"


def _count_methods(methods: set[str]) -> int:
    """Return how many of the four required methods of a task are in `methods`.

    The method `updates` counts as `forward` and `loss`, which it replaces.
    """
    replaced = {"forward", "loss"} if "updates" in methods else set()
    return len((methods | replaced).intersection(METHODS))


def _methods_of(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef], depth: int) -> set[str]:
    """Return the names of a class's methods, including those of base classes in the same file."""
    found = {
        each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    bases = [
        classes[each.id] for each in node.bases if isinstance(each, ast.Name) and each.id in classes
    ]
    return found.union(
        *(_methods_of(each, classes, depth + 1) for each in bases if depth < MAX_DEPTH)
    )


def find_unguarded_run(path: Path) -> int | None:
    """Return the line number at which importing a script would start a run; None if none would.

    The run may be a `with Run(...)` or a call of `attach`. Statements under an `if`, and those
    after a statement that may end the script, are not checked.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, *NOT_PYTHON):
        return None  # the import reports it better
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return _find_start(tree.body, _names_of_starters(tree) - functions.keys(), functions)


def _names_of_starters(tree: ast.Module) -> set[str]:
    """Return the names by which a script can refer to surefoot's Run and attach."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "surefoot":
            found |= {alias.asname or alias.name for alias in node.names if alias.name in STARTERS}
        elif isinstance(node, ast.Import):
            names = [alias.asname or alias.name for alias in node.names if alias.name == "surefoot"]
            found |= {f"{name}.{starter}" for name in names for starter in STARTERS}
    return found


def _find_start(
    body: Sequence[ast.stmt], starters: set[str], functions: Mapping[str, ast.FunctionDef]
) -> int | None:
    """Return the line number of a statement that always starts a run; None if there is none.

    The statement is in `body`, or in a function that `body` calls.
    """
    for node in body:
        if isinstance(node, ast.If | ast.While | ast.Match):
            if _may_end(node) and not _is_main_guard(node):
                return None
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        inner = [*getattr(node, "body", ()), *getattr(node, "finalbody", ())]
        heads = (
            [each.context_expr for each in node.items]
            if isinstance(node, ast.With)
            else []
            if inner
            else [node]
        )
        for call in (
            each for head in heads for each in ast.walk(head) if isinstance(each, ast.Call)
        ):
            name = ast.unparse(call.func)
            if name in starters and (isinstance(node, ast.With) or name.endswith("attach")):
                return call.lineno
            others = {key: value for key, value in functions.items() if key != name}
            if (
                name in functions
                and (found := _find_start(functions[name].body, starters, others)) is not None
            ):
                return found
        if (found := _find_start(inner, starters, functions)) is not None:
            return found
    return None


def _may_end(node: ast.stmt) -> bool:
    """Return whether a statement may end the script, or leave the function or loop around it."""
    calls = [
        ast.unparse(each.func).rpartition(".")[2]
        for each in ast.walk(node)
        if isinstance(each, ast.Call)
    ]
    leaves = any(
        isinstance(each, ast.Return | ast.Raise | ast.Break | ast.Continue)
        for each in ast.walk(node)
    )
    return leaves or not {"exit", "_exit", "quit", "abort", "skip"}.isdisjoint(calls)


def _is_main_guard(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.If)
        and "__name__" in ast.unparse(node.test)
        and "==" in ast.unparse(node.test)
    )


def _first_public(tree: ast.Module) -> str | None:
    """Return the first name of `__all__`; None if that is not a plain list or tuple of strings."""
    for node in tree.body:
        if (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and "__all__" in _targets(node)
            and isinstance(node.value, ast.List | ast.Tuple)
        ):
            first = node.value.elts[0] if node.value.elts else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                return first.value
    return None


def _is_bound(tree: ast.Module, name: str) -> bool:
    """Return whether a module imports `name`, assigns it, or defines it under a condition.

    Only importing the module can show what such a name refers to.
    """
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) and any(
            (alias.asname or alias.name) in (name, "*") for alias in node.names
        ):
            return True
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
            return True
        if isinstance(node, ast.If | ast.Try | ast.With) and any(
            getattr(each, "name", None) == name for each in ast.walk(node)
        ):
            return True
    return False


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {
        each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
    }


def _class_parameters(
    node: ast.ClassDef, classes: Mapping[str, ast.ClassDef], tree: ast.Module, depth: int
) -> list[Parameter] | None:
    if depth > MAX_DEPTH:
        return None
    init = next(
        (
            item
            for item in node.body
            if isinstance(item, ast.FunctionDef) and item.name == "__init__"
        ),
        None,
    )
    if init is not None:
        return None if init.args.kwarg is not None else _argument_parameters(init.args)
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        own = [
            _field_parameter(item)
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
        return own if not node.bases else None
    if not node.bases:
        return []
    base = node.bases[0]
    if isinstance(base, ast.Name) and base.id in classes:
        return _class_parameters(classes[base.id], classes, tree, depth + 1)
    imported = _imported_from(tree, base.id) if isinstance(base, ast.Name) else None
    if imported is not None and imported.startswith("surefoot.tasks."):
        return find_parameters(imported)
    return [] if isinstance(base, ast.Name) and base.id in ("object", "Protocol", "Task") else None


def _imported_from(tree: ast.Module, name: str) -> str | None:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return f"{node.module}:{alias.name}"
    return None


def _argument_parameters(arguments: ast.arguments) -> list[Parameter]:
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + list(
        arguments.defaults
    )
    pairs = list(zip(plain, defaults, strict=True))[1:] + list(
        zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    )
    return [
        Parameter(arg.arg, arg.annotation, None if default is None else ast.unparse(default))
        for arg, default in pairs
    ]


def _field_parameter(item: ast.AnnAssign) -> Parameter:
    name = item.target.id if isinstance(item.target, ast.Name) else ""
    return Parameter(name, item.annotation, None if item.value is None else ast.unparse(item.value))


def _matches_annotation(value: Any, annotation: ast.expr) -> bool:
    """Return whether a TOML value fits an annotation.

    An annotation that is not a simple type is not checked: the result is True.
    """
    if isinstance(annotation, ast.Constant):
        return value is None if annotation.value is None else _fits_text(value, annotation.value)
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return _matches_annotation(value, annotation.left) or _matches_annotation(
            value, annotation.right
        )
    if isinstance(annotation, ast.Subscript):
        return _fits_subscript(
            value, ast.unparse(annotation.value).rpartition(".")[2], _elements(annotation.slice)
        )
    if isinstance(annotation, ast.Name) and (kinds := _TYPES.get(annotation.id)):
        return isinstance(value, kinds) and (annotation.id == "bool" or not isinstance(value, bool))
    return True


def _fits_text(value: Any, text: object) -> bool:
    """Return whether a value fits an annotation that is written as a string."""
    if not isinstance(text, str):
        return True
    try:
        return _matches_annotation(value, ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError):
        return True


def _fits_subscript(value: Any, name: str, elements: list[ast.expr]) -> bool:
    if name == "Literal":
        constants = [each.value for each in elements if isinstance(each, ast.Constant)]
        return value in constants or len(constants) < len(elements)
    if name in ("Optional", "Union"):
        return (name == "Optional" and value is None) or any(
            _matches_annotation(value, each) for each in elements
        )
    if name == "Annotated":
        return _matches_annotation(value, elements[0])
    return not (kinds := _TYPES.get(name)) or isinstance(value, kinds)


def _elements(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]
