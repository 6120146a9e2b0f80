"""An engine over several processes.

The first process takes the requests and broadcasts each call of its engine; the other processes repeat it.
"""

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

FIRST_BYTES = 512
"""Bytes of the first broadcast of a message. A longer message takes a second one. Four bytes are its size."""


class LeadingEngine(Engine):
    """The first process's engine. It broadcasts its calls before it makes them; the others receive them in `follow`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._in_call = False
        self._cancelled: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._requests: dict[int, Request] = {}

    def release(self) -> None:
        """End `follow` in the other processes."""
        _broadcast(pickle.dumps(None))

    @contextlib.contextmanager
    def _announced(self, name: str, *args: Any, **options: Any) -> Iterator[None]:
        """Broadcast a call to the other processes, unless it is made within another call."""
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
        """Return the requests, changed so that cancelling takes effect in the next step, in all processes."""
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

    def warm_up(self, *, constrained: bool = False, say: Callable[[str], None] = lambda line: None) -> None:
        with self._announced("warm_up", constrained=constrained):
            super().warm_up(constrained=constrained, say=say)

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
    """Repeat the calls of the first process's engine on this process's engine, until the first process calls `release`.

    constraint: returns the format of a grammar (`Grammars.format`); None: llguidance is not installed.
    """
    requests: dict[int, Request] = {}
    while (call := pickle.loads(_broadcast())) is not None:
        name, args, options = call
        if options.get("constraint") is not None:
            assert constraint is not None, "the first process has llguidance, this one does not"
            options["constraint"] = constraint(options["constraint"])
        if name == "step":
            _cancel(requests, *args)
            engine.step()
            continue
        # The first process raises the same error and handles it.
        with contextlib.suppress(Exception):
            if name == "stats":
                _ = engine.stats
            else:
                result = getattr(engine, name)(*args, **options)
                submitted = {"submit": result, "read_context": [result]}.get(name, [])
                requests |= {request.arrival: request for request in submitted}


def _cancel(requests: dict[int, Request], arrivals: list[int]) -> None:
    """Cancel the requests with these arrival numbers, and forget those that have ended."""
    for arrival in arrivals:
        if arrival in requests:
            requests[arrival].cancelled = True
    for arrival in [arrival for arrival, request in requests.items() if request.finish_reason is not None]:
        del requests[arrival]


def _broadcast(message: bytes = b"") -> bytes:
    """Return the first process's message, in all processes."""
    framed = np.frombuffer(len(message).to_bytes(4, "little") + message, np.uint8)
    first = multihost_utils.broadcast_one_to_all(np.resize(framed[:FIRST_BYTES], FIRST_BYTES))
    size = int.from_bytes(first[:4].tobytes(), "little")
    # Sizes are powers of two, so that few programs are compiled.
    padded_size = 1 << (size + 3).bit_length()
    if padded_size > FIRST_BYTES:
        padded = np.zeros(padded_size, np.uint8)
        padded[: framed.size] = framed
        first = multihost_utils.broadcast_one_to_all(padded)
    return first[4 : 4 + size].tobytes()
