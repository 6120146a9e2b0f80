"""Test the fields of requests: invalid ones, ignored ones, roles, content parts, and messages that are dropped."""

import pytest

from kvjax import chat_template
from kvjax.errors import UserError
from kvjax.inference import generate
from kvjax.sampling_params import SamplingParams
from kvjax.serve.body import read_chat, read_completion, recommended_sampling
from kvjax.serve.prompts import chat_prompt
from tests.serve.running import FORMAT, NAME, TOOL, model, running, tool_of, user
from tests.tasks.model_tokenizers import byte_tokenizer


def test_the_spans_of_dropped_messages_are_found(monkeypatch):
    """Messages are dropped where the first message after the last answer begins, so that the answer has seen them.
    The chat's text is rendered once."""
    roles = ("system", "user", "assistant", "tool", "assistant", "tool", "user")
    messages = [{"role": role, "content": f"Text of {role}, {i}."} for i, role in enumerate(roles)]
    messages[0]["drop"] = False
    messages[3]["drop"] = True
    tokens, _, options = chat_prompt(byte_tokenizer(), read_chat({"messages": messages}, {}))
    tokenizer, ((start, end),) = byte_tokenizer(), options["dropped"]
    assert tokenizer.decode(tokens[start:end]) == "Text of tool, 3."
    assert tokenizer.decode(tokens[options["dropped_at"] :]).startswith("Text of tool, 5.")
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    assert tokens == tokenizer.apply_chat_template(plain, add_generation_prompt=True)["input_ids"]
    messages[5]["drop"] = True
    rendered, render = [], chat_template.render
    monkeypatch.setattr(
        chat_template,
        "render",
        lambda template, given: rendered.append(given["messages"]) or render(template, given),
    )
    options = chat_prompt(byte_tokenizer(), read_chat({"messages": messages}, {}))[2]
    assert rendered.count(plain) == 1
    assert options["dropped_at"] == options["dropped"][1][1]


@pytest.mark.thorough
def test_a_dropped_tool_output_leaves_the_cache():
    with running("full:positions=true") as server:
        client, output = server.client(), "Many lines. " * 8
        messages = [
            *user("Read it."),
            {"role": "assistant", "content": "Yes."},
            {"role": "tool", "content": output},
        ]
        options = {"model": NAME, "max_tokens": 6, "temperature": 0}
        first = client.chat.completions.create(messages=messages, **options)
        messages += [{"role": "assistant", "content": "Done."}, *user("And?")]
        seen = client.chat.completions.create(messages=messages, **options)
        messages[2]["drop"] = True
        dropped = client.chat.completions.create(messages=messages, **options)
        assert seen.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens
        assert dropped.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens
        assert dropped.choices[0].message != seen.choices[0].message
        messages += [{"role": "assistant", "content": "That."}, *user("What?")]
        third = client.chat.completions.create(messages=messages, **options)
        assert third.usage.prompt_tokens_details.cached_tokens == dropped.usage.prompt_tokens


def test_invalid_requests_are_refused_with_one_line(served):
    hello = user("Hello")
    refusals = [
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
        ({"messages": hello, "min_tokens": 3}, "min_tokens must be 0, got 3"),
        ({"messages": hello, "context": "a", "tools": [TOOL]}, "without tools"),
        ({"messages": [hello[0] | {"drop": 1}]}, "a message: drop is one of True, False, got 1"),
        ({"messages": [hello[0] | {"drop": True}]}, "the last message cannot be dropped"),
        ({"messages": [hello[0] | {"drop": True}, *hello]}, "full does not know the positions of its entries"),
        ({"messages": hello, "n": 100}, "100 answers are more than the 67 that may run or wait"),
    ]  # fmt: skip
    for body, message in refusals:
        status, text = served.refused("/v1/chat/completions", body)
        assert (status, message in text) == (400, True), (body, text)
    for body, message in (
        ({}, "prompt must be"),
        ({"prompt": [[1], "a", 3]}, "prompt must be"),
        ({"prompt": [999]}, "vocabulary"),
        ({"prompt": "\ud800"}, "must be Unicode text"),
        ({"prompt": ["hello", "x" * 250], "max_tokens": 200}, "are longer than max_length=256"),
    ):
        status, text = served.refused("/v1/completions", body)
        assert (status, message in text) == (400, True), (body, text)
    assert served.refused("/v1/chat/completions", b"{")[0] == 400
    assert served.refused("/v1/chat/completions", b"[" * 100_000)[0] == 400
    assert served.refused("/v1/chat/completions", {"model": "gpt-4", "messages": hello})[0] == 404
    assert served.refused("/v1/chat/completions", None, "GET")[0] == 405
    assert served.refused("/v1/embeddings", {}) == (404, "POST /v1/embeddings: Not Found")
    for body, message in (
        ({"name": "\ud800", "prompt": "x"}, "must be Unicode text"),
        ({"name": "a", "prompt": "x", "messages": hello}, "either prompt or messages"),
        ({"name": "a", "messages": [hello[0] | {"drop": True}]}, "a context cannot drop messages"),
    ):
        status, text = served.refused("/v1/contexts", body)
        assert (status, message in text) == (400, True), (body, text)
    assert served.wait_until_idle()[:3] == (0, 0, 0)


def test_ignored_fields_are_accepted(served):
    body = {
        "messages": [*user("Hi"), {"role": "assistant", "content": None, "refusal": "No."}, *user("Why?")],
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


def test_content_parts_and_all_roles_are_accepted(served):
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Is the "}, {"type": "text", "text": "light on?"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "light", "arguments": "{\"on\": true}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "yes"},
    ]  # fmt: skip
    answer = served.client().chat.completions.create(
        model=NAME, messages=messages, max_tokens=4, temperature=0
    )
    texts = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Is the light on?"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "yes"},
    ]
    expected = generate(model(), [texts], SamplingParams(max_new_tokens=4), tokenizer=byte_tokenizer())
    assert answer.choices[0].message.content == expected.texts[0]


def test_a_model_recommends_sampling_that_requests_may_replace(tmp_path):
    file = tmp_path / "generation_config.json"
    assert recommended_sampling(tmp_path) == {}
    file.write_text('{"do_sample": true, "temperature": 0.7, "top_k": 20, "top_p": null, "eos_token_id": 2}')
    sampling = recommended_sampling(tmp_path)
    assert sampling == {"temperature": 0.7, "top_k": 20}
    for request in (
        read_chat({"messages": user("Go"), "temperature": 0.2, "top_k": None}, sampling),
        read_completion({"prompt": "Go", "temperature": 0.2}, sampling),
    ):
        params = request.sampling(8)
        assert (params.temperature, params.top_k, params.top_p) == (0.2, 20, 1.0)
    file.write_text('{"top_p": 7}')
    with pytest.raises(UserError, match=r"generation_config.json: sampling: top_p must be a finite number"):
        recommended_sampling(tmp_path)
