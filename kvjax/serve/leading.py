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
from kvjax.errors import UserError

BLOCK = 512
"""Bytes that are sent at once. The first four of a message are its size."""


class LeadingEngine(Engine):
    """The first process's engine, whose calls the others hear of before they are made (`follow`)."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._heard = False
        self._cancelled: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._asked: dict[int, Request] = {}

    def release(self) -> None:
        """Let the others end."""
        _broadcast(pickle.dumps(None))

    @contextlib.contextmanager
    def _said(self, name: str, *args: Any, **options: Any) -> Iterator[None]:
        """Tell the others of a call, unless it is made within another one."""
        if self._heard:
            yield
            return
        _broadcast(pickle.dumps((name, args, options)))
        self._heard = True
        try:
            yield
        finally:
            self._heard = False

    def _followed(self, requests: list[Request]) -> list[Request]:
        """Return requests whose cancelling waits for the next turn, where all processes do it."""
        for request in requests:
            self._asked[request.arrival] = request
            request.cancel = functools.partial(self._cancelled.put, request.arrival)
        return requests

    def submit(
        self, prompt: Any, *args: Any, constraint: Callable[[], Constraint] | None = None, **options: Any
    ) -> list[Request]:
        grammar = getattr(constraint, "grammar", None)
        with self._said("submit", prompt, *args, constraint=grammar, **options):
            return self._followed(super().submit(prompt, *args, constraint=constraint, **options))

    def read_context(self, name: str, prompt: Any) -> Request:
        with self._said("read_context", name, prompt):
            return self._followed([super().read_context(name, prompt)])[0]

    def forget(self, context: str | None = None) -> None:
        with self._said("forget", context):
            super().forget(context)

    def longest_answer(self, prompt: int, context: str | None = None) -> int:
        with self._said("longest_answer", prompt, context):
            return super().longest_answer(prompt, context)

    def warm_up(self, *, constrained: bool = False) -> None:
        with self._said("warm_up", constrained=constrained):
            super().warm_up(constrained=constrained)

    @property
    def stats(self) -> EngineStats:
        with self._said("stats"):
            return super().stats

    def step(self) -> None:
        gone = []
        with contextlib.suppress(queue.Empty):
            while not self._heard:
                gone.append(self._cancelled.get(block=False))
        with self._said("step", gone):
            _cancel(self._asked, gone)
            super().step()


def follow(engine: Engine, constraint: Callable[[str], Callable[[], Constraint]] | None) -> None:
    """Do with an engine what the first process does with its own, until that releases this one.

    constraint: makes the maker of constraints to a grammar.
    """
    asked: dict[int, Request] = {}
    while (call := pickle.loads(_broadcast())) is not None:
        name, args, options = call
        if options.get("constraint") is not None:
            assert constraint is not None
            options["constraint"] = constraint(options["constraint"])
        # what is refused here was refused there
        with contextlib.suppress(UserError):
            if name == "stats":
                _ = engine.stats
            elif name == "step":
                _cancel(asked, *args)
                engine.step()
            else:
                found = getattr(engine, name)(*args, **options)
                requests = {"submit": found, "read_context": [found]}.get(name, [])
                asked |= {request.arrival: request for request in requests}


def _cancel(asked: dict[int, Request], arrivals: list[int]) -> None:
    """Cancel requests, and forget those that have ended."""
    for arrival in arrivals:
        if arrival in asked:
            asked[arrival].cancelled = True
    for arrival in [arrival for arrival, request in asked.items() if request.finish_reason is not None]:
        del asked[arrival]


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
