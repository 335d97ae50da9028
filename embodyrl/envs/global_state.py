"""Context managers for global state of the process: output, logs and warnings, and NumPy's generator."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def suppress_output() -> Iterator[None]:
    """Suppress output, logs and warnings of a simulator while it loads or resets."""
    previous_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)


@contextlib.contextmanager
def numpy_seed(seed: int | None) -> Iterator[None]:
    """Seed NumPy's global generator, which some simulators use, and restore it afterwards."""
    before = np.random.get_state()
    np.random.seed(None if seed is None else seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(before)
