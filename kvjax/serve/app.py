"""The HTTP routes of the server. They run on one asyncio loop; `Worker` runs the engine in its own thread."""

import asyncio
import contextlib
import hmac
import json
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvjax.engine import Constraint, Engine, Request
from kvjax.errors import UserError, check_unicode, shown
from kvjax.models.chat import token_rows
from kvjax.serve.answer_parser import AnswerParser
from kvjax.serve.body import DROP, CompletionRequest, read_chat, read_completion, read_message
from kvjax.serve.metrics import Metrics
from kvjax.serve.prompts import chat_prompt, text_prompt
from kvjax.serve.reply import ChatChoice, Choice, Reply, event, usage
from kvjax.serve.worker import Answer, Failed, Update, Worker

LARGEST_BODY = 8 << 20
"""The most bytes of a request's body."""
EXPECTED_ANSWER = 512
"""Expected tokens of an answer whose request sets no maximum."""
STALL_SECONDS = 60
"""Seconds after which a client that does not read its stream counts as disconnected."""
Handler = Callable[[HTTPRequest], Awaitable[Response]]


class Refused(Exception):
    """An error that is sent to the client as the reply to its request."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", **headers: str):
        super().__init__(message)
        self.status, self.kind = status, kind
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Server:
    """The application.

    Args:
        engine: the engine. From the start of the application on, only the worker's thread calls it.
        tokenizer: the model's tokenizer.
        name: the model's name in requests.
        queue: the most requests that wait for a slot. Further ones are refused with 429.
        sampling: sampling fields of requests that name none, as `recommended_sampling` returns them.
        key: the API key that requests must bring; None: requests need no key.
        grammar: makes the constraint of a JSON schema; None: requests with a schema are refused.
        say: takes a line about each step until requests are answered.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        name: str,
        *,
        queue: int,
        sampling: Mapping[str, Any] | None = None,
        key: str | None = None,
        grammar: Callable[[Any], Callable[[], Constraint]] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ):
        self._say = say
        self._tokenizer, self._name, self._key, self._grammar = tokenizer, name, key, grammar
        self._sampling = sampling or {}
        self._max_answers = engine.slots + queue
        self._vocabulary = engine.vocabulary
        self._model = {"id": name, "object": "model", "owned_by": "kvjax", "max_model_len": engine.max_length}
        self._metrics = Metrics()
        self.worker = Worker(engine, self._metrics)
        self._open_answers = 0
        routes = [
            ("/v1/chat/completions", self.chat, "POST"),
            ("/v1/completions", self.completion, "POST"),
            ("/v1/models", self.models, "GET"),
            ("/v1/models/{name:path}", self.model, "GET"),
            ("/v1/contexts", self.contexts, "GET"),
            ("/v1/contexts", self.read_context, "POST"),
            ("/v1/contexts/{name:path}", self.drop_context, "DELETE"),
            ("/health", self.health, "GET"),
            ("/metrics", self.metrics, "GET"),
        ]
        self.app = Starlette(
            routes=[
                Route(path, self._with_errors(handler, path.startswith("/v1/")), methods=[method])
                for path, handler, method in routes
            ],
            exception_handlers={HTTPException: _unknown_route},
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        def prepare() -> None:
            started = time.monotonic()
            self.worker.engine.warm_up(constrained=self._grammar is not None, say=self._say)
            self._say(f"Ready after {time.monotonic() - started:.0f} s")

        self.worker.start(prepare)
        yield
        await run_in_threadpool(self.worker.stop)

    # ---- routes

    async def chat(self, http: HTTPRequest) -> Response:
        """Answer a chat completion."""
        completion = read_chat(await self._body(http), self._sampling)
        with self._admitted(completion.n) as admission:
            tokens, thinking, options = await run_in_threadpool(chat_prompt, self._tokenizer, completion)
            answers = await self._submit(completion, [tokens], **options)
            tools = completion.tools
            names, max_calls = (None, None) if tools is None else (tools.names, None if tools.parallel else 1)
            thinking = thinking and completion.schema is None
            choices = [
                ChatChoice(index, answer, self._tokenizer, AnswerParser(names, thinking=thinking), max_calls)
                for index, answer in enumerate(answers)
            ]
            return await self._reply(
                http, Reply("chat.completion", self._name), completion, choices, admission
            )

    async def completion(self, http: HTTPRequest) -> Response:
        """Answer a completion of prompts."""
        completion = read_completion(await self._body(http), self._sampling)
        with self._admitted(completion.n * len(completion.prompts)) as admission:
            rows = await run_in_threadpool(
                lambda: [text_prompt(self._tokenizer, prompt, completion) for prompt in completion.prompts]
            )
            answers = await self._submit(completion, rows)
            choices = [
                Choice(index, answer, self._tokenizer, echo=completion.echo, max_tokens=completion.max_tokens)
                for index, answer in enumerate(answers)
            ]
            return await self._reply(
                http, Reply("text_completion", self._name), completion, choices, admission
            )

    async def models(self, _: HTTPRequest) -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [self._model]})

    async def model(self, http: HTTPRequest) -> Response:
        """Describe the one model."""
        self._check_name(http.path_params["name"])
        return JSONResponse(self._model)

    async def read_context(self, http: HTTPRequest) -> Response:
        """Read a context and keep it under a name."""
        body = await self._body(http)
        if not isinstance(body, dict) or not isinstance(name := body.get("name"), str) or not name:
            raise UserError('expected {"name": …, "prompt": …} or {"name": …, "messages": […]}')
        if unknown := body.keys() - {"name", "prompt", "messages", "model"}:
            raise UserError(f"Unrecognized request argument supplied: {min(unknown)}")
        check_unicode(name)
        prompt, messages = body.get("prompt"), body.get("messages")
        if (prompt is None) == (messages is None):
            raise UserError("a context needs either prompt or messages")
        if isinstance(messages, list):
            prompt = [read_message(message) for message in messages]
            if any(message.pop(DROP, False) for message in prompt):
                raise UserError("a context cannot drop messages: leave them out")
        with self._admitted(1):
            (tokens,) = await run_in_threadpool(
                token_rows, [prompt], self._vocabulary, self._tokenizer, "beginning"
            )
            answers = await self.worker.submit(lambda engine: [engine.read_context(name, tokens)])
            await self._unless_disconnected(http, self._wait_until_read(answers[0]))
        return JSONResponse(_context(name, len(tokens)))

    async def contexts(self, _: HTTPRequest) -> Response:
        """List the contexts."""
        contexts = await self.worker.call(lambda engine: engine.contexts)
        return JSONResponse({"object": "list", "data": [_context(*item) for item in contexts.items()]})

    async def drop_context(self, http: HTTPRequest) -> Response:
        """Free the pages of a context."""
        name = http.path_params["name"]

        def forget(engine: Engine) -> None:
            engine.forget(name)
            # There may be no later turn that updates the metrics.
            self._metrics.update(engine.stats)

        await self.worker.call(forget)
        return JSONResponse({"name": name, "object": "context", "deleted": True})

    async def health(self, _: HTTPRequest) -> Response:
        """Return 200 if requests are answered, else 503."""
        healthy = self.worker.ready and self.worker.failure is None
        return JSONResponse({"status": "ok" if healthy else "not ready"}, 200 if healthy else 503)

    async def metrics(self, _: HTTPRequest) -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    # ---- requests

    def _with_errors(self, handler: Handler, checked: bool) -> Handler:
        """Return a handler that replies to errors as OpenAI's API does.

        checked: True if requests need the API key and an engine that is ready.
        """

        async def route(http: HTTPRequest) -> Response:
            try:
                if checked:
                    self._check_access(http)
                return await handler(http)
            except UserError as error:
                reply = Refused(400, str(error))
            except Refused as error:
                reply = error
            except Failed as error:
                reply = Refused(500, str(error), "server_error")
            except Exception as error:
                traceback.print_exc()
                reply = Refused(500, f"{type(error).__name__} in the server", "server_error")
            return JSONResponse(_error(str(reply), reply.kind), reply.status, reply.headers)

        return route

    def _check_access(self, http: HTTPRequest) -> None:
        if self._key is not None:
            scheme, _, key = http.headers.get("authorization", "").partition(" ")
            # Starlette decodes headers as latin-1.
            matches = hmac.compare_digest(key.strip().encode("latin-1"), self._key.encode())
            if not matches or scheme.lower() != "bearer":
                raise Refused(401, "Incorrect API key provided", "authentication_error")
        if self.worker.failure is not None:
            raise Failed(self.worker.failure)
        if not self.worker.ready:
            raise Refused(503, "the model is being compiled", "server_error", Retry_After="10")

    def _check_name(self, name: Any) -> None:
        if name != self._name:
            raise Refused(404, f"The model {shown(name)} does not exist: this is {self._name}")

    async def _body(self, http: HTTPRequest) -> Any:
        """Return the JSON body of a request. Refuses a body that names another model."""
        if self._open_answers >= self._max_answers:
            # Refuse before reading the body.
            self._refuse_full()
        parts, size = [], 0
        async for part in http.stream():
            parts.append(part)
            if (size := size + len(part)) > LARGEST_BODY:
                raise Refused(413, f"the body has more than {LARGEST_BODY:,} bytes")
        try:
            body = json.loads(b"".join(parts))
        except (ValueError, RecursionError):
            raise UserError("the body must be JSON") from None
        if isinstance(body, dict) and body.get("model") is not None:
            self._check_name(body["model"])
        return body

    def _refuse_full(self) -> None:
        self._metrics.refused.inc()
        raise Refused(
            429, f"{self._max_answers} requests run or wait already", "rate_limit_error", Retry_After="1"
        )

    @contextlib.contextmanager
    def _admitted(self, answers: int) -> Iterator[contextlib.ExitStack]:
        """Count answers as open until the returned stack closes. `pop_all` hands this on to a later owner."""
        if answers > self._max_answers:
            raise UserError(f"{answers} answers are more than the {self._max_answers} that may run or wait")
        if self._open_answers + answers > self._max_answers:
            self._refuse_full()

        def release() -> None:
            self._open_answers -= answers

        self._open_answers += answers
        with contextlib.ExitStack() as stack:
            stack.callback(release)
            yield stack

    async def _submit(
        self, completion: CompletionRequest, prompts: list[list[int]], **more: Any
    ) -> list[Answer]:
        """Submit all prompts and return their answers, the n answers of a prompt one after another.

        more: further options of `Engine.submit`.
        """
        constraint = None
        if completion.schema is not None:
            if self._grammar is None:
                raise UserError(
                    "answers with a format need llguidance on the server: pip install kvjax[serve]"
                )
            constraint = await run_in_threadpool(self._grammar, completion.schema)

        def submit(engine: Engine) -> list[Request]:
            requests: list[Request] = []
            options = {
                "context": completion.context,
                "constraint": constraint,
                "score": completion.score_prompt,
            } | more
            try:
                for prompt in prompts:
                    max_tokens = (
                        engine.longest_answer(len(prompt), completion.context)
                        if completion.max_tokens is None
                        else completion.max_tokens
                    )
                    sampling = completion.sampling(max(1, max_tokens))
                    expected = EXPECTED_ANSWER if completion.max_tokens is None else None
                    for _ in range(completion.n // sampling.n):
                        requests += engine.submit(prompt, sampling, expected=expected, **options)
            except Exception:
                for request in requests:
                    request.cancel()
                raise
            return requests

        return await self.worker.submit(submit)

    # ---- replies

    async def _reply(
        self,
        http: HTTPRequest,
        reply: Reply,
        completion: CompletionRequest,
        choices: list[Any],
        admission: contextlib.ExitStack,
    ) -> Response:
        if completion.stream:
            return _EventStream(self._events(reply, completion, choices), choices, admission.pop_all())
        try:
            pieces = await self._unless_disconnected(http, asyncio.gather(*map(self._all_pieces, choices)))
        finally:
            for choice in choices:
                choice.answer.request.cancel()
        wholes = [choice.whole(parts) for choice, parts in zip(choices, pieces, strict=True)]
        requests = [choice.answer.request for choice in choices]
        return JSONResponse(
            reply.whole(wholes, usage(requests, completion.n, answered=completion.max_tokens != 0))
        )

    async def _all_pieces(self, choice: Choice) -> list[dict[str, Any]]:
        """Wait for the end of an answer and return all its pieces."""
        pieces = []
        async with contextlib.aclosing(choice.answer.updates()) as updates:
            async for update in updates:
                _check_ended(choice.answer.request, update)
                pieces += choice.pieces(update)
        return pieces

    async def _wait_until_read(self, answer: Answer) -> None:
        """Wait until a context has been read."""
        async with contextlib.aclosing(answer.updates()) as updates:
            async for update in updates:
                if update.finish_reason == "capacity":
                    raise UserError("the pool has no pages for this context")

    async def _events(
        self, reply: Reply, completion: CompletionRequest, choices: list[Any]
    ) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        # OpenAI's API sends the usage in the last event and null before it.
        null_usage = {"usage": None} if completion.include_usage else {}
        if isinstance(choices[0], ChatChoice):
            delta = {"role": "assistant", "content": ""}
            for choice in choices:
                yield reply.event(
                    [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}],
                    **null_usage,
                )
        pieces: asyncio.Queue[Any] = asyncio.Queue()

        def so_far() -> dict[str, Any]:
            return usage([choice.answer.request for choice in choices], completion.n)

        async def forward(choice: Choice) -> None:
            try:
                async for update in choice.answer.updates():
                    _check_ended(choice.answer.request, update)
                    await pieces.put(choice.pieces(update))
                await pieces.put(None)
            except Exception as error:
                await pieces.put(error)

        running, tasks = len(choices), [asyncio.ensure_future(forward(choice)) for choice in choices]
        try:
            while running:
                piece = await pieces.get()
                if isinstance(piece, Exception):
                    kind = piece.kind if isinstance(piece, Refused) else "server_error"
                    yield event(_error(str(piece), kind))
                    break
                running -= piece is None
                for part in piece or ():
                    yield reply.event(
                        [part], **({"usage": so_far()} if completion.continuous_usage else null_usage)
                    )
        finally:
            for task in tasks:
                task.cancel()
        if completion.include_usage and not running:
            yield reply.event([], usage=so_far())
        yield "data: [DONE]\n\n"

    async def _unless_disconnected(self, http: HTTPRequest, work: Awaitable[Any]) -> Any:
        """Return the result of the work. If the client disconnects first, cancel the work and raise Refused."""

        async def disconnected() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass

        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Refused(499, "the client disconnected")
            return working.result()
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)


