"""Copies of checkpoints in an object store (S3, GCS, or any file system of fsspec).

A checkpoint is written in the run folder first, and uploaded from there. A different machine can
download the newest undamaged checkpoint and resume from it. An object store has no rename.
Therefore the manifest is uploaded last and deleted first, so that an incomplete checkpoint is never
visible. A downloaded checkpoint becomes visible in the run folder only after every byte is
verified.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from surefoot.components.checkpoint.save import discard
from surefoot.contract import commits
from surefoot.contract import manifest as manifests
from surefoot.contract.commits import sync_folder
from surefoot.contract.manifest import Manifest
from surefoot.contract.run_folder import files
from surefoot.core.errors import (
    MissingExtra,
    RunFolderError,
    SpecError,
    StorageError,
    require_package,
)

EXTRA = "store"


class Store:
    """Checkpoints of one run under a URL such as `s3://bucket/runs/mine`.

    Raises MissingExtra if fsspec or its package for the URL is not installed, and SpecError for a
    URL that fsspec does not support.
    """

    def __init__(self, url: str) -> None:
        with require_package(
            "fsspec", "fsspec", extra=EXTRA, needed_for=f"checkpoint.store = {url!r}"
        ):
            import fsspec
        try:
            self._system: Any
            self._system, self._root = fsspec.core.url_to_fs(url)
        # fsspec's error for a package of a backend that is missing or broken
        except ImportError as error:
            if not isinstance(error.__cause__, ModuleNotFoundError):
                raise
            raise MissingExtra(
                str(error.__cause__.name), extra=EXTRA, needed_for=f"checkpoint.store = {url!r}"
            ) from None
        except ValueError as error:
            raise SpecError(
                f"checkpoint.store is {url!r}: {error}",
                hint='give a URL such as "s3://bucket/runs/mine"',
            ) from None
        self.url = url

    def _path(self, step: int, name: str = "") -> str:
        return "/".join(
            part for part in (self._root, manifests.FOLDER, f"step-{step:012d}", name) if part
        )

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints in the store, ascending.

        A checkpoint is complete if its manifest is in the store. Raises StorageError if the store
        does not respond.
        """
        pattern = f"{self._root}/{manifests.FOLDER}/step-*/{manifests.FILE}"
        with _as_storage_error(self.url):
            self._system.invalidate_cache()
            names = [path.split("/")[-2] for path in self._system.glob(pattern)]
        found = (manifests.STEP_FOLDER.match(name) for name in names)
        return sorted(int(match.group(1)) for match in found if match)

    def push(self, run: Path, step: int) -> None:
        """Upload the checkpoint of `step` in the run folder `run`, its manifest last.

        Raises StorageError if the store does not respond.
        """
        folder = manifests.step_folder(run, step)
        made = manifests.read(folder)
        with _as_storage_error(self.url):
            if "file" in self._system.protocol:  # object stores have no folders to make
                self._system.makedirs(self._path(step), exist_ok=True)
            for entry in made.files:
                self._system.put_file(str(folder / entry.name), self._path(step, entry.name))
            self._system.put_file(str(folder / manifests.FILE), self._path(step, manifests.FILE))

    def pull(self, run: Path, step: int) -> None:
        """Download the checkpoint of `step` into the run folder `run`.

        It becomes visible in the run folder only if every digest matches. Raises RunFolderError for
        a damaged checkpoint, and StorageError if the store does not respond.
        """
        final = manifests.step_folder(run, step)
        draft = final.with_name(f"{commits.DRAFT}{final.name}")
        shutil.rmtree(draft, ignore_errors=True)
        files.make_folder(run, manifests.FOLDER)
        draft.mkdir()
        try:
            with _as_storage_error(self.url):
                self._system.get_file(self._path(step, manifests.FILE), str(draft / manifests.FILE))
                made = manifests.read(draft)
                for entry in made.files:
                    self._system.get_file(self._path(step, entry.name), str(draft / entry.name))
            if made.step != step:
                raise RunFolderError(
                    f"{self.url}: the manifest of step {step} belongs to step {made.step}"
                )
            commits.check(draft)
            for path in draft.iterdir():
                sync_folder(path)
            sync_folder(draft)
            draft.rename(final)
            sync_folder(final.parent)
        except BaseException:
            discard(draft)
            raise

    def read(self, step: int) -> Manifest:
        """Download only the manifest of a checkpoint, verify it, and return it.

        Raises RunFolderError for a damaged manifest.
        """
        with tempfile.TemporaryDirectory() as made, _as_storage_error(self.url):
            self._system.get_file(
                self._path(step, manifests.FILE), str(Path(made) / manifests.FILE)
            )
            return manifests.read(Path(made))

    def pull_newest(self, run: Path, spec_id: str) -> tuple[int | None, list[str]]:
        """Download the newest undamaged checkpoint, if it is newer than those in the run folder.

        Returns the step of the downloaded checkpoint (None if nothing was downloaded), and a
        message about each damaged checkpoint. Raises RunFolderError, before it downloads any
        tensor, if the checkpoint belongs to a different `spec_id`.
        """
        troubles: list[str] = []
        here = max(manifests.steps(run), default=-1)
        for step in reversed([each for each in self.steps() if each > here]):
            try:
                found = self.read(step).spec_id
                if found == spec_id:
                    self.pull(run, step)
            except RunFolderError as error:
                troubles.append(error.message)
                continue
            if found != spec_id:
                raise RunFolderError(
                    f"{self.url} contains checkpoints of a different spec ({found}, now {spec_id})",
                    hint="give another checkpoint.store",
                )
            return step, troubles
        return None, troubles

    def retain(self, run: Path) -> None:
        """Delete the checkpoints in the store that are no longer in the run folder.

        Checkpoints newer than the newest one in the run folder stay. The manifest of a checkpoint
        is deleted first.
        """
        here = manifests.steps(run)
        with _as_storage_error(self.url):
            for step in [
                each for each in self.steps() if here and each < here[-1] and each not in here
            ]:
                self._system.rm_file(self._path(step, manifests.FILE))
                self._system.rm(self._path(step), recursive=True)


class _as_storage_error:
    """Context that converts the exceptions of a store to StorageError.

    FileNotFoundError becomes RunFolderError.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if isinstance(error, FileNotFoundError):
            raise RunFolderError(f"{self._url}: {error} does not exist") from error
        if isinstance(error, Exception) and not isinstance(error, RunFolderError | StorageError):
            raise StorageError(
                f"{self._url} does not respond: {type(error).__name__}: {error}"[:300]
            ) from error
