"""Test the server as its clients see it: OpenAI's own client, and raw requests where that client would not send
them."""

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import re
import socket
import threading
import time
from pathlib import Path

import numpy as np
import openai
import pytest

from kvjax import chat_template
from kvjax.engine import Engine, Request
from kvjax.inference import generate, logits
from kvjax.sampling_params import SamplingParams
from kvjax.serve.answer_parser import AnswerParser
from kvjax.serve.body import read_chat
from kvjax.serve.reply import ChatChoice
from kvjax.serve.token_texts import TokenTexts
from kvjax.serve.worker import Answer, Update
from tests.serve.running import NAME, model, running
from tests.tasks.model_tokenizers import THINKING, byte_tokenizer, spaced_tokenizer

ON = {"on": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": ON, "required": ["on"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "light", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "light", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def served():
    with running() as server:
        yield server


def said(text):
    return [{"role": "user", "content": text}]


def chat(client, text, **options):
    return client.chat.completions.create(
        **{"model": NAME, "messages": said(text), "temperature": 0} | options
    )


def streamed(client, text, **options):
    """Return the text and the finish reason of a streamed chat."""
    pieces = [piece for piece in chat(client, text, stream=True, **options) if piece.choices]
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    return text, pieces[-1].choices[0].finish_reason


def kinds(client):
    """Return many kinds of requests, each of which gives the same answer whenever it is asked."""

    def completed(prompt, **options):
        found = client.completions.create(**{"model": NAME, "prompt": prompt, "temperature": 0} | options)
        return [choice.model_dump() for choice in found.choices], found.usage.completion_tokens

    def chatted(text, **options):
        found = chat(client, text, **options)
        return [choice.model_dump() for choice in found.choices], found.usage.completion_tokens

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
        ours = {"top_k": 5, "ignore_eos": True}
        yield completed, (text,), {"max_tokens": 12, "extra_body": ours, "seed": i, "temperature": 2.0}


def test_sixty_requests_at_once_get_the_answers_that_they_get_alone(served):
    client = served.client()
    asked = list(kinds(client))
    assert len(asked) == 60
    with concurrent.futures.ThreadPoolExecutor(20) as threads:
        futures = [threads.submit(function, *given, **options) for function, given, options in asked]
        together = [future.result() for future in futures]
    for (function, given, options), found in zip(asked, together, strict=True):
        assert function(*given, **options) == found
    stats = served.settled()
    assert stats[:3] == (0, 0, 0)


def test_answers_are_those_of_generate(served):
    client, tokenizer = served.client(), byte_tokenizer()
    greedy = SamplingParams(max_new_tokens=20)
    want = generate(model(), [said("Who is Emma?")], greedy, tokenizer=tokenizer)
    found = chat(client, "Who is Emma?", max_tokens=20)
    assert found.choices[0].message.content == want.texts[0]
    assert found.choices[0].finish_reason == want.finish_reasons[0]
    assert streamed(client, "Who is Emma?", max_tokens=20)[0] == want.texts[0]
    text = client.completions.create(model=NAME, prompt="Who is Emma?", temperature=0, max_tokens=20)
    want = generate(model(), [tokenizer("Who is Emma?")["input_ids"]], greedy, tokenizer=tokenizer)
    assert text.choices[0].text == want.texts[0]


def test_messages_that_are_dropped_are_found(served, monkeypatch):
    """They are dropped where the first message after the last answer begins, so that the answer has seen them. The
    chat's text is rendered once."""
    roles = ("system", "user", "assistant", "tool", "assistant", "tool", "user")
    messages = [{"role": role, "content": f"Text of {role}, {i}."} for i, role in enumerate(roles)]
    messages[0]["drop"] = False
    messages[3]["drop"] = True
    asked = read_chat({"messages": messages})
    row, _, options = served.server._chat_prompt(asked)
    tokenizer, ((start, end),) = byte_tokenizer(), options["dropped"]
    assert tokenizer.decode(row[start:end]) == "Text of tool, 3."
    assert tokenizer.decode(row[options["dropped_at"] :]).startswith("Text of tool, 5.")
    plain = [{"role": one["role"], "content": one["content"]} for one in messages]
    assert row == tokenizer.apply_chat_template(plain, add_generation_prompt=True)["input_ids"]
    messages[5]["drop"] = True
    rendered, own = [], chat_template.render
    monkeypatch.setattr(
        chat_template, "render", lambda x, given: rendered.append(given["messages"]) or own(x, given)
    )
    options = served.server._chat_prompt(read_chat({"messages": messages}))[2]
    assert rendered.count(plain) == 1
    assert options["dropped_at"] == options["dropped"][1][1]


@pytest.mark.thorough
def test_a_tools_output_leaves_the_cache():
    with running("full:positions=true") as server:
        client, output = server.client(), "Many lines. " * 8
        messages = [
            *said("Read it."),
            {"role": "assistant", "content": "Yes."},
            {"role": "tool", "content": output},
        ]
        options = {"model": NAME, "max_tokens": 6, "temperature": 0}
        first = client.chat.completions.create(messages=messages, **options)
        messages += [{"role": "assistant", "content": "Done."}, *said("And?")]
        seen = client.chat.completions.create(messages=messages, **options)
        messages[2]["drop"] = True
        dropped = client.chat.completions.create(messages=messages, **options)
        assert seen.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens
        assert dropped.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens
        assert dropped.choices[0].message != seen.choices[0].message
        messages += [{"role": "assistant", "content": "That."}, *said("What?")]
        third = client.chat.completions.create(messages=messages, **options)
        assert third.usage.prompt_tokens_details.cached_tokens == dropped.usage.prompt_tokens


def test_usage_counts_prompts_once_and_says_what_was_read_before(served):
    client = served.client()
    text = "A conversation that nobody had before."
    first = chat(client, text, max_tokens=6, n=2).usage
    pieces = list(chat(client, text, max_tokens=6, stream=True, stream_options={"include_usage": True}))
    assert all("usage" in piece.model_fields_set and piece.usage is None for piece in pieces[:-1])
    again = pieces[-1].usage
    size = len(byte_tokenizer().apply_chat_template(said(text), add_generation_prompt=True)["input_ids"])
    assert first.prompt_tokens == again.prompt_tokens == size
    assert first.completion_tokens == 12
    assert first.prompt_tokens_details.cached_tokens == 0
    assert again.prompt_tokens_details.cached_tokens == size


def test_a_conversation_goes_on_where_the_template_cuts_thoughts():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    with running(tokenizer=tokenizer) as server:
        client, messages, prompts = server.client(), [], []
        for turn in range(3):
            messages.append({"role": "user", "content": f"Question {turn}?"})
            options = {"max_tokens": 6, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
            found = client.chat.completions.create(model=NAME, messages=messages, **options).usage
            prompts.append(found)
            messages.append({"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."})
    cached = [found.prompt_tokens_details.cached_tokens for found in prompts]
    begun = len("<|im_start|>assistant\n<think>\n\n</think>\n\n") - len("<|im_start|>") + 1
    assert cached == [0, *(found.prompt_tokens - begun for found in prompts[:2])]


def test_a_prompts_own_tokens_are_scored(served):
    row = byte_tokenizer()("Who is Emma?")["input_ids"]
    (choice,) = (
        served.client()
        .completions.create(model=NAME, prompt=row, echo=True, logprobs=2, max_tokens=0, temperature=0)
        .choices
    )
    found = logits(model(), [row])[0]
    norm = np.log(np.exp(found).sum(-1))
    want = found[np.arange(len(row) - 1), row[1:]] - norm[:-1]
    assert choice.text == "Who is Emma?"
    assert choice.logprobs.token_logprobs[0] is None
    np.testing.assert_allclose(choice.logprobs.token_logprobs[1:], want, rtol=1e-4, atol=1e-5)
    assert choice.logprobs.text_offset == list(range(len(row)))
    top = max(choice.logprobs.top_logprobs[-1].values())
    np.testing.assert_allclose(top, found[-2].max() - norm[-2], rtol=1e-4, atol=1e-5)


def tool_of(parameters):
    return {"type": "function", "function": {"name": "light", "parameters": parameters}}


def test_no_prompt_runs_on_where_a_later_one_is_refused(served, monkeypatch):
    submitted, own = [], Engine.submit

    def submit(engine, *prompt, **options):
        submitted.extend(found := own(engine, *prompt, **options))
        return found

    monkeypatch.setattr(Engine, "submit", submit)
    body = {"prompt": ["hello", "you", "x" * 250], "max_tokens": 200, "ignore_eos": True}
    assert served.refused("/v1/completions", body)[0] == 400
    assert [request.cancelled for request in submitted] == [True, True]
    served.settled()


def test_what_is_wrong_with_a_request_is_said_in_a_line(served):
    hello = said("Hello")
    wrong = [
        ({"messages": hello, "temprature": 1}, "Unrecognized request argument supplied: temprature"),
        ({"messages": []}, "messages must be a list of messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "a message must be an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content must be text"),
        ({"messages": hello, "temperature": -1}, "temperature"),
        ({"messages": hello, "max_tokens": 0}, "at least 1"),
        ({"messages": hello, "max_tokens": 1000}, "are longer than max_length=256"),
        ({"messages": hello, "n": 500}, "n must be a whole number from 1 to 128"),
        ({"messages": hello, "top_logprobs": 3}, "top_logprobs needs logprobs=true"),
        ({"messages": hello, "logprobs": True, "top_logprobs": 30}, "logprobs"),
        ({"messages": hello, "logit_bias": {"a": 1}}, "logit_bias"),
        ({"messages": hello, "response_format": {"type": "xml"}}, "response_format must be"),
        ({"messages": hello, "response_format": FORMAT | {"json_schema": {"schema": {"type": "x"}}}}, "schema"),
        ({"messages": hello, "tools": [{"type": "function"}]}, "a tool must be"),
        ({"messages": hello, "tools": [tool_of([1])], "tool_choice": "required"}, "a tool must be"),
        ({"messages": hello, "tools": [tool_of({"$defs": 5})], "tool_choice": "required"}, "a tool must be"),
        ({"messages": hello, "tool_choice": "required"}, "tool_choice needs tools"),
        ({"messages": hello, "context": "nobody's"}, "no context \"nobody's\" was read"),
        ([], "the body must be a JSON object"),
        ({"messages": hello, "logit_bias": {"300": 1}}, "the model's vocabulary is 0 … 257"),
        ({"messages": hello, "logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"messages": hello, "stop_token_ids": [300]}, "the model's vocabulary is 0 … 257"),
        ({"messages": hello, "stop_token_ids": list(range(257))}, "258 stop tokens, expected at most 256"),
        ({"messages": hello, "stop": "z" * 100_000}, "stop must be at most 16 texts of at most 256"),
        ({"messages": hello, "tools": [TOOL], "tool_choice": {"function": 5}}, "tool_choice must be"),
        ({"messages": hello, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"messages": hello, "min_tokens": 3}, "min_tokens is only taken as 0, got 3"),
        ({"messages": hello, "context": "a", "tools": [TOOL]}, "without tools"),
        ({"messages": [hello[0] | {"drop": 1}]}, "a message: drop is one of True, False, got 1"),
        ({"messages": [hello[0] | {"drop": True}]}, "drop is for one that a later message follows"),
        ({"messages": [hello[0] | {"drop": True}, *hello]}, "full does not know the positions of its entries"),
        ({"messages": hello, "n": 100}, "100 answers are more than the 67 that may run and wait"),
    ]  # fmt: skip
    for body, message in wrong:
        status, found = served.refused("/v1/chat/completions", body)
        assert (status, message in found) == (400, True), (body, found)
    for body, message in (
        ({}, "prompt must be"),
        ({"prompt": [[1], "a", 3]}, "prompt must be"),
        ({"prompt": [999]}, "vocabulary"),
        ({"prompt": "\ud800"}, "must be Unicode text"),
        ({"prompt": ["hello", "x" * 250], "max_tokens": 200}, "are longer than max_length=256"),
    ):
        status, found = served.refused("/v1/completions", body)
        assert (status, message in found) == (400, True), (body, found)
    assert served.refused("/v1/chat/completions", b"{")[0] == 400
    assert served.refused("/v1/chat/completions", b"[" * 100_000)[0] == 400
    assert served.refused("/v1/chat/completions", {"model": "gpt-4", "messages": hello})[0] == 404
    assert served.refused("/v1/chat/completions", None, "GET")[0] == 405
    assert served.refused("/v1/embeddings", {}) == (404, "POST /v1/embeddings: Not Found")
    for body, message in (
        ({"name": "\ud800", "prompt": "x"}, "must be Unicode text"),
        ({"name": "a", "prompt": "x", "messages": hello}, "one of the two"),
        ({"name": "a", "messages": [hello[0] | {"drop": True}]}, "a context is read whole"),
    ):
        status, found = served.refused("/v1/contexts", body)
        assert (status, message in found) == (400, True), (body, found)
    assert served.settled()[:3] == (0, 0, 0)


def test_the_definitions_of_tools_are_found(served):
    """Two tools may have different definitions of the same name."""
    switch = {"type": "object", "properties": {"state": {"$ref": "#/$defs/State"}}, "required": ["state"]}
    states = {"a": ["on", "off"], "b": ["up", "down"]}
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": switch | {"$defs": {"State": {"enum": own}}, "additionalProperties": False},
            },
        }
        for name, own in states.items()
    ]
    (choice,) = chat(served.client(), "Go", tools=tools, tool_choice="required", max_tokens=60).choices
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments)["state"] in states[call.function.name]
    schema = read_chat({"messages": said("Go"), "tools": tools, "tool_choice": "required"}).schema
    for one, own in zip(schema["anyOf"], states.values(), strict=True):
        arguments = schema["$defs"][one["properties"]["arguments"]["$ref"].removeprefix("#/$defs/")]
        place = arguments["properties"]["state"]["$ref"].removeprefix("#/$defs/")
        assert schema["$defs"][place] == {"enum": own}


def test_log_probabilities_and_usage_stop_where_the_text_does(served):
    client, options = served.client(), {"max_tokens": 30, "logprobs": True}
    whole = chat(client, "Who is Emma?", **options).choices[0]
    # some of the stop texts begin in one block and end in the next
    for place in range(4, 9):
        stop = whole.message.content[place : place + 2]
        cut = chat(client, "Who is Emma?", stop=stop, **options)
        text = cut.choices[0].message.content
        assert text == whole.message.content[: whole.message.content.index(stop)]
        assert "".join(one.token for one in cut.choices[0].logprobs.content) == text
        assert cut.usage.completion_tokens == len(cut.choices[0].logprobs.content)


def test_a_tool_may_have_parameters_with_the_names_of_keywords(served):
    """The parameters may also refer to the schema itself."""
    names = {"definitions": {"type": "boolean"}, "$defs": {"enum": ["on"]}, "next": {"$ref": "#"}}
    tool = tool_of({"type": "object", "properties": names, "required": ["definitions"]})
    # the answer has the required parameter alone
    options = {"tools": [tool], "tool_choice": "required", "max_tokens": 80, "logit_bias": {"44": -100}}
    schema = read_chat({"messages": said("Go"), **options}).schema
    found = schema["$defs"]["tool0."]["properties"]
    assert found == names | {"next": {"$ref": "#/$defs/tool0."}}
    options["tools"] = [tool_of(tool["function"]["parameters"] | {"additionalProperties": False})]
    (call,) = chat(served.client(), "Go", **options).choices[0].message.tool_calls
    assert [*json.loads(call.function.arguments)] == ["definitions"]


def test_a_named_tool_is_called_and_the_others_are_shown(served):
    tools = [tool_of(SCHEMA), {"type": "function", "function": {"name": "door", "parameters": SCHEMA}}]
    sizes = set()
    for name in ("light", "door"):
        named = {"type": "function", "function": {"name": name}}
        found = chat(served.client(), "Go", tools=tools, tool_choice=named, max_tokens=60)
        (call,) = found.choices[0].message.tool_calls
        assert call.function.name == name
        sizes.add(found.usage.prompt_tokens)
    both = chat(served.client(), "Go", tools=tools, tool_choice="required", max_tokens=60)
    assert sizes == {both.usage.prompt_tokens}


def test_one_call_alone_where_several_are_not_wanted():
    call = '<tool_call>{"name": "light", "arguments": {}}</tool_call>'
    request = Request(np.ones(1, np.int32), SamplingParams(), 0, 0, ())
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        for most, count in ((None, 2), (1, 1)):
            answer, parser = Answer(request, loop), AnswerParser(["light"])
            choice = ChatChoice(0, answer, byte_tokenizer(), parser, most)
            found = choice.whole(choice.pieces(Update(call * 2, [], [], "stop")))
            assert len(found["message"]["tool_calls"]) == count


def test_prompts_without_a_seed_are_drawn_apart(served):
    found = served.client().completions.create(
        model=NAME, prompt=["Once"] * 3, temperature=2, max_tokens=20, logit_bias={"257": -100}
    )
    assert len({choice.text for choice in found.choices}) == 3


def test_the_token_that_ends_a_completion_has_its_log_probability(served):
    """lm-evaluation-harness relies on this: it asks for one token after the text that it scores."""
    row = byte_tokenizer()("Who is Emma?")["input_ids"]
    (choice,) = (
        served.client()
        .completions.create(
            model=NAME,
            prompt=row,
            echo=True,
            logprobs=1,
            max_tokens=1,
            temperature=0,
            logit_bias={"257": 100},
        )
        .choices
    )
    assert choice.text == "Who is Emma?"
    assert len(choice.logprobs.token_logprobs) == len(row) + 1


def test_texts_of_tokens_make_up_the_text():
    """This also holds for a tokenizer that shows a space before a word, but not at the beginning."""
    tokenizer = spaced_tokenizer()
    tokens, texts = tokenizer("the cat sat")["input_ids"], TokenTexts(tokenizer)
    shown = [texts.text(token, before) for before, token in itertools.pairwise([None, *tokens])]
    own = [text for text, token in zip(shown, tokens, strict=True) if token not in texts.special]
    assert "".join(own) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_part_of_a_character_has_its_own_bytes():
    texts, tokens = TokenTexts(byte_tokenizer()), byte_tokenizer()("é")["input_ids"]
    assert [x for token in tokens for x in texts.bytes(token, texts.text(token, None))] == [*"é".encode()]


def test_known_fields_that_change_nothing_are_taken(served):
    body = {
        "messages": [*said("Hi"), {"role": "assistant", "content": None, "refusal": "No."}, *said("Why?")],
        "max_tokens": 2,
        "top_k": -1,
        "modalities": ["text"],
        "min_tokens": 0,
        "skip_special_tokens": True,
        "parallel_tool_calls": False,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "stop": None,
    }
    assert served.ask("POST", "/v1/chat/completions", body)[0] == 200


def test_content_in_parts_and_all_roles(served):
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Is the "}, {"type": "text", "text": "light on?"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "light", "arguments": "{\"on\": true}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "yes"},
    ]  # fmt: skip
    found = served.client().chat.completions.create(
        model=NAME, messages=messages, max_tokens=4, temperature=0
    )
    plain = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Is the light on?"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "yes"},
    ]
    want = generate(model(), [plain], SamplingParams(max_new_tokens=4), tokenizer=byte_tokenizer())
    assert found.choices[0].message.content == want.texts[0]


