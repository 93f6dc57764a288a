"""Background saving of checkpoints.

A background thread copies the state to host memory during the next step, and writes the copy to
disk while training continues. At most one save runs at a time. The caller must call
`Saver.before_update` before a tensor of the state changes. That call waits until the copy is
complete, but not until it is written.
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

    `elapsed_s` is the duration of the save in seconds. `waited_s` is the part of it during which
    training was blocked.
    """

    step: int
    elapsed_s: float
    waited_s: float
    manifest: Manifest | None = None
    error: SurefootError | None = None


class Saver:
    """Writer of checkpoints, in a background thread or synchronously.

    Args:
        write: Function of (content, may_commit) that writes a checkpoint and returns its manifest.
            It must call `may_commit` before it makes the checkpoint visible: `may_commit` returns
            True once the copy is known to be consistent, and raises StorageError if a tensor
            changed while it was copied.
    """

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
        """Save `content` synchronously, without a copy; its tensors must not change meanwhile.

        A SurefootError is returned in the result, not raised.
        """
        started_s = time.perf_counter()
        try:
            made = self._write(content, lambda: True)
        except SurefootError as error:
            elapsed_s = time.perf_counter() - started_s
            return SaveResult(content.step, elapsed_s, elapsed_s, error=error)
        elapsed_s = time.perf_counter() - started_s
        return SaveResult(content.step, elapsed_s, elapsed_s, made)

    def begin(self, content: Content, moving: Mapping[str, Mapping[str, Tensor]]) -> bool:
        """Start a background save of `content`, together with the tensors in `moving`.

        Returns False, without saving, if the system cannot start a thread. The result of the
        previous save must have been returned by `finish` before.

        Args:
            content: State that does not change any more; it is written without a copy.
            moving: Tensors that training may change, by file and tensor name. They are copied
                before `before_update` returns.
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
        """Wait until the background save has copied the state; after that the state may change.

        Returns at once if no save is running.
        """
        if self._thread is None or self._confirmed.is_set():
            return
        started_s = time.perf_counter()
        self._staging.wait()
        self._torn = self._staging.find_changed()
        self._waited_s = time.perf_counter() - started_s
        self._confirmed.set()

    def finish(self, *, wait: bool) -> SaveResult | None:
        """Return the result of the background save, once.

        Returns None if no save was started, or if the save still runs and `wait` is False. An
        exception of the save that is not a SurefootError is raised here.
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
        """Wait for a running background save to end, and discard its result.

        The checkpoint that the save has written is not deleted.
        """
        if self._thread is not None:
            self.before_update()
            self._thread.join()
            self._thread = None
