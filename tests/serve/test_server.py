"""Test the server with OpenAI's client, and with raw HTTP requests that this client would not send."""

import concurrent.futures
import json
import re
import socket
import threading
import time
from pathlib import Path

import numpy as np
import openai
import pytest

from kvjax.engine import Engine
from kvjax.inference import generate
from kvjax.sampling_params import SamplingParams
from tests.serve.running import FORMAT, NAME, TOOL, chat, model, running, streamed, user
from tests.tasks.model_tokenizers import THINKING, byte_tokenizer


def repeatable_requests(client):
    """Yield requests of many kinds, each with an answer that does not change when it is repeated."""

    def completed(prompt, **options):
        answer = client.completions.create(**{"model": NAME, "prompt": prompt, "temperature": 0} | options)
        return [choice.model_dump() for choice in answer.choices], answer.usage.completion_tokens

    def chatted(text, **options):
        answer = chat(client, text, **options)
        return [choice.model_dump() for choice in answer.choices], answer.usage.completion_tokens

    def called(text):
        (choice,) = chat(client, text, tools=[TOOL], tool_choice="required", max_tokens=60).choices
        (call,) = choice.message.tool_calls
        return choice.finish_reason, call.function.name, json.loads(call.function.arguments)

    for i in range(5):
        text = "Who is there? " * i + str(i)
        yield chatted, (text,), {"max_tokens": 10 + i}
        yield chatted, (text,), {"max_tokens": 8, "logprobs": True, "top_logprobs": 3}
        yield chatted, (text,), {"max_completion_tokens": 8, "temperature": 1.0, "seed": i, "n": 2}
        yield streamed, (client, text), {"max_tokens": 20}
        yield streamed, (client, text), {"max_tokens": 12, "temperature": 0.7, "top_p": 0.9, "seed": 7}
        yield chatted, (text,), {"max_tokens": 30, "stop": ["a", "e"], "frequency_penalty": 1.0}
        yield chatted, (text,), {"max_tokens": 30, "response_format": FORMAT}
        yield called, (text,), {}
        yield completed, ([text, "And who " * 5],), {"max_tokens": 9}
        yield completed, (list(range(3 + i)),), {"max_tokens": 5, "logprobs": 2}
        yield completed, (text,), {"max_tokens": 1, "echo": True, "logprobs": 1}
        extra = {"top_k": 5, "ignore_eos": True}
        yield completed, (text,), {"max_tokens": 12, "extra_body": extra, "seed": i, "temperature": 2.0}


@pytest.mark.slow
def test_concurrent_requests_get_the_same_answers_as_single_ones(served):
    client = served.client()
    requests = list(repeatable_requests(client))
    assert len(requests) == 60
    with concurrent.futures.ThreadPoolExecutor(20) as threads:
        futures = [
            threads.submit(function, *arguments, **options) for function, arguments, options in requests
        ]
        together = [future.result() for future in futures]
    for (function, arguments, options), answer in zip(requests, together, strict=True):
        assert function(*arguments, **options) == answer
    stats = served.wait_until_idle()
    assert stats[:3] == (0, 0, 0)


def test_answers_equal_those_of_generate(served):
    client, tokenizer = served.client(), byte_tokenizer()
    greedy = SamplingParams(max_new_tokens=20)
    expected = generate(model(), [user("Who is Emma?")], greedy, tokenizer=tokenizer)
    answer = chat(client, "Who is Emma?", max_tokens=20)
    assert answer.choices[0].message.content == expected.texts[0]
    assert answer.choices[0].finish_reason == expected.finish_reasons[0]
    assert streamed(client, "Who is Emma?", max_tokens=20)[0] == expected.texts[0]
    completion = client.completions.create(model=NAME, prompt="Who is Emma?", temperature=0, max_tokens=20)
    expected = generate(model(), [tokenizer("Who is Emma?")["input_ids"]], greedy, tokenizer=tokenizer)
    assert completion.choices[0].text == expected.texts[0]


def test_usage_counts_each_prompt_once_and_its_cached_tokens(served):
    client = served.client()
    text = "A conversation that nobody had before."
    first = chat(client, text, max_tokens=6, n=2).usage
    pieces = list(chat(client, text, max_tokens=6, stream=True, stream_options={"include_usage": True}))
    assert all("usage" in piece.model_fields_set and piece.usage is None for piece in pieces[:-1])
    again = pieces[-1].usage
    size = len(byte_tokenizer().apply_chat_template(user(text), add_generation_prompt=True)["input_ids"])
    assert first.prompt_tokens == again.prompt_tokens == size
    assert first.completion_tokens == 12
    assert first.prompt_tokens_details.cached_tokens == 0
    assert again.prompt_tokens_details.cached_tokens == size


