"""Quoting of paths that contain a space in the commands that torch builds for the C++ compiler.

torch writes a command as one line, splits it as a shell does, and quotes only the include folders.
If the environment, the cache or the temporary folder is below a folder such as `my project/`, its
path is split in two, and no CPU kernel can be compiled.
"""

from __future__ import annotations

import functools
import shlex
import sys
from typing import Any

import torch


def patch_compiler_commands() -> None:
    """Patch torch's `CppBuilder`, so that every compiler command of this process quotes all paths.

    Does nothing on Windows, if torch has no `CppBuilder`, or if its constructor is already wrapped.
    """
    inductor: Any = torch._inductor  # torch imports it at the first access
    builder = getattr(getattr(inductor, "cpp_builder", None), "CppBuilder", None)
    if builder is None or sys.platform == "win32" or hasattr(builder.__init__, "__wrapped__"):
        return
    init = builder.__init__

    @functools.wraps(init)
    def init_and_quote(
        self: Any, name: str, sources: str | list[str], BuildOption: Any, output_dir: str = ""
    ) -> None:
        init(self, name, sources, BuildOption, output_dir)
        given = [sources] if isinstance(sources, str) else sources
        self._sources_args = _quote(self._sources_args, *given)
        self._output = _quote(self._output, self._target_file)
        self._libraries_dirs_args = _quote(
            self._libraries_dirs_args, *BuildOption.get_libraries_dirs()
        )
        if getattr(BuildOption, "precompiled_header", None):
            self._include_dirs_args = _quote(
                self._include_dirs_args, BuildOption.precompiled_header
            )

    builder.__init__ = init_and_quote


def _quote(words: str, *paths: str) -> str:
    """Return the command line `words` with each of `paths` quoted, if it needs quotes.

    A path that is already quoted is unchanged.

    >>> _quote("-L/my lib -L/lib", "/my lib", "/lib"), _quote("-L'/my lib'", "/my lib")
    ("-L'/my lib' -L/lib", "-L'/my lib'")
    """
    for path in paths:
        quoted = shlex.quote(path)
        if quoted != path and quoted not in words:
            words = words.replace(path, quoted)
    return words
