"""Calls and reads that do not belong.

What can run foreign code, the environment, private parts of torch.
"""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

from tests.laws.tree import Module, Violation, called_names, modules

SHIPPED = ("surefoot", "examples", "benchmarks")
FORBIDDEN_IMPORTS = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "builtins.eval",
    "builtins.exec",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "torch.load",
    "torch.save",
    "torch.serialization.load",
    "torch.hub.load",
    "torch.jit.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "shutil.unpack_archive",
    "numpy.lib.format.read_array",
}
FORBIDDEN_METHODS = {
    "extractall",
    "send_object_list",
    "recv_object_list",
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
}
FORBIDDEN_FLAGS = {"shell": "give a list of arguments", "allow_pickle": "store plain arrays"}
WHY = "can run code hidden in data; use safetensors, JSON, TOML, lists of arguments"
FREE = {
    # the process that opens strangers' files: torch.load with weights_only, and an unpickler that
    # makes records alone; it is confined
    "surefoot/components/checkpoint/foreign/child.py": {"pickle", "torch.load"},
    # between a run and the workers that it began itself, over a pipe that has no name
    "surefoot/components/data/loader/ring.py": {"pickle"},
    # what is measured beside our own: writes a file and reads that very file
    "benchmarks/checkpoint/arms.py": {"torch.save", "torch.load"},
    "benchmarks/checkpoint/stall.py": {"torch.save"},
}
ENDS = {
    # of a rank whose main thread hangs: no exception reaches it
    ("surefoot/runtime/comm/watched.py", "os._exit")
}
# between two attempts at a step that found no memory
CLEARS = "surefoot/train/failure/out_of_memory.py"
NETWORK = (
    "http",
    "urllib.request",
    "urllib3",
    "socketserver",
    "ftplib",
    "smtplib",
    "xmlrpc",
    "ssl",
    "requests",
    "httpx",
    "aiohttp",
    "torch.hub",
)
OF_RUNS = (
    "surefoot/contract/",
    "surefoot/components/observe/",
    "surefoot/train/",
    "surefoot/control/report/",
    "surefoot/cli/look/",
    "surefoot/cli/operate/stored.py",
    "surefoot/cli/operate/checkpoint.py",
    "surefoot/cli/operate/difference.py",
)
OPENS_OTHERS = {
    "surefoot/contract/run_folder/files.py": "the one that does",
    "surefoot/contract/commits.py": "opens folders alone, to sync them",
    "surefoot/contract/spec_file.py": (
        "reads specs that the user names; that of a run after a check"
    ),
    "surefoot/contract/signature.py": "reads the user's source",
    "surefoot/contract/digest.py": "hashes files that the user names",
    "surefoot/train/environment.py": "reads the user's repository",
    "surefoot/train/resume/program.py": "hashes the user's source, and reads its repository",
}
OPENING_METHODS = {"open", "read_text", "read_bytes", "write_text", "write_bytes"}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}


def dangerous(root: Path) -> list[Violation]:
    """Nothing that can run code hidden in a file.

    That is pickle, torch.load, eval, a shell, extraction, object collectives.
    """
    return [found for module in modules(root, *SHIPPED) for found in _dangerous(module)]


def _dangerous(module: Module) -> list[Violation]:
    free: set[str] = FREE.get(module.path.as_posix(), set())
    found = [
        Violation(module.at(one.line), f"imports {one.target}, which {WHY}")
        for one in module.imports
        if one.target not in free
        and (
            one.target.partition(".")[0] in FORBIDDEN_IMPORTS
            or one.target in FORBIDDEN_CALLS - {"eval", "exec"}
        )
    ]
    for node in module.nodes:
        if not isinstance(node, ast.Call):
            continue
        name = module.full_name(node.func)
        method = (
            node.func.attr
            if isinstance(node.func, ast.Attribute)
            else (name or "").rpartition(".")[2]
        )
        if (
            name in FORBIDDEN_CALLS
            and not (name in free and (name != "torch.load" or _loads_weights_only(node)))
        ) or method in FORBIDDEN_METHODS:
            found.append(Violation(module.at(node.lineno), f"calls {name or method}, which {WHY}"))
        found += [
            Violation(
                module.at(node.lineno),
                f"passes {flag.arg}={ast.unparse(flag.value)}; {FORBIDDEN_FLAGS[flag.arg]}",
            )
            for flag in node.keywords
            if flag.arg in FORBIDDEN_FLAGS
            and not (isinstance(flag.value, ast.Constant) and flag.value.value is False)
        ]
    return found


def _loads_weights_only(call: ast.Call) -> bool:
    flags = {flag.arg: flag.value for flag in call.keywords}
    given = flags.get("weights_only")
    return isinstance(given, ast.Constant) and given.value is True and "pickle_module" not in flags


def environment(root: Path) -> list[Violation]:
    """The environment is read in core/place.py alone, so that arguments win over it everywhere."""
    return [
        Violation(module.at(node.lineno), f"reads {name}; ask core/place.py")
        for module in modules(root)
        if module.path.as_posix() != "surefoot/core/place.py"
        for node in module.nodes
        if isinstance(node, ast.Attribute | ast.Name)
        and (name := module.full_name(node)) in ENVIRONMENT
    ]


