"""Check whether reading samples draws from random streams that loader workers do not share."""

from __future__ import annotations

from surefoot.components.data import Keys
from surefoot.components.data.loader import Reader, read_sound
from surefoot.components.data.sources.batch_digest import digest_of
from surefoot.train.assemble import Assembly
from surefoot.train.preflight.samples import NUM_SAMPLES
from surefoot.train.quiet import read_streams, untouched


def check(assembly: Assembly) -> list[str]:
    """Return warnings on random draws of the dataset, from its generator or global streams."""
    return [*_check_own(assembly), *_check_shared(assembly)]


def _check_own(assembly: Assembly) -> list[str]:
    """Read the same samples twice under the same random states; return a warning if they differ.

    A difference means that the dataset uses a separate generator, reads the clock or changes its
    samples.
    """
    source, seed = assembly.feed.source, assembly.spec.train.seed
    if getattr(source, "thread_safe", False) or source.guarantee != "proven":
        return []
    window = assembly.feed.window(0)
    reader = Reader(source, None, seed, skips=assembly.spec.data.on_bad == "skip")
    digests = []
    for _ in range(2):
        with untouched(assembly.model, assembly.task.state):
            digests.append(digest_of(reader(window.epoch, window.ids[:NUM_SAMPLES]).batch))
    if digests[0] == digests[1]:
        return []
    what = f"the same samples read twice have other values ({source.describe()})"
    why = (
        "it draws from a generator of its own, reads the clock, or changes its samples in place, "
        "so a resumed run, other workers and other ranks read other values"
    )
    return [
        (
            f"{what}: {why}; what it draws from the global streams "
            "of torch, NumPy or Python is the same again"
        )
    ]


def _check_shared(assembly: Assembly) -> list[str]:
    """Return a warning if reading draws from the global random streams and loader workers are used.

    Workers do not share these streams. A source that is not thread safe and is read by worker
    processes is exempt, because its streams are set before each microbatch.
    """
    loader, source, augment = assembly.spec.loader, assembly.feed.source, assembly.task.augment
    if not loader.workers or not (getattr(source, "thread_safe", False) or loader.kind == "thread"):
        return []
    window = assembly.feed.window(0)
    ids = window.ids[:NUM_SAMPLES]
    with untouched(assembly.model, assembly.task.state):
        before = read_streams()
        read = read_sound(source, ids)
        # else the run does it, and no worker
        if augment is not None and assembly.engine.device.type == "cpu":
            augment(read.whole, Keys(assembly.spec.train.seed, window.epoch, read.kept(ids)))
        if read_streams() == before:
            return []
    what = (
        "what is read draws from the streams of torch, numpy or Python: with loader.workers = "
        f"{loader.workers!r} it draws other "
    )
    return [
        (
            f"{what}numbers than without, in threads others each "
            "time; the keys of augment draw the same everywhere"
        )
    ]