def test_a_conversation_reuses_its_cache_if_the_template_drops_reasoning():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    with running(tokenizer=tokenizer) as server:
        client, messages, usages = server.client(), [], []
        for turn in range(3):
            messages.append({"role": "user", "content": f"Question {turn}?"})
            options = {"max_tokens": 6, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
            usage = client.chat.completions.create(model=NAME, messages=messages, **options).usage
            usages.append(usage)
            messages.append({"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."})
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    opening = len("<|im_start|>assistant\n<think>\n\n</think>\n\n") - len("<|im_start|>") + 1
    assert cached == [0, *(usage.prompt_tokens - opening for usage in usages[:2])]


def test_a_refused_prompt_cancels_the_other_prompts_of_its_request(served, monkeypatch):
    submitted, engine_submit = [], Engine.submit

    def submit(engine, *prompt, **options):
        submitted.extend(requests := engine_submit(engine, *prompt, **options))
        return requests

    monkeypatch.setattr(Engine, "submit", submit)
    body = {"prompt": ["hello", "you", "x" * 250], "max_tokens": 200, "ignore_eos": True}
    assert served.refused("/v1/completions", body)[0] == 400
    assert [request.cancelled for request in submitted] == [True, True]
    served.wait_until_idle()


def test_prompts_without_a_seed_get_different_answers(served):
    answers = served.client().completions.create(
        model=NAME, prompt=["Once"] * 3, temperature=2, max_tokens=20, logit_bias={"257": -100}
    )
    assert len({choice.text for choice in answers.choices}) == 3


def test_a_client_that_disconnects_frees_its_slot(served):
    for stream in (True, False):
        body = json.dumps(
            {"messages": user("Go on"), "max_tokens": 200, "stream": stream, "logit_bias": {"257": -100}}
        )
        with socket.create_connection(("127.0.0.1", served.port)) as call:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            call.sendall((head + body).encode())
            while served.engine.stats.running == 0:
                time.sleep(0.005)
        stats = served.wait_until_idle()
        assert stats.running == 0
        assert served.server._open_answers == 0
    aborted = re.search(
        r'kvjax_requests_total{finish_reason="abort"} (\d+)', served.ask("GET", "/metrics")[2]
    )
    assert int(aborted[1]) >= 2


def test_metrics_are_exported(served):
    chat(served.client(), "Hello", max_tokens=9)
    text = served.ask("GET", "/metrics")[2]
    for name in ("requests_running", "requests_waiting", "requests_paused", "pool_pages_used", "pool_pages",
                 "generation_tokens_total", "time_to_first_token_seconds_count", "time_between_tokens_seconds_sum",
                 "kv_ratio_sum"):  # fmt: skip
        assert re.search(rf"^kvjax_{name} [\d.e+-]+$", text, re.MULTILINE), name


def test_models_are_listed(served):
    (listed,) = served.client().models.list().data
    assert listed.id == NAME


def test_the_client_in_the_documentation_runs(served, capsys):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(block.replace(":8000", f":{served.port}"), {})
    assert capsys.readouterr().out


@pytest.fixture(scope="module")
def small():
    """Yield a server with an eviction, one slot, a queue of one request, and a key."""
    with running("snapkv:ratio=0.5", slots=1, queue=1, key="secret") as server:
        yield server


def test_requests_need_the_key(small):
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        chat(small.client("guessed"), "Hello", max_tokens=3)
    assert chat(small.client("secret"), "Hello", max_tokens=3).choices
    assert small.ask("GET", "/health")[0] == 200


def test_a_full_queue_refuses_further_requests(small):
    client, options = small.client("secret"), {"max_tokens": 150, "logit_bias": {"257": -100}}
    first, second = (chat(client, "Go on", stream=True, **options) for _ in range(2))
    with pytest.raises(openai.RateLimitError) as error:
        chat(client, "And me?", max_tokens=3)
    assert int(error.value.response.headers["retry-after"]) > 0
    first.close()
    second.close()
    small.wait_until_idle()
    assert chat(client, "And me?", max_tokens=3).choices


def test_a_context_is_read_once_and_answers_several_chats(small):
    client, key = small.client("secret"), {"Authorization": "Bearer secret"}
    text = "It was a dark and stormy night; the rain fell in torrents."
    status, _, reply = small.ask("POST", "/v1/contexts", {"name": "night", "prompt": text}, **key)
    assert (status, json.loads(reply)["name"]) == (200, "night")
    assert small.refused("/v1/contexts", {"name": "night", "prompt": text}, **key)[0] == 400
    answers = [chat(client, "Who?", max_tokens=6, extra_body={"context": "night"}) for _ in range(2)]
    assert answers[0].choices == answers[1].choices
    assert answers[0].usage.prompt_tokens_details.cached_tokens == json.loads(reply)["tokens"]
    assert "kvjax_forks 1.0" in small.ask("GET", "/metrics")[2]
    assert json.loads(small.ask("GET", "/v1/contexts", **key)[2])["data"] == [json.loads(reply)]
    assert small.ask("GET", "/v1/contexts")[0] == 401
    assert small.ask("DELETE", "/v1/contexts/night", **key)[0] == 200
    assert json.loads(small.ask("GET", "/v1/contexts", **key)[2])["data"] == []
    assert "kvjax_forks 0.0" in small.ask("GET", "/metrics")[2]
    assert small.refused("/v1/contexts/night", None, "DELETE", **key)[0] == 400


def test_prompt_scores_are_refused_under_an_eviction(small):
    with pytest.raises(openai.BadRequestError, match="would be those of a full cache"):
        small.client("secret").completions.create(
            model=NAME, prompt="Who?", echo=True, logprobs=1, max_tokens=0
        )


def test_an_engine_failure_is_reported_to_all_requests(monkeypatch, capsys):
    """The error reaches both running requests and new ones."""
    with running() as server:
        assert server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200

        def fail(engine):
            time.sleep(0.5)
            raise RuntimeError("no more memory")

        monkeypatch.setattr(Engine, "step", fail)
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            futures = []
            for _ in range(4):
                futures.append(threads.submit(server.refused, "/v1/completions", {"prompt": "a"}))
                time.sleep(0.2)
            errors = [future.result(timeout=20) for future in futures]
        assert errors == [(500, "the engine has failed: no more memory")] * 4
        assert server.ask("GET", "/health")[0] == 503
        assert server.server._open_answers == 0
    assert "no more memory" in capsys.readouterr().err


def test_the_key_is_needed_whatever_the_host_header_says(small):
    for host in ("x/?", "x/y#", "x"):
        assert small.ask("POST", "/v1/completions", {"prompt": "a"}, Host=host)[0] == 401


def test_requests_are_refused_until_everything_is_compiled(monkeypatch):
    ready = threading.Event()
    monkeypatch.setattr(Engine, "warm_up", lambda self, constrained, say: ready.wait())
    with running(wait=False) as server:
        assert server.ask("GET", "/health")[0] == 503
        status, headers, _ = server.ask("POST", "/v1/chat/completions", {"messages": user("Hi")})
        assert (status, headers["Retry-After"]) == (503, "10")
        ready.set()
        while server.ask("GET", "/health")[0] != 200:
            time.sleep(0.01)


@pytest.mark.thorough
def test_two_thousand_clients_come_and_go():
    """Some clients disconnect early. All other answers are right, all pages are freed, and memory does not grow."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, size).tolist() for size in (3, 40, 90)]
    bodies = [
        {
            "prompt": [*texts[i % 3], *rng.integers(0, 256, rng.integers(1, 60)).tolist()],
            "max_tokens": int(rng.integers(1, 40)),
            "temperature": 0,
            "ignore_eos": True,
            "stream": bool(i % 2),
        }
        for i in range(40)
    ]

    def text_of(reply, stream):
        if not stream:
            return json.loads(reply)["choices"][0]["text"]
        events = [json.loads(line[6:]) for line in reply.splitlines() if line.startswith("data: {")]
        return "".join(event["choices"][0]["text"] for event in events)

    def disconnect(server, body, after):
        text = json.dumps(body)
        with socket.create_connection(("127.0.0.1", server.port)) as call:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(text)}\r\n\r\n"
            call.sendall((head + text).encode())
            time.sleep(after)

    def memory():
        return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) >> 10

    with running(queue=1000, capacity=96) as server:
        ask = lambda body: server.ask("POST", "/v1/completions", body)  # noqa: E731
        expected = [text_of(ask(body)[2], body["stream"]) for body in bodies]
        choice, leaves, sizes = rng.integers(40, size=2000), rng.random(2000), []
        with concurrent.futures.ThreadPoolExecutor(24) as threads:
            for start in range(0, 2000, 500):
                answers = {
                    i: threads.submit(ask, bodies[choice[i]])
                    if leaves[i] > 0.1
                    else threads.submit(disconnect, server, bodies[choice[i]], leaves[i])
                    for i in range(start, start + 500)
                }
                for i, answer in answers.items():
                    if leaves[i] > 0.1:
                        status, _, reply = answer.result()
                        assert status == 200
                        assert text_of(reply, bodies[choice[i]]["stream"]) == expected[choice[i]]
                sizes.append(memory())
        stats = server.wait_until_idle()
        assert (stats[:3], server.server._open_answers) == ((0, 0, 0), 0)
        assert sizes[-1] - sizes[1] < 64
        server.engine.forget()
        assert server.engine.stats.pages == 0
