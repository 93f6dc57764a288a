"""Check whether reading samples draws from random streams that loader workers do not share."""

from __future__ import annotations

from surefoot.components.data.loader.bad import read_sound
from surefoot.components.data.loader.jobs import Reader
from surefoot.components.data.order import Keys
from surefoot.components.data.sources.batch_digest import digest_of
from surefoot.train.assemble import Assembly
from surefoot.train.preflight.samples import NUM_SAMPLES
from surefoot.train.quiet import preserve_state, read_streams


def check(assembly: Assembly) -> list[str]:
    """Return warnings about random draws while samples are read.

    The draws may come from a generator of the dataset or from the global generators.
    """
    return [*_check_own(assembly), *_check_shared(assembly)]


def _check_own(assembly: Assembly) -> list[str]:
    """Read the same samples twice from the same random state; return a warning if they differ.

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
        with preserve_state(assembly.model, assembly.task.state):
            digests.append(digest_of(reader(window.epoch, window.ids[:NUM_SAMPLES]).batch))
    if digests[0] == digests[1]:
        return []
    what = f"two reads of the same samples return different values ({source.describe()})"
    why = (
        "the source uses a separate random generator, reads the clock, or changes "
        "its samples in place, so a resumed run, other workers and other ranks "
        "read different values"
    )
    return [
        (
            f"{what}: {why}; random numbers from the global generators of torch, "
            "NumPy or Python are reproduced"
        )
    ]


def _check_shared(assembly: Assembly) -> list[str]:
    """Return a warning if loader workers read samples that draw from the global random generators.

    Workers do not share these generators. A source that is not thread safe and is read by worker
    processes is exempt, because its generators are seeded before each microbatch.
    """
    loader, source, augment = assembly.spec.loader, assembly.feed.source, assembly.task.augment
    if not loader.workers or not (getattr(source, "thread_safe", False) or loader.kind == "thread"):
        return []
    window = assembly.feed.window(0)
    ids = window.ids[:NUM_SAMPLES]
    with preserve_state(assembly.model, assembly.task.state):
        before = read_streams()
        read = read_sound(source, ids)
        # on other devices the main process augments, not a worker
        if augment is not None and assembly.engine.device.type == "cpu":
            augment(
                read.whole, Keys(assembly.spec.train.seed, window.epoch, read.readable_ids(ids))
            )
        if read_streams() == before:
            return []
    what = (
        "reading uses the global random generators of torch, NumPy or Python: with "
        f"loader.workers = {loader.workers!r} the random "
    )
    return [
        (
            f"{what}numbers differ from those without workers, and with threads in "
            "each run; the keys of augment give the same numbers everywhere"
        )
    ]