def test_a_client_that_goes_away_frees_its_slot(served):
    for stream in (True, False):
        body = json.dumps(
            {"messages": said("Go on"), "max_tokens": 200, "stream": stream, "logit_bias": {"257": -100}}
        )
        with socket.create_connection(("127.0.0.1", served.port)) as call:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            call.sendall((head + body).encode())
            while served.engine.stats.running == 0:
                time.sleep(0.005)
        stats = served.settled()
        assert stats.running == 0
        assert served.server._open == 0
    ended = re.search(r'kvjax_requests_total{finish_reason="abort"} (\d+)', served.ask("GET", "/metrics")[2])
    assert int(ended[1]) >= 2


def test_metrics_tell_what_operators_want_to_know(served):
    chat(served.client(), "Hello", max_tokens=9)
    text = served.ask("GET", "/metrics")[2]
    for name in ("requests_running", "requests_waiting", "requests_paused", "pool_pages_used", "pool_pages",
                 "generation_tokens_total", "time_to_first_token_seconds_count", "time_between_tokens_seconds_sum",
                 "kv_ratio_sum"):  # fmt: skip
        assert re.search(rf"^kvjax_{name} [\d.e+-]+$", text, re.MULTILINE), name


def test_models_are_listed(served):
    (found,) = served.client().models.list().data
    assert found.id == NAME


def test_the_documented_client_runs(served, capsys):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(block.replace(":8000", f":{served.port}"), {})
    assert capsys.readouterr().out


@pytest.fixture(scope="module")
def small():
    """Yield a server with an eviction, one slot, a queue of one request, and a key."""
    with running("snapkv:ratio=0.5", slots=1, queue=1, key="secret") as server:
        yield server


def test_a_key_is_asked_for(small):
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        chat(small.client("guessed"), "Hello", max_tokens=3)
    assert chat(small.client("secret"), "Hello", max_tokens=3).choices
    assert small.ask("GET", "/health")[0] == 200


def test_a_full_queue_refuses_before_anything_is_done(small):
    client, long = small.client("secret"), {"max_tokens": 150, "logit_bias": {"257": -100}}
    first, second = (chat(client, "Go on", stream=True, **long) for _ in range(2))
    with pytest.raises(openai.RateLimitError) as refused:
        chat(client, "And me?", max_tokens=3)
    assert int(refused.value.response.headers["retry-after"]) > 0
    first.close()
    second.close()
    small.settled()
    assert chat(client, "And me?", max_tokens=3).choices


def test_a_context_is_read_under_a_name_and_asked(small):
    client, key = small.client("secret"), {"Authorization": "Bearer secret"}
    text = "It was a dark and stormy night; the rain fell in torrents."
    status, _, found = small.ask("POST", "/v1/contexts", {"name": "night", "prompt": text}, **key)
    assert (status, json.loads(found)["name"]) == (200, "night")
    assert small.refused("/v1/contexts", {"name": "night", "prompt": text}, **key)[0] == 400
    answers = [chat(client, "Who?", max_tokens=6, extra_body={"context": "night"}) for _ in range(2)]
    assert answers[0].choices == answers[1].choices
    assert answers[0].usage.prompt_tokens_details.cached_tokens == json.loads(found)["tokens"]
    assert "kvjax_forks 1.0" in small.ask("GET", "/metrics")[2]
    assert small.ask("DELETE", "/v1/contexts/night", **key)[0] == 200
    assert "kvjax_forks 0.0" in small.ask("GET", "/metrics")[2]
    assert small.refused("/v1/contexts/night", None, "DELETE", **key)[0] == 400


