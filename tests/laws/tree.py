"""A source tree as the laws see it: its modules, parsed; where each stands; what each imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Violation:
    """One break of a law: where, and what to do instead."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class Import:
    """One import's target, whole (`surefoot.core.errors`, `torch.nn`), and how the file has it."""

    target: str
    line: int
    in_function: bool
    type_checking: bool


@dataclass(frozen=True)
class Module:
    """One Python file: `path` from the tree's root, `name` as it is imported."""

    root: Path
    path: Path

    @property
    def name(self) -> str:
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def text(self) -> str:
        return (self.root / self.path).read_text(encoding="utf-8")

    @cached_property
    def syntax(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the syntax: two dozen laws look at all of them."""
        return tuple(_walk(self.syntax))

    def at(self, line: int) -> str:
        return f"{self.path.as_posix()}:{line}"

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self, self.syntax, in_function=False, type_checking=False))

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Local name -> what it stands for: `np` -> `numpy`, `load` -> `torch.load`."""
        names: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    names[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= {
                    alias.asname or alias.name: f"{node.module}.{alias.name}"
                    for alias in node.names
                }
        return names

    def full_name(self, node: ast.expr) -> str | None:
        """The dotted name of an expression through the file's imports; None for no plain name."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.full_name(node.value)
            return None if base is None else f"{base}.{node.attr}"
        return None


def _walk(tree: ast.AST) -> list[ast.AST]:
    """The nodes that `ast.walk` gives, in half its time."""
    nodes = [tree]
    for node in nodes:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                nodes.extend(each for each in value if isinstance(each, ast.AST))
            elif isinstance(value, ast.AST):
                nodes.append(value)
    return nodes


@cache
def one_module(root: Path, path: Path) -> Module:
    """The module at `path` from the tree's root: parsed once, whichever law asks."""
    return Module(root, path)


def forget() -> None:
    """Free what was parsed."""
    modules.cache_clear()
    one_module.cache_clear()


@cache
def modules(root: Path, *folders: str) -> tuple[Module, ...]:
    """Every Python file under `folders` of the tree (the package, when none is named)."""
    found = (
        path
        for folder in folders or ("surefoot",)
        for path in sorted((root / folder).rglob("*.py"))
    )
    return tuple(
        one_module(root, path.relative_to(root))
        for path in found
        if not any(p.startswith(".") for p in path.relative_to(root).parts)
    )


def called_names(module: Module) -> Iterator[tuple[str, int]]:
    """Every call of the file by its full name, with its line."""
    import ast

    for node in module.nodes:
        if isinstance(node, ast.Call):
            name = module.full_name(node.func)
            if name is not None:
                yield name, node.lineno


def package_module(root: Path, target: str) -> str | None:
    """The longest beginning of `target` that is a module of the tree.

    `surefoot.core.errors.X` -> `surefoot.core.errors`.
    """
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        path = root.joinpath(*parts[:length])
        if path.with_suffix(".py").is_file() or path.is_dir():
            return ".".join(parts[:length])
    return None


def _imports(
    module: Module, node: ast.AST, *, in_function: bool, type_checking: bool
) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, in_function, type_checking)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(module, child)
            for alias in child.names:
                yield Import(f"{base}.{alias.name}", child.lineno, in_function, type_checking)
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            for part in child.body:
                yield from _imports(
                    module, ast.Module([part], []), in_function=in_function, type_checking=True
                )
            for part in child.orelse:
                yield from _imports(
                    module,
                    ast.Module([part], []),
                    in_function=in_function,
                    type_checking=type_checking,
                )
        elif not isinstance(child, ast.expr):  # in which no import can stand
            inside = in_function or isinstance(child, FUNCTIONS)
            yield from _imports(module, child, in_function=inside, type_checking=type_checking)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = (
        module.name.split(".") if module.path.name == "__init__.py" else module.name.split(".")[:-1]
    )
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )
