"""The thread that owns the engine. The rest of the server runs on one asyncio loop."""

import asyncio
import contextlib
import queue
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple, TypeVar

import jax

from kvjax.engine import Engine, Request
from kvjax.engine.request import FinishReason
from kvjax.inference.answers import AnswerLogprobs
from kvjax.serve.metrics import Metrics

T = TypeVar("T")


class Failed(Exception):
    """The engine has failed and answers no further requests."""

    def __init__(self, error: BaseException):
        super().__init__(f"the engine has failed: {error}")


class Update(NamedTuple):
    """The part of an answer that one step of the engine added."""

    text: str
    tokens: list[int]
    logprobs: list[AnswerLogprobs]
    finish_reason: FinishReason | None


class Answer:
    """A request as the asyncio loop sees it: a stream of updates until it ends."""

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop):
        self.request, self.arrived = request, time.monotonic()
        self._loop = loop
        self._updates: asyncio.Queue[Update | BaseException] = asyncio.Queue()
        # Only the worker uses this: the characters, tokens and logprobs that the loop has received.
        self._sent = (0, 0, 0)
        self.last: float | None = None
        """Time of its last token."""

    def send(self) -> int:
        """Send the loop the new part of the answer and return the number of its tokens. Only the worker calls this."""
        request, (text, tokens, parts) = self.request, self._sent
        self._sent = len(request.text), len(request.tokens), len(request.logprobs)
        if self._sent == (text, tokens, parts) and request.finish_reason is None:
            return 0
        update = Update(
            request.text[text:], request.tokens[tokens:], request.logprobs[parts:], request.finish_reason
        )
        self.put(update)
        return len(update.tokens)

    def put(self, update: Update | BaseException) -> None:
        """Send the loop an update, or an error that ends the answer."""
        self._loop.call_soon_threadsafe(self._updates.put_nowait, update)

    async def updates(self) -> AsyncGenerator[Update, None]:
        """Yield the updates. A caller that stops before the end cancels the request."""
        ended = False
        try:
            while not ended:
                update = await self._updates.get()
                if isinstance(update, BaseException):
                    ended = True
                    raise update
                ended = update.finish_reason is not None
                yield update
        finally:
            if not ended:
                self.request.cancel()


class Worker:
    """Runs an engine's steps in its own thread."""

    def __init__(self, engine: Engine, metrics: Metrics):
        self.engine, self._metrics = engine, metrics
        # With several processes, an idle engine must still broadcast before the other processes time out.
        self._timeout = None if jax.process_count() == 1 else 1.0
        self.ready = False
        """True once everything is compiled."""
        self.failure: BaseException | None = None
        """The error that ended the thread, if one did."""
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: list[Answer] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, prepare: Callable[[], None]) -> None:
        """Start the thread. It calls `prepare` first."""
        self._calls.put(prepare)
        self._calls.put(lambda: setattr(self, "ready", True))
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step. A thread that still compiles ends with the process."""
        self._calls.put(None)
        if self.ready:
            self._thread.join()

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Call a function of the engine in the worker's thread, and return its result or raise its error."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                if self.failure is not None:
                    raise Failed(self.failure)
                result = function(self.engine)
            except Exception as error:
                loop.call_soon_threadsafe(_resolve, future, None, error)
            else:
                loop.call_soon_threadsafe(_resolve, future, result, None)

        self._calls.put(run)
        if self.failure is not None:
            # The thread may have ended before it saw this call.
            raise Failed(self.failure)
        return await future

    async def submit(self, function: Callable[[Engine], list[Request]]) -> list[Answer]:
        """Return the answers to the requests that a function submits to the engine."""
        loop = asyncio.get_running_loop()

        def submitted(engine: Engine) -> list[Answer]:
            answers = [Answer(request, loop) for request in function(engine)]
            self._answers += answers
            return answers

        call = asyncio.ensure_future(self.call(submitted))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            for answer in await call:
                answer.request.cancel()
            raise

    def _run(self) -> None:
        try:
            while self._run_calls():
                if self.engine.busy:
                    self.engine.step()
                self._send()
        except BaseException as error:
            self.failure = error
            traceback.print_exc()
            for answer in self._answers:
                answer.put(Failed(error))
            with contextlib.suppress(queue.Empty):
                while True:
                    call = self._calls.get(block=False)
                    if call is not None:
                        call()

    def _run_calls(self) -> bool:
        """Run the queued calls, and wait for one while the engine is idle. Returns False if the thread must end."""
        while True:
            try:
                call = self._calls.get(block=not self.engine.busy, timeout=self._timeout)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()

    def _send(self) -> None:
        """Send the new part of every answer, and forget those that ended."""
        now = time.monotonic()
        for answer in self._answers:
            if (new := answer.send()) > 0:
                self._metrics.count_tokens(
                    answer.request, new, now - answer.arrived, now - (answer.last or now)
                )
                answer.last = now
            if answer.request.finish_reason is not None:
                self._metrics.count_end(answer.request, now - answer.arrived)
        self._answers = [answer for answer in self._answers if answer.request.finish_reason is None]
        # This comes last because it may wait for the devices.
        self._metrics.update(self.engine.stats)


def _resolve(future: asyncio.Future, value: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
