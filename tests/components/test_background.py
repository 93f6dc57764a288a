"""A save beside the training: whatever ends its thread, the training does not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from surefoot.components.checkpoint.background import Saver
from surefoot.components.checkpoint.save import Content
from surefoot.contract.manifest import Manifest
from surefoot.core.errors import StorageError
from surefoot.runtime.staging import Staging


class Refusing(Mapping[str, Any]):
    """Memory is refused as soon as somebody looks into it."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        raise MemoryError


def refuse_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError


def refuse_disk(*_: Any, **__: Any) -> Any:
    raise StorageError("the disk is full")


def within(do: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What `do` gives or raises; the test fails, and does not hang, where it gives nothing."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(do())
        except BaseException as error:  # noqa: BLE001 - handed on
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for a thread that has ended"
    return found[0]


@pytest.mark.parametrize(
    "where", ["before the copy", "in the copy", "after the copy", "in the write"]
)
def test_a_save_that_is_refused_memory_is_told_to_the_training_and_keeps_nobody_waiting(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "in the copy":
        monkeypatch.setattr(Staging, "_find_host_buffer", refuse_memory)
    if where == "after the copy":
        monkeypatch.setattr(
            "surefoot.components.checkpoint.background.yield_to_others", refuse_memory
        )
    saver = Saver(refuse_memory)
    tensors: Mapping[str, Any] = Refusing() if where == "before the copy" else {}
    assert saver.begin(Content(step=1, tensors=tensors), {"a": {"b": torch.ones(3)}})
    within(saver.before_update)
    assert isinstance(within(lambda: saver.finish(wait=True)), MemoryError)


def test_a_save_that_the_disk_refuses_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(refuse_disk)
    assert saver.begin(Content(step=1, tensors={}), {"a": {"b": torch.ones(3)}})
    within(saver.before_update)
    saved = within(lambda: saver.finish(wait=True))
    assert (saved.step, saved.manifest, str(saved.error)) == (1, None, "the disk is full")


def test_training_waits_for_a_save_in_the_foreground_that_fails() -> None:
    saved = Saver(refuse_disk).save_now(Content(step=1, tensors={}))
    assert str(saved.error) == "the disk is full"
    assert saved.waited_s == saved.elapsed_s > 0


def test_one_save_after_another_holds_what_was_copied() -> None:
    written: list[float] = []

    def write(content: Content, may_commit: Callable[[], bool]) -> Manifest:
        assert may_commit()
        written.append(float(content.tensors["a"]["b"].sum()))
        raise StorageError("looked at")

    saver, weights = Saver(write), torch.ones(3)
    for number in range(3):
        assert saver.begin(Content(step=number, tensors={}), {"a": {"b": weights}})
        within(saver.before_update)
        weights.add_(1.0)
        within(lambda: saver.finish(wait=True))
    assert written == [3.0, 6.0, 9.0]