def test_scores_of_a_prompt_are_refused_where_they_would_be_a_full_caches(small):
    with pytest.raises(openai.BadRequestError, match="would be those of a full cache"):
        small.client("secret").completions.create(
            model=NAME, prompt="Who?", echo=True, logprobs=1, max_tokens=0
        )


def test_an_engine_that_fails_is_told_and_keeps_nobody_waiting(monkeypatch, capsys):
    """The error reaches running requests and new ones."""
    with running() as server:
        assert server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200

        def fail(engine):
            time.sleep(0.5)
            raise RuntimeError("no more memory")

        monkeypatch.setattr(Engine, "step", fail)
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            asked = []
            for _ in range(4):
                asked.append(threads.submit(server.refused, "/v1/completions", {"prompt": "a"}))
                time.sleep(0.2)
            found = [one.result(timeout=20) for one in asked]
        assert found == [(500, "the engine has failed: no more memory")] * 4
        assert server.ask("GET", "/health")[0] == 503
        assert server.server._open == 0
    assert "no more memory" in capsys.readouterr().err


def test_the_key_is_asked_for_whatever_the_host_is_called(small):
    for host in ("x/?", "x/y#", "x"):
        assert small.ask("POST", "/v1/completions", {"prompt": "a"}, Host=host)[0] == 401


