"""Lets a run save its state when its batch system sends SIGTERM, some time before it ends the job."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

from kvjax.cli.launch import Termination


@contextlib.contextmanager
def preemption() -> Iterator[Callable[[int], bool]]:
    """Return a context in which SIGTERM lets the run end its step; with one process, a second signal stops it at once.

    Its value is a function of a step, which returns True if the run is to save and stop after it. All processes of a
    run must call it after each step: jax tells all of them that one was signalled, and they stop after the same step.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    told = threading.Event()

    def note(*_: object) -> None:
        if told.is_set():
            raise Termination
        told.set()

    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False
        return
    before = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda step: told.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


__all__ = ["preemption"]
