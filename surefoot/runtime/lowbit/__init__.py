"""Import of torchao, which stores and computes in 8 bits; loaded only when needed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from surefoot.core.errors import require_package


@contextmanager
def torchao(needed_for: str) -> Iterator[None]:
    """Return a context for imports of torchao that hides warnings about kernels of other devices.

    Raises MissingExtra, which names `needed_for`, if torchao is not installed.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            require_package("torchao", "torchao", extra="lowbit", needed_for=needed_for),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
