"""The routes of the server. Everything here runs on one asyncio loop; `Worker` runs the engine."""

import asyncio
import contextlib
import functools
import hmac
import json
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as Call
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvjax.chat_template import around, keeps_turns, templated, token_ids
from kvjax.engine import Constraint, Engine, Request
from kvjax.errors import UserError, check_unicode, shown
from kvjax.models.chat import content_span, encode, stable_prefix_length, token_rows
from kvjax.serve.answer_parser import AnswerParser
from kvjax.serve.body import DROP, Asked, read_chat, read_completion, read_message
from kvjax.serve.metrics import Metrics
from kvjax.serve.reply import ChatChoice, Choice, Reply, event, usage
from kvjax.serve.worker import Answer, Failed, Update, Worker

LARGEST_BODY = 8 << 20
"""Bytes of a request's body."""
ANSWER = 512
"""Tokens that an answer is expected to have where the request does not say how many it may have."""
STALLED = 60
"""Seconds after which a client that reads nothing of its stream is one that went away."""
Handler = Callable[[Call], Awaitable[Response]]


class Refused(Exception):
    """A request that gets an error as its reply."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", **headers: str):
        super().__init__(message)
        self.status, self.kind = status, kind
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Server:
    """The application.

    Args:
        engine: what answers. A thread that this object starts owns it from then on.
        tokenizer: the model's.
        name: of the model, by which requests name it.
        queue: requests that wait beside those in slots. More are refused with 429.
        key: the API key that requests must bring; None: none.
        grammar: makes constraints to JSON schemas; None: answers cannot have formats.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        name: str,
        *,
        queue: int,
        key: str | None = None,
        grammar: Callable[[Any], Callable[[], Constraint]] | None = None,
    ):
        self._tokenizer, self._name, self._key, self._grammar = tokenizer, name, key, grammar
        self._most = engine.slots + queue
        self._vocabulary = engine.vocabulary
        self._model = {"id": name, "object": "model", "owned_by": "kvjax", "max_model_len": engine.max_length}
        self._metrics = Metrics()
        self.worker = Worker(engine, self._metrics)
        self._open = 0
        routes = [
            ("/v1/chat/completions", self.chat, "POST"),
            ("/v1/completions", self.completion, "POST"),
            ("/v1/models", self.models, "GET"),
            ("/v1/models/{name:path}", self.model, "GET"),
            ("/v1/contexts", self.read_context, "POST"),
            ("/v1/contexts/{name:path}", self.drop_context, "DELETE"),
            ("/health", self.health, "GET"),
            ("/metrics", self.metrics, "GET"),
        ]
        self.app = Starlette(
            routes=[
                Route(path, self._answering(handler, path.startswith("/v1/")), methods=[method])
                for path, handler, method in routes
            ],
            exception_handlers={HTTPException: _unknown},
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        engine, constrained = self.worker.engine, self._grammar is not None
        self.worker.start(functools.partial(engine.warm_up, constrained=constrained))
        yield
        await run_in_threadpool(self.worker.stop)

    # ---- routes

    async def chat(self, call: Call) -> Response:
        """Answer a chat."""
        body = await self._body(call)
        asked = read_chat(body)
        with self._entered(asked.n) as leave:
            row, begun, options = await run_in_threadpool(self._chat_prompt, asked)
            answers = await self._submit(asked, [row], **options)
            names = None if asked.tools is None else asked.tools.names
            calls = None if asked.tools is None or asked.tools.several else 1
            choices = [
                ChatChoice(
                    index,
                    answer,
                    self._tokenizer,
                    AnswerParser(names, thinking=begun and asked.schema is None),
                    calls,
                )
                for index, answer in enumerate(answers)
            ]
            return await self._reply(call, Reply("chat.completion", self._name), asked, choices, leave)

    async def completion(self, call: Call) -> Response:
        """Continue prompts."""
        asked = read_completion(await self._body(call))
        with self._entered(asked.n * len(asked.prompts)) as leave:
            rows = await run_in_threadpool(lambda: [self._text_prompt(x, asked) for x in asked.prompts])
            answers = await self._submit(asked, rows)
            choices = [
                Choice(index, answer, self._tokenizer, echo=asked.echo, most=asked.most)
                for index, answer in enumerate(answers)
            ]
            return await self._reply(call, Reply("text_completion", self._name), asked, choices, leave)

    async def models(self, _: Call) -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [self._model]})

    async def model(self, call: Call) -> Response:
        """Describe the one model."""
        self._check_name(call.path_params["name"])
        return JSONResponse(self._model)

    async def read_context(self, call: Call) -> Response:
        """Read a context and keep it under a name."""
        body = await self._body(call)
        if not isinstance(body, dict) or not isinstance(name := body.get("name"), str) or not name:
            raise UserError('expected {"name": …, "prompt": …} or {"name": …, "messages": […]}')
        if unknown := body.keys() - {"name", "prompt", "messages", "model"}:
            raise UserError(f"Unrecognized request argument supplied: {min(unknown)}")
        check_unicode(name)
        prompt, messages = body.get("prompt"), body.get("messages")
        if (prompt is None) == (messages is None):
            raise UserError("a context is read from a prompt or from messages, one of the two")
        if isinstance(messages, list):
            prompt = [read_message(one) for one in messages]
            if any(one.pop(DROP, False) for one in prompt):
                raise UserError("a context is read whole: leave out the messages that are to be dropped")
        with self._entered(1):
            (row,) = await run_in_threadpool(
                token_rows, [prompt], self._vocabulary, self._tokenizer, "beginning"
            )
            answers = await self.worker.submit(lambda engine: [engine.read_context(name, row)])
            await self._unless_gone(call, self._ended(answers[0]))
        return JSONResponse({"name": name, "object": "context", "tokens": len(row)})

    async def drop_context(self, call: Call) -> Response:
        """Free the pages of a context."""
        name = call.path_params["name"]

        def forget(engine: Engine) -> None:
            engine.forget(name)
            # no turn may follow that would note it
            self._metrics.holds(engine.stats)

        await self.worker.call(forget)
        return JSONResponse({"name": name, "object": "context", "deleted": True})

    async def health(self, _: Call) -> Response:
        """Say whether requests are answered."""
        well = self.worker.ready and self.worker.failure is None
        return JSONResponse({"status": "ok" if well else "not ready"}, 200 if well else 503)

    async def metrics(self, _: Call) -> Response:
        """Return the metrics."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    # ---- requests

    def _answering(self, handler: Handler, checked: bool) -> Handler:
        """Return a route that replies to what is refused, as OpenAI's API does. A checked one needs the key and the
        engine."""

        async def route(call: Call) -> Response:
            try:
                if checked:
                    self._check(call)
                return await handler(call)
            except UserError as error:
                refused = Refused(400, str(error))
            except Refused as error:
                refused = error
            except Failed as error:
                refused = Refused(500, str(error), "server_error")
            except Exception as error:
                traceback.print_exc()
                refused = Refused(500, f"{type(error).__name__} in the server", "server_error")
            return JSONResponse(_error(str(refused), refused.kind), refused.status, refused.headers)

        return route

    def _check(self, call: Call) -> None:
        if self._key is not None:
            scheme, _, given = call.headers.get("authorization", "").partition(" ")
            # headers come as latin-1
            right = hmac.compare_digest(given.strip().encode("latin-1"), self._key.encode())
            if not right or scheme.lower() != "bearer":
                raise Refused(401, "Incorrect API key provided", "authentication_error")
        if self.worker.failure is not None:
            raise Failed(self.worker.failure)
        if not self.worker.ready:
            raise Refused(503, "the model is being compiled", "server_error", Retry_After="10")

    def _check_name(self, name: Any) -> None:
        if name != self._name:
            raise Refused(404, f"The model {shown(name)} does not exist: this is {self._name}")

    async def _body(self, call: Call) -> Any:
        """Return a request's body, once it names this model, if it names one."""
        if self._open >= self._most:
            # before anything of it is read
            self._full()
        parts, size = [], 0
        async for part in call.stream():
            parts.append(part)
            if (size := size + len(part)) > LARGEST_BODY:
                raise Refused(413, f"the body has more than {LARGEST_BODY:,} bytes")
        try:
            body = json.loads(b"".join(parts))
        except (ValueError, RecursionError):
            raise UserError("the body is no JSON") from None
        if isinstance(body, dict) and body.get("model") is not None:
            self._check_name(body["model"])
        return body

    def _full(self) -> None:
        self._metrics.refused.inc()
        raise Refused(429, f"{self._most} requests run or wait already", "rate_limit_error", Retry_After="1")

    @contextlib.contextmanager
    def _entered(self, answers: int) -> Iterator[contextlib.ExitStack]:
        """Count answers that are made. Who takes the stack over (`pop_all`) counts them out, by closing it."""
        if answers > self._most:
            raise UserError(f"{answers} answers are more than the {self._most} that may run and wait")
        if self._open + answers > self._most:
            self._full()

        def leave() -> None:
            self._open -= answers

        self._open += answers
        with contextlib.ExitStack() as stack:
            stack.callback(leave)
            yield stack

    def _chat_prompt(self, asked: Asked) -> tuple[list[int], bool, dict[str, Any]]:
        """Return the tokens of a chat's prompt, whether it ends where the model thinks, and options of `Engine.submit`:
        how many tokens later prompts may begin with, and which are dropped."""
        if asked.context is not None:
            (message, *others) = asked.messages
            if others or message["role"] != "user" or asked.tools is not None or asked.dropped:
                raise UserError(
                    "with a context, messages must be one message of the user, which continues it, without tools and "
                    "drop"
                )
            row = encode(self._tokenizer, message["content"], "end", **asked.template)
            has_template = getattr(self._tokenizer, "chat_template", None)
            after = around(self._tokenizer, **asked.template)[1] if has_template else ""
            return row, _thinks_after(after), {}
        if not getattr(self._tokenizer, "chat_template", None):
            raise UserError("the model has no chat template: use /v1/completions")
        tools = None if asked.tools is None else asked.tools.definitions
        options = {"tools": tools, **asked.template}
        text = templated(self._tokenizer, asked.messages, **options)
        row, made = token_ids(self._tokenizer, text), {}
        if not keeps_turns(self._tokenizer, **options):
            made["kept"] = stable_prefix_length(self._tokenizer, asked.messages, **options)
        if asked.dropped:
            made |= self._dropped(asked, row, options)
        return row, _thinks_after(text), made

    def _dropped(self, asked: Asked, row: list[int], options: dict[str, Any]) -> dict[str, Any]:
        """Return the spans, in a chat's tokens, of the messages that are dropped, and when this happens: once the last
        answer is read, so that it has seen them."""

        def span(index: int) -> tuple[int, int]:
            return content_span(self._tokenizer, asked.messages, row, index, **options)

        spans = tuple((start, end) for start, end in map(span, asked.dropped) if start < end)
        roles = [one["role"] for one in asked.messages]
        after = len(roles) - roles[::-1].index("assistant") if "assistant" in roles else len(roles)
        read = span(after)[0] if after < len(roles) else 0
        return {"dropped": spans, "dropped_at": max([read, *(end for _, end in spans)])}

    def _text_prompt(self, prompt: str | list[int], asked: Asked) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        check_unicode(prompt)
        if asked.context is not None:
            return encode(self._tokenizer, prompt, "end")
        return token_ids(self._tokenizer, prompt, add_special_tokens=True)

    async def _submit(self, asked: Asked, rows: list[list[int]], **own: Any) -> list[Answer]:
        """Return the answers to all prompts, the n of a prompt one after another. own: further options of
        `Engine.submit`."""
        constraint = None
        if asked.schema is not None:
            if self._grammar is None:
                raise UserError(
                    "answers with a format need llguidance where the server runs: pip install kvjax[serve]"
                )
            constraint = await run_in_threadpool(self._grammar, asked.schema)

        def submit(engine: Engine) -> list[Request]:
            found: list[Request] = []
            options = {
                "context": asked.context,
                "constraint": constraint,
                "score": asked.scores,
            } | own
            try:
                for row in rows:
                    most = (
                        engine.longest_answer(len(row), asked.context) if asked.most is None else asked.most
                    )
                    sampling = asked.sampling(max(1, most))
                    expected = ANSWER if asked.most is None else None
                    for _ in range(asked.n // sampling.n):
                        found += engine.submit(row, sampling, expected=expected, **options)
            except Exception:
                for one in found:
                    one.cancel()
                raise
            return found

        return await self.worker.submit(submit)

    # ---- replies

    async def _reply(
        self, call: Call, reply: Reply, asked: Asked, choices: list[Any], leave: contextlib.ExitStack
    ) -> Response:
        if asked.stream:
            return _Events(self._events(reply, asked, choices), choices, leave.pop_all())
        try:
            pieces = await self._unless_gone(call, asyncio.gather(*map(self._pieces, choices)))
        finally:
            for choice in choices:
                choice.answer.request.cancel()
        found = [choice.whole(own) for choice, own in zip(choices, pieces, strict=True)]
        requests = [choice.answer.request for choice in choices]
        return JSONResponse(reply.whole(found, usage(requests, asked.n, answered=asked.most != 0)))

    async def _pieces(self, choice: Choice) -> list[dict[str, Any]]:
        """Return all pieces of an answer."""
        pieces = []
        async with contextlib.aclosing(choice.answer.updates()) as updates:
            async for update in updates:
                _check_ended(choice.answer.request, update)
                pieces += choice.pieces(update)
        return pieces

    async def _ended(self, answer: Answer) -> None:
        """Wait for the end of what is only read."""
        async with contextlib.aclosing(answer.updates()) as updates:
            async for update in updates:
                if update.finish_reason == "capacity":
                    raise UserError("the pool has no pages for this context")

    async def _events(self, reply: Reply, asked: Asked, choices: list[Any]) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        # a client that asks for the usage gets it at the end, and null before
        not_yet = {"usage": None} if asked.include_usage else {}
        if isinstance(choices[0], ChatChoice):
            delta = {"role": "assistant", "content": ""}
            for choice in choices:
                yield reply.event(
                    [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}],
                    **not_yet,
                )
        pieces: asyncio.Queue[Any] = asyncio.Queue()

        def so_far() -> dict[str, Any]:
            return usage([choice.answer.request for choice in choices], asked.n)

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
                for one in piece or ():
                    yield reply.event([one], **({"usage": so_far()} if asked.usage_in_pieces else not_yet))
        finally:
            for task in tasks:
                task.cancel()
        if asked.include_usage and not running:
            yield reply.event([], usage=so_far())
        yield "data: [DONE]\n\n"

    async def _unless_gone(self, call: Call, work: Awaitable[Any]) -> Any:
        """Return what the work returns, unless the client goes away first; the work is then cancelled."""

        async def gone() -> None:
            while (await call.receive())["type"] != "http.disconnect":
                pass

        working, going = asyncio.ensure_future(work), asyncio.ensure_future(gone())
        try:
            await asyncio.wait({working, going}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Refused(499, "the client went away")
            return working.result()
        finally:
            working.cancel()
            going.cancel()
            await asyncio.gather(working, going, return_exceptions=True)


class _Events(StreamingResponse):
    """A stream of events. However it ends, its answers end with it."""

    def __init__(self, events: AsyncIterator[str], choices: list[Choice], leave: contextlib.ExitStack):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._choices, self._leave = choices, leave

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it."""

        async def sent(message: Any) -> None:
            # a client that reads nothing does not hold up the server's end
            await asyncio.wait_for(send(message), STALLED)

        try:
            await super().__call__(scope, receive, sent)
        finally:
            for choice in self._choices:
                choice.answer.request.cancel()
            self._leave.close()


async def _unknown(call: Call, error: Exception) -> Response:
    """Reply to a path or a method that there is not."""
    assert isinstance(error, HTTPException)
    message = f"{call.method} {call.url.path}: {error.detail}"
    return JSONResponse(_error(message, "invalid_request_error"), error.status_code, error.headers)


def _check_ended(request: Request, update: Update) -> None:
    """Raise Refused for an answer that ended otherwise than answers do."""
    if update.finish_reason == "abort":
        raise Refused(409, "the context of this request was dropped")
    if update.finish_reason is not None and request.constraint is not None and request.constraint.error:
        raise Refused(400, f"the answer's format cannot be followed: {request.constraint.error}")


def _thinks_after(text: str) -> bool:
    """Return True for a prompt that ends where the model thinks."""
    return text.rstrip().endswith("<think>")


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
