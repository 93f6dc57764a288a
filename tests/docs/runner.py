"""Runs what a document shows, block after block, in one folder; returns what did not hold."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tests.docs.snippets import PYTHON, SHELL, Block, blocks
from tests.prove.forked import forking

ROOT = Path(__file__).resolve().parents[2]
# what a reader has beside him when he types a command
LENT = ("examples", "recipes", "benchmarks", "docs")
MAX_S = 300
REPL = "import doctest, pathlib, sys\ntext = pathlib.Path(sys.argv[1]).read_text()\n"
REPL += "parser = doctest.DocTestParser().get_doctest(text, {}, sys.argv[1], sys.argv[1], 0)\n"
REPL += "sys.exit(bool(doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(parser).failed))\n"


class Forge:
    """The forking process of forge.py, as something to ask."""

    def __init__(self, root: Path = ROOT) -> None:
        command = [sys.executable, str(Path(__file__).with_name("forge.py"))]
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        with forking():
            self._process = subprocess.Popen(
                command,
                cwd=root,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

    def run(self, arguments: list[str], folder: Path, log: Path, variables: dict[str, str]) -> int:
        """The exit code of one program."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {
            "arguments": arguments,
            "folder": str(folder),
            "log": str(log),
            "variables": variables,
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of_what: object) -> None:
        self._process.communicate()


@dataclass
class Reader:
    """Somebody who types what a document shows.

    He has a folder of his own, the project's folders beside him, and `surefoot` on his path.
    """

    forge: Forge
    folder: Path
    data: Path | None
    name: str = "document"
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.place = self.folder / "project"
        self.place.mkdir(parents=True)
        for name in LENT:
            if (ROOT / name).is_dir():
                (self.place / name).symlink_to(ROOT / name)
        if self.data is not None:
            (self.folder / "shared").mkdir()
            (self.folder / "shared" / "data").symlink_to(self.data)
        tools = self.folder / "bin"
        tools.mkdir()
        for tool, command in {"surefoot": "-m surefoot ", "python": ""}.items():
            (tools / tool).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command}"$@"\n')
            (tools / tool).chmod(0o755)
        self.variables = {
            "PATH": os.pathsep.join((str(tools), os.environ.get("PATH", os.defpath))),
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
        }
        self.log = self.folder / "output"

    def read(self, text: str) -> list[str]:
        """Do all that the document asks for; what failed, a line for each block."""
        for block in blocks(text):
            if "not run" in block.asks:
                if len(block.asks["not run"]) < 10:
                    self._fail(block, "is not run, and the comment above it gives no reason")
            elif self._lacks_data(block):
                self.left_out.append(f"{self.name}:{block.line}")
            elif block.language in SHELL:
                self._type(block)
            elif block.language in PYTHON:
                self._python(block)
            elif block.language == "toml":
                self._toml(block)
        return self.failures

    def _lacks_data(self, block: Block) -> bool:
        """Whether a block reads a data set that is not there,
        or what a block made that was left out for that."""
        sets = re.findall(r"shared/data(?:/([\w-]+))?", block.text)
        if any(self.data is None or not (self.data / name).exists() for name in sets):
            return True
        needed = block.asks.get("needs", "").split()
        return bool(self.left_out) and any(not (self.place / name).exists() for name in needed)

    def _type(self, block: Block) -> None:
        # one shell for the block where something is to last, as `cd` does
        lasts = any(re.search(r"^(cd|export|source|set|\w+=)|[\n\\]", c) for c in block.commands)
        steps = ["\n".join(block.commands)] if lasts else block.commands
        self.log.write_text("")
        for number, command in enumerate(steps, start=1):
            wanted = int(block.asks.get("exits", "0")) if number == len(steps) else 0
            ended = self._plain(command) if _is_plain(command) else self._shell(command)
            if ended != wanted:
                self._fail(
                    block,
                    f"`{command.strip()}` ended with {ended}, {wanted} was expected",
                    self.log.read_text(),
                )
                return
        if "output" in block.asks:
            self._compare(block, self.log.read_text())

    def _plain(self, command: str) -> int:
        return self.forge.run(shlex.split(command), self.place, self.log, self.variables)

    def _shell(self, script: str) -> int:
        with self.log.open("a") as log:
            return subprocess.run(
                ["bash", "-eo", "pipefail", "-c", script],
                cwd=self.place,
                env={**os.environ, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=MAX_S,
                check=False,
            ).returncode

    def _python(self, block: Block) -> None:
        file = self.place / block.asks.get("file", f"snippet_{block.line}.py")
        file.write_text(block.text)
        arguments = ["python", str(file)]
        if block.text.lstrip().startswith(">>>"):
            driver = self.folder / "repl.py"
            driver.write_text(REPL)
            arguments = ["python", str(driver), str(file)]
        self.log.write_text("")
        ended = self.forge.run(arguments, self.place, self.log, self.variables)
        if ended:
            self._fail(block, f"the snippet ended with {ended}", self.log.read_text())

    def _toml(self, block: Block) -> None:
        try:
            tomllib.loads(block.text)
        except tomllib.TOMLDecodeError as error:
            self._fail(block, f"is no TOML: {error}")
            return
        if "file" in block.asks:
            (self.place / block.asks["file"]).write_text(block.text)
            self.log.write_text("")
            if self._plain(f"surefoot spec check {shlex.quote(block.asks['file'])}"):
                self._fail(
                    block,
                    f"{block.asks['file']} is refused by surefoot spec check",
                    self.log.read_text(),
                )

    def _compare(self, block: Block, output: str) -> None:
        real = [" ".join(line.split()) for line in output.splitlines()]
        for line in block.shown:
            pattern = ".*".join(
                re.escape(" ".join(part.split()))
                for part in re.split(r"\s*\.\.\.\s*", line.strip())
            )
            if not any(re.fullmatch(pattern, one) for one in real):
                self._fail(block, f"the line {line.strip()!r} is not in the output", output)
                return

    def _fail(self, block: Block, what: str, output: str = "") -> None:
        tail = "\n".join(f"    {line}" for line in output.splitlines()[-15:])
        self.failures.append(f"{self.name}:{block.line}: {what}\n{tail}".rstrip())


def _is_plain(command: str) -> bool:
    """Whether it is one `surefoot ...` or `python ...` with nothing for a shell to do.

    Such a command needs no process of its own.
    """
    programs = r"surefoot|python (-m torch\.distributed\.run|\w[\w/.]*\.py)"
    return re.fullmatch(rf"({programs})( [^|&;<>$(){{}}*?~`#\n]*)?", command) is not None