class _EventStream(StreamingResponse):
    """A stream of events. When it ends, for whatever reason, its answers are cancelled."""

    def __init__(self, events: AsyncIterator[str], choices: list[Choice], admission: contextlib.ExitStack):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._choices, self._admission = choices, admission

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the events."""

        async def send_in_time(message: Any) -> None:
            # A client that does not read must not delay the server's shutdown.
            await asyncio.wait_for(send(message), STALL_SECONDS)

        try:
            await super().__call__(scope, receive, send_in_time)
        finally:
            for choice in self._choices:
                choice.answer.request.cancel()
            self._admission.close()


async def _unknown_route(http: HTTPRequest, error: Exception) -> Response:
    """Reply to an unknown path or method."""
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path}: {error.detail}"
    return JSONResponse(_error(message, "invalid_request_error"), error.status_code, error.headers)


def _check_ended(request: Request, update: Update) -> None:
    """Raise Refused if an answer ended because its context was dropped or its format cannot be followed."""
    if update.finish_reason == "abort":
        raise Refused(409, "the context of this request was dropped")
    if update.finish_reason is not None and request.constraint is not None and request.constraint.error:
        raise Refused(400, f"the answer's format cannot be followed: {request.constraint.error}")


def _context(name: str, tokens: int) -> dict[str, Any]:
    return {"name": name, "object": "context", "tokens": tokens}


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
