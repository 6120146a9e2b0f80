"""Test the tools of chats: their definitions, their choice and their calls."""

import asyncio
import contextlib
import json

import numpy as np
import pytest

from kvjax.engine import Request
from kvjax.sampling_params import SamplingParams
from kvjax.serve.answer_parser import AnswerParser
from kvjax.serve.body import read_chat
from kvjax.serve.reply import ChatChoice
from kvjax.serve.worker import Answer, Update
from tests.serve.running import SCHEMA, chat, tool_of, user
from tests.tasks.model_tokenizers import byte_tokenizer


@pytest.mark.slow
def test_tools_may_have_different_definitions_of_the_same_name(served):
    switch = {"type": "object", "properties": {"state": {"$ref": "#/$defs/State"}}, "required": ["state"]}
    states = {"a": ["on", "off"], "b": ["up", "down"]}
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": switch | {"$defs": {"State": {"enum": values}}, "additionalProperties": False},
            },
        }
        for name, values in states.items()
    ]
    (choice,) = chat(served.client(), "Go", tools=tools, tool_choice="required", max_tokens=60).choices
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments)["state"] in states[call.function.name]
    schema = read_chat({"messages": user("Go"), "tools": tools, "tool_choice": "required"}, {}).schema
    for call_schema, values in zip(schema["anyOf"], states.values(), strict=True):
        arguments = schema["$defs"][call_schema["properties"]["arguments"]["$ref"].removeprefix("#/$defs/")]
        definition = arguments["properties"]["state"]["$ref"].removeprefix("#/$defs/")
        assert schema["$defs"][definition] == {"enum": values}


def test_tool_parameters_may_be_named_like_schema_keywords(served):
    """The parameters may also refer to the schema itself."""
    properties = {"definitions": {"type": "boolean"}, "$defs": {"enum": ["on"]}, "next": {"$ref": "#"}}
    tool = tool_of({"type": "object", "properties": properties, "required": ["definitions"]})
    # Without commas the answer has only the required parameter.
    options = {"tools": [tool], "tool_choice": "required", "max_tokens": 80, "logit_bias": {"44": -100}}
    schema = read_chat({"messages": user("Go"), **options}, {}).schema
    actual = schema["$defs"]["tool0."]["properties"]
    assert actual == properties | {"next": {"$ref": "#/$defs/tool0."}}
    options["tools"] = [tool_of(tool["function"]["parameters"] | {"additionalProperties": False})]
    (call,) = chat(served.client(), "Go", **options).choices[0].message.tool_calls
    assert [*json.loads(call.function.arguments)] == ["definitions"]


def test_a_named_tool_is_called_while_the_prompt_shows_all_tools(served):
    tools = [tool_of(SCHEMA), {"type": "function", "function": {"name": "door", "parameters": SCHEMA}}]
    prompt_lengths = set()
    for name in ("light", "door"):
        named = {"type": "function", "function": {"name": name}}
        answer = chat(served.client(), "Go", tools=tools, tool_choice=named, max_tokens=60)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == name
        prompt_lengths.add(answer.usage.prompt_tokens)
    either = chat(served.client(), "Go", tools=tools, tool_choice="required", max_tokens=60)
    assert prompt_lengths == {either.usage.prompt_tokens}


def test_without_parallel_tool_calls_an_answer_has_one_call():
    call = '<tool_call>{"name": "light", "arguments": {}}</tool_call>'
    request = Request(np.ones(1, np.int32), SamplingParams(), 0, 0, ())
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        for max_calls, count in ((None, 2), (1, 1)):
            answer, parser = Answer(request, loop), AnswerParser(["light"])
            choice = ChatChoice(0, answer, byte_tokenizer(), parser, max_calls)
            whole = choice.whole(choice.pieces(Update(call * 2, [], [], "stop")))
            assert len(whole["message"]["tool_calls"]) == count