def opened_in_runs(root: Path) -> list[Violation]:
    """What reads or writes run folders opens their files by contract/run_folder/files.py.

    It follows no link in them.
    """
    return [
        Violation(
            module.at(node.lineno),
            f"calls {ast.unparse(node.func)}; "
            "files of a run are opened by contract/run_folder/files.py",
        )
        for module in modules(root)
        if module.path.as_posix().startswith(OF_RUNS) and module.path.as_posix() not in OPENS_OTHERS
        for node in module.nodes
        if isinstance(node, ast.Call) and _opens(module, node)
    ]


def _opens(module: Module, node: ast.Call) -> bool:
    name = module.full_name(node.func) or ""
    if name in ("open", "io.open", "os.open"):
        return not any("devnull" in ast.unparse(each) for each in node.args)
    if not isinstance(node.func, ast.Attribute) or name.startswith(("surefoot.", "gzip.")):
        return False
    # Path.open, not a method of ours
    is_path = node.func.attr != "open" or all(isinstance(each, ast.Constant) for each in node.args)
    return node.func.attr in OPENING_METHODS and is_path


def cleared_caches(root: Path) -> list[Violation]:
    """The allocator's cache is emptied in one place, and in no step.

    What is given back is asked for again, while the device waits.
    """
    return [
        Violation(
            module.at(node.lineno),
            f"empties the allocator's cache, which slows the steps that follow; only {CLEARS} may",
        )
        for module in modules(root, *SHIPPED)
        if module.path.as_posix() != CLEARS
        for node in module.nodes
        if (isinstance(node, ast.Attribute) and node.attr == "empty_cache")
        or (isinstance(node, ast.alias) and node.name == "empty_cache")
    ]


def network(root: Path) -> list[Violation]:
    """Nothing of ours opens a connection or listens: no downloads, no telemetry, no server."""
    return [
        Violation(
            module.at(one.line),
            f"imports {one.target}, which can reach the network; surefoot reads local files only",
        )
        for module in modules(root)
        for one in module.imports
        if any(f"{one.target}.".startswith(f"{name}.") for name in NETWORK)
    ]


def private_torch(root: Path) -> list[Violation]:
    """A private part of torch is used in one file.

    The table of docs/architecture.md names the file, with what happens without that part.
    """
    listed = _listed_private(root)
    found = []
    for module in modules(root):
        for name, line in _private_names(module):
            if not any(
                fnmatch(name, pattern) and module.path.as_posix() == f"surefoot/{file}"
                for pattern, file in listed
            ):
                what = f"uses {name}; give it a row in docs/architecture.md, or use the public way"
                found.append(Violation(module.at(line), what))
    return found


def _private_names(module: Module) -> set[tuple[str, int]]:
    uses = {(one.target, one.line) for one in module.imports if not one.type_checking}
    uses |= {
        (name, node.lineno)
        for node in module.nodes
        if isinstance(node, ast.Attribute) and (name := module.full_name(node)) is not None
    }
    for node in module.nodes:  # getattr(torch.x, "_name") gets there by another road
        if (
            isinstance(node, ast.Call)
            and module.full_name(node.func) == "getattr"
            and len(node.args) > 1
        ):
            base, attribute = module.full_name(node.args[0]), node.args[1]
            if base is not None and isinstance(attribute, ast.Constant):
                uses.add((f"{base}.{attribute.value}", node.lineno))
    return {
        (name, line)
        for name, line in uses
        if name.startswith("torch.") and re.search(r"\._[a-z]", name) and _ends_private(name)
    }


def _ends_private(name: str) -> bool:
    return (
        re.fullmatch(r"_[a-zA-Z]\w*", name.rpartition(".")[2]) is not None
        or "._" in name.rpartition(".")[0]
    )


def _listed_private(root: Path) -> list[tuple[str, str]]:
    """Rows `| `torch._name` | `components/optim/fused.py` | ... |` of the architecture's table.

    A row may name several.
    """
    path = root / "docs" / "architecture.md"
    rows = re.findall(
        r"^\| (`torch\.[^|]*) \| `([\w/.]+\.py)` \|",
        path.read_text() if path.is_file() else "",
        re.MULTILINE,
    )
    return [
        (name, file) for names, file in rows for name in re.findall(r"`(torch\.[\w.*]+)`", names)
    ]


def prints(root: Path) -> list[Violation]:
    """Only cli and the console write to the terminal: data on stdout, talk on stderr."""
    free = ("surefoot/cli/", "surefoot/components/observe/")
    return [
        Violation(
            module.at(line),
            f"calls {name}; return rows and let cli or components/observe show them",
        )
        for module in modules(root)
        if not module.path.as_posix().startswith(free)
        for name, line in called_names(module)
        if name
        in (
            "print",
            "sys.stdout.write",
            "sys.stderr.write",
            "input",
            "sys.exit",
            "exit",
            "quit",
            "os._exit",
        )
        and (module.path.as_posix(), name) not in ENDS
    ]
