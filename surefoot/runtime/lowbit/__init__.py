"""The door to torchao, which computes and keeps numbers in 8 bits: loaded where it is asked for, by nobody else."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from surefoot.core.errors import needing


@contextmanager
def torchao(needed_for: str) -> Iterator[None]:
    """Imports of torchao inside do not speak of kernels for other devices; without it they raise MissingExtra."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with needing("torchao", "torchao", extra="lowbit", needed_for=needed_for), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
