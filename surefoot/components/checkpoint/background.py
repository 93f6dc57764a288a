"""Background saving: the state is copied during the next step, and written during training.

At most one save is in flight. The caller must call `before_update` before anything in the state
changes; it waits for the copy, not for the write.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from surefoot.components.checkpoint.save import Content
from surefoot.contract.manifest import Manifest
from surefoot.core.errors import StorageError, SurefootError
from surefoot.core.place import yield_to_others
from surefoot.runtime.staging import Staging

NICE = 19
Write = Callable[[Content, Callable[[], bool]], Manifest]


@dataclass(frozen=True)
class SaveResult:
    """Result of one save: the manifest of the checkpoint, or the error that prevented it.

    `waited_s` is the time for which the save blocked training.
    """

    step: int
    elapsed_s: float
    waited_s: float
    manifest: Manifest | None = None
    error: SurefootError | None = None


class Saver:
    """Saves with `write(content, may_commit)`, in a background thread or synchronously."""

    def __init__(self, write: Write) -> None:
        self._write: Final = write
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._confirmed = threading.Event()
        self._torn: str | None = None
        self._waited_s = 0.0
        self._done: SaveResult | None = None
        self._crash: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save_now(self, content: Content) -> SaveResult:
        """Save synchronously from the tensors of the state, which must not change meanwhile."""
        started_s = time.perf_counter()
        try:
            made = self._write(content, lambda: True)
        except SurefootError as error:
            elapsed_s = time.perf_counter() - started_s
            return SaveResult(content.step, elapsed_s, elapsed_s, error=error)
        elapsed_s = time.perf_counter() - started_s
        return SaveResult(content.step, elapsed_s, elapsed_s, made)

    def begin(self, content: Content, moving: Mapping[str, Mapping[str, Tensor]]) -> bool:
        """Start a background save of `content` and of the tensors in `moving`, grouped by file.

        The tensors of `moving` are copied before `before_update` returns. `finish` must have
        returned the result of the previous save. Returns False if the system cannot start a thread.
        """
        self._done, self._crash, self._torn, self._waited_s = None, None, None, 0.0
        self._confirmed.clear()
        self._staging.begin(
            {
                f"{file}\n{name}": tensor
                for file, tensors in moving.items()
                for name, tensor in tensors.items()
            }
        )
        thread = threading.Thread(
            target=self._run, args=(content, time.perf_counter()), name="surefoot-save", daemon=True
        )
        try:
            thread.start()
        # out of threads, or of memory for one: no thread would ever report that the copy is
        # complete
        except RuntimeError:
            self._staging.give_up()
            self._confirmed.set()
            return False
        self._thread = thread
        return True

    def _run(self, content: Content, started_s: float) -> None:
        try:
            files = {file: dict(tensors) for file, tensors in content.tensors.items()}
            copies = self._staging.copy()  # the next optimizer step waits for this copy
            # the write may take until the next save; if training waits for it, no other thread
            # competes
            yield_to_others(NICE)
            for key, copy in copies.items():
                file, _, name = key.partition("\n")
                files.setdefault(file, {})[name] = copy
            made = self._write(replace(content, tensors=files), self._is_confirmed)
            self._done = SaveResult(
                content.step, time.perf_counter() - started_s, self._waited_s, made
            )
        except SurefootError as error:
            self._done = SaveResult(
                content.step, time.perf_counter() - started_s, self._waited_s, error=error
            )
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            self._crash = error
        finally:
            # whatever ended the save, training must not wait for a copy that will never be
            # complete
            self._staging.give_up()

    def _is_confirmed(self) -> bool:
        self._confirmed.wait()
        if self._torn is not None:
            raise StorageError(
                f"{self._torn.replace(chr(10), ': ')} was changed while it was copied: "
                "set checkpoint.background = false",
                hint="or change weights only in the optimizer's step",
            )
        return True

    def before_update(self) -> None:
        """Wait until the copy of the state is complete; after that the state may change."""
        if self._thread is None or self._confirmed.is_set():
            return
        started_s = time.perf_counter()
        self._staging.wait()
        self._torn = self._staging.find_changed()
        self._waited_s = time.perf_counter() - started_s
        self._confirmed.set()

    def finish(self, *, wait: bool) -> SaveResult | None:
        """Return the result of the save in flight, once.

        Returns None if no save is in flight, or if it is still running and `wait` is False. An
        exception that is not a SurefootError is raised again.
        """
        if self._thread is None:
            return None
        if wait:
            self.before_update()
        elif self._thread.is_alive():
            return None
        started_s = time.perf_counter()
        self._thread.join()
        self._thread = None
        if self._crash is not None:
            raise self._crash
        done, blocked_s = self._done, time.perf_counter() - started_s
        return done if done is None else replace(done, waited_s=done.waited_s + blocked_s)

    def abandon(self) -> None:
        """Wait for a save in flight and discard its result."""
        if self._thread is not None:
            self.before_update()
            self._thread.join()
            self._thread = None
