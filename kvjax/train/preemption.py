"""Saving a run's state when its batch system sends SIGTERM, some time before the job ends."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

from kvjax.cli.launch import Termination


@contextlib.contextmanager
def preemption() -> Iterator[Callable[[int], bool]]:
    """Return a context in which a run finishes its step after SIGTERM. A second signal stops a run of one process at
    once.

    Its value is a function of a step that returns True if the run must save and stop after this step. All processes of
    a run must call it after each step: jax notifies all of them if one was signalled, and they stop after the same
    step.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    signalled = threading.Event()

    def on_signal(*_: object) -> None:
        if signalled.is_set():
            raise Termination
        signalled.set()

    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False
        return
    previous = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield lambda step: signalled.is_set()
    finally:
        signal.signal(signal.SIGTERM, previous)