def test_until_everything_is_compiled_requests_are_turned_away(monkeypatch):
    ready = threading.Event()
    monkeypatch.setattr(Engine, "warm_up", lambda self, constrained: ready.wait())
    with running(wait=False) as server:
        assert server.ask("GET", "/health")[0] == 503
        status, headers, _ = server.ask("POST", "/v1/chat/completions", {"messages": said("Hi")})
        assert (status, headers["Retry-After"]) == (503, "10")
        ready.set()
        while server.ask("GET", "/health")[0] != 200:
            time.sleep(0.01)


@pytest.mark.thorough
def test_two_thousand_clients_come_and_go():
    """Some leave before their answer. No request is lost, nothing stays behind, memory use is unchanged, and all
    answers are right."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, size).tolist() for size in (3, 40, 90)]
    asked = [
        {
            "prompt": [*texts[i % 3], *rng.integers(0, 256, rng.integers(1, 60)).tolist()],
            "max_tokens": int(rng.integers(1, 40)),
            "temperature": 0,
            "ignore_eos": True,
            "stream": bool(i % 2),
        }
        for i in range(40)
    ]

    def said_in(reply, stream):
        if not stream:
            return json.loads(reply)["choices"][0]["text"]
        events = [json.loads(line[6:]) for line in reply.splitlines() if line.startswith("data: {")]
        return "".join(event["choices"][0]["text"] for event in events)

    def go_away(server, body, after):
        text = json.dumps(body)
        with socket.create_connection(("127.0.0.1", server.port)) as call:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(text)}\r\n\r\n"
            call.sendall((head + text).encode())
            time.sleep(after)

    def memory():
        return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) >> 10

    with running(queue=1000, capacity=96) as server:
        ask = lambda body: server.ask("POST", "/v1/completions", body)  # noqa: E731
        wanted = [said_in(ask(body)[2], body["stream"]) for body in asked]
        kinds, away, grown = rng.integers(40, size=2000), rng.random(2000), []
        with concurrent.futures.ThreadPoolExecutor(24) as threads:
            for start in range(0, 2000, 500):
                answers = {
                    i: threads.submit(ask, asked[kinds[i]])
                    if away[i] > 0.1
                    else threads.submit(go_away, server, asked[kinds[i]], away[i])
                    for i in range(start, start + 500)
                }
                for i, answer in answers.items():
                    if away[i] > 0.1:
                        status, _, reply = answer.result()
                        assert status == 200
                        assert said_in(reply, asked[kinds[i]]["stream"]) == wanted[kinds[i]]
                grown.append(memory())
        stats = server.settled()
        assert (stats[:3], server.server._open) == ((0, 0, 0), 0)
        assert grown[-1] - grown[1] < 64
        server.engine.forget()
        assert server.engine.stats.pages == 0
