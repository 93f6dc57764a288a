"""Compiles `surefoot/native/sha256.c` when surefoot is built or installed.

Without a C compiler surefoot works as well, by hashlib.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("surefoot", "native")


class NativeBuild(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root) / NATIVE
        compiler = os.environ.get("CC", "cc").split()
        made, draft = folder / "_sha256.so", folder / f"_sha256.so.{os.getpid()}"
        try:
            subprocess.run(
                [*compiler, "-O3", "-shared", "-fPIC", "-o", draft, folder / "sha256.c"],
                check=True,
                capture_output=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", b"") or str(error).encode()
            self.app.display_warning(
                "checkpoints will be hashed by hashlib alone: "
                f"{why.decode(errors='replace').strip()}"
            )
            return
        draft.replace(made)  # a running surefoot keeps the old one
        build_data["artifacts"].append(f"/{NATIVE.as_posix()}/{made.name}")
        build_data["pure_python"] = False
        build_data["tag"] = (
            f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        )
