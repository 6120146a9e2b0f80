"""An engine over several processes: the first one's takes the requests, and the others' follow it call by call."""

import contextlib
import functools
import pickle
import queue
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from kvjax.engine import Constraint, Engine, Request
from kvjax.engine.engine import EngineStats

BLOCK = 512
"""Bytes that are sent at once. The first four of a message are its size."""


class LeadingEngine(Engine):
    """The first process's engine, whose calls the others hear of before they are made (`follow`)."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._in_call = False
        self._cancelled: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._requests: dict[int, Request] = {}

    def release(self) -> None:
        """Let the others end."""
        _broadcast(pickle.dumps(None))

    @contextlib.contextmanager
    def _announced(self, name: str, *args: Any, **options: Any) -> Iterator[None]:
        """Tell the others of a call, unless it is made within another one."""
        if self._in_call:
            yield
            return
        _broadcast(pickle.dumps((name, args, options)))
        self._in_call = True
        try:
            yield
        finally:
            self._in_call = False

    def _tracked(self, requests: list[Request]) -> list[Request]:
        """Return requests whose cancelling waits for the next turn, where all processes do it."""
        for request in requests:
            self._requests[request.arrival] = request
            request.cancel = functools.partial(self._cancelled.put, request.arrival)
        return requests

    def submit(
        self, prompt: Any, *args: Any, constraint: Callable[[], Constraint] | None = None, **options: Any
    ) -> list[Request]:
        grammar = getattr(constraint, "grammar", None)
        with self._announced("submit", prompt, *args, constraint=grammar, **options):
            return self._tracked(super().submit(prompt, *args, constraint=constraint, **options))

    def read_context(self, name: str, prompt: Any) -> Request:
        with self._announced("read_context", name, prompt):
            return self._tracked([super().read_context(name, prompt)])[0]

    def forget(self, context: str | None = None) -> None:
        with self._announced("forget", context):
            super().forget(context)

    def longest_answer(self, prompt: int, context: str | None = None) -> int:
        with self._announced("longest_answer", prompt, context):
            return super().longest_answer(prompt, context)

    def warm_up(self, *, constrained: bool = False) -> None:
        with self._announced("warm_up", constrained=constrained):
            super().warm_up(constrained=constrained)

    @property
    def stats(self) -> EngineStats:
        with self._announced("stats"):
            return super().stats

    def step(self) -> None:
        cancelled = []
        with contextlib.suppress(queue.Empty):
            while not self._in_call:
                cancelled.append(self._cancelled.get(block=False))
        with self._announced("step", cancelled):
            _cancel(self._requests, cancelled)
            super().step()


def follow(engine: Engine, constraint: Callable[[str], Callable[[], Constraint]] | None) -> None:
    """Make the calls of the first process's engine with an engine of this process, until the first releases it.

    constraint: returns the format (`Grammars.format`) of a grammar.
    """
    requests: dict[int, Request] = {}
    while (call := pickle.loads(_broadcast())) is not None:
        name, args, options = call
        if options.get("constraint") is not None:
            assert constraint is not None, (
                "llguidance is installed where the first process runs, and not here"
            )
            options["constraint"] = constraint(options["constraint"])
        if name == "step":
            _cancel(requests, *args)
            engine.step()
            continue
        # the first process has the same error, and answers it
        with contextlib.suppress(Exception):
            if name == "stats":
                _ = engine.stats
            else:
                found = getattr(engine, name)(*args, **options)
                made = {"submit": found, "read_context": [found]}.get(name, [])
                requests |= {request.arrival: request for request in made}


def _cancel(requests: dict[int, Request], arrivals: list[int]) -> None:
    """Cancel requests, and forget those that have ended."""
    for arrival in arrivals:
        if arrival in requests:
            requests[arrival].cancelled = True
    for arrival in [arrival for arrival, request in requests.items() if request.finish_reason is not None]:
        del requests[arrival]


def _broadcast(message: bytes = b"") -> bytes:
    """Return the first process's message in all processes."""
    framed = np.frombuffer(len(message).to_bytes(4, "little") + message, np.uint8)
    first = multihost_utils.broadcast_one_to_all(np.resize(framed[:BLOCK], BLOCK))
    size = int.from_bytes(first[:4].tobytes(), "little")
    # powers of two, so that few programs are compiled
    whole = 1 << (size + 3).bit_length()
    if whole > BLOCK:
        padded = np.zeros(whole, np.uint8)
        padded[: framed.size] = framed
        first = multihost_utils.broadcast_one_to_all(padded)
    return first[4 : 4 + size].tobytes()


__all__ = ["LeadingEngine", "follow"]
