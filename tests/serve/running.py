"""A server of the tiny model on loopback, in this process, and requests to it."""

import contextlib
import functools
import http.client
import json
import threading
import time

import openai
import uvicorn

from kvjax.engine import Engine
from kvjax.policies import make_policy
from kvjax.serve.app import Server
from kvjax.serve.grammar import Grammars
from tests.tasks.model_tokenizers import byte_tokenizer
from tests.tiny_models import tiny_model

NAME = "tiny"
ON = {"on": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": ON, "required": ["on"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "light", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "light", "parameters": SCHEMA}}


@functools.cache
def model():
    return tiny_model(vocab_size=len(byte_tokenizer()), qk_norm=False, eos_ids=(257,))


@functools.cache
def grammar():
    return Grammars(byte_tokenizer(), len(byte_tokenizer()), (257,)).schema


class Running:
    """A server with its address."""

    def __init__(self, policy="full", *, queue=64, key=None, wait=True, tokenizer=None, **sizes):
        policy = make_policy(policy, model=model())
        sizes = {
            "slots": 3,
            "max_length": 256,
            "page_size": 4,
            "chunk": 64,
            "block": 4,
            "capacity": 256,
        } | sizes
        tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
        self.engine = Engine(model(), policy, tokenizer=tokenizer, **sizes)
        if wait:
            # it takes longer than the answers of these tests; tests/engine/test_warm_up.py tests it
            self.engine.warm_up = lambda **_: None
        self.server = Server(self.engine, tokenizer, NAME, queue=queue, key=key, grammar=grammar())
        self._uvicorn = uvicorn.Server(uvicorn.Config(self.server.app, port=0, log_level="warning"))
        self._thread = threading.Thread(target=self._uvicorn.run, daemon=True)
        self._thread.start()
        while not self._uvicorn.started:
            time.sleep(0.01)
        self.port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        while wait and self.ask("GET", "/health")[0] != 200:
            assert self.server.worker.failure is None
            time.sleep(0.05)

    def ask(self, method, path, body=None, **headers):
        """Return the status, the headers and the text of a reply."""
        call = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(call):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            call.request(method, path, data, headers)
            reply = call.getresponse()
            return reply.status, reply.headers, reply.read().decode()

    def refused(self, path, body, method="POST", **headers):
        """Return the status and the message of a refusal."""
        status, _, text = self.ask(method, path, body, **headers)
        return status, json.loads(text)["error"]["message"]

    def client(self, key="none"):
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120)

    def stop(self):
        self._uvicorn.should_exit = True
        self._thread.join()

    def wait_until_idle(self):
        """Wait until nothing runs, and return the engine's stats."""
        for _ in range(1000):
            if not self.engine.busy and not self.server.worker._answers:
                break
            time.sleep(0.01)
        return self.engine.stats


@contextlib.contextmanager
def running(*args, **options):
    server = Running(*args, **options)
    try:
        yield server
    finally:
        server.stop()


def user(text):
    return [{"role": "user", "content": text}]


def chat(client, text, **options):
    return client.chat.completions.create(
        **{"model": NAME, "messages": user(text), "temperature": 0} | options
    )


def streamed(client, text, **options):
    """Return the text and the finish reason of a streamed chat."""
    pieces = [piece for piece in chat(client, text, stream=True, **options) if piece.choices]
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    return text, pieces[-1].choices[0].finish_reason


def tool_of(parameters):
    return {"type": "function", "function": {"name": "light", "parameters": parameters}}
