"""Test the parsing of answers into reasoning, content and tool calls, however the text is split into pieces."""

import json
import subprocess
import sys
from itertools import chain, pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvjax.serve.answer_parser import AnswerParser, Delta, ToolCall

TOOLS = "weather", "time"
WEATHER = ToolCall("weather", '{"city": "Köln"}')
TIME = ToolCall("time", "{}")
QWEN_WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
QWEN_TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
LLAMA_WEATHER = '{"name": "weather", "parameters": {"city": "Köln"}}'
LLAMA_TIME = '{"name": "time", "parameters": {}}'


def parsed(pieces, tools=TOOLS, thinking=False) -> Delta:
    """Return the concatenation of all deltas of the parser."""
    parser = AnswerParser(tools, thinking=thinking)
    deltas = [*map(parser.more, pieces), parser.end()]
    reasoning, content, calls = zip(*deltas, strict=True)
    return Delta("".join(reasoning), "".join(content), [*chain(*calls)])


def check(text, reasoning="", content="", calls=(), **options):
    """Check that the answer is parsed like this as one piece and as single characters."""
    expected = Delta(reasoning, content, list(calls))
    assert parsed([text], **options) == expected
    assert parsed(text, **options) == expected


def test_plain_answers_are_content():
    for text in (
        "",
        " ",
        "Hello",
        "\n Hello,\n\n world \n",
        "a < b <= c </ d",
        "<thi",
        "a </thin",
        "x<tool_c",
    ):
        check(text, content=text)
        check(text, content=text, tools=None)


def test_reasoning_comes_before_the_content():
    check("<think>\nHm.\n\nYes.\n</think>\n\nIt is 4.\n", "Hm.\n\nYes.", "It is 4.\n")
    check("\n <think>Hm.</think>4", "Hm.", "4")
    check("<think>\n\n</think>\n\n4", "", "4")
    check("<think>\n\n</think>\n\n", "", "")
    check("<think> a <think> b </think> c </think> d", "a <think> b", "c </think> d")


def test_reasoning_may_begin_in_the_prompt():
    check("Hm.\n</think>\n\n4", "Hm.", "4", thinking=True)
    check("\n\n</think>\n4", "", "4", thinking=True)
    check("<think>\nHm.</think>4", "Hm.", "4", thinking=True)  # some models open the block again
    check(" \n", thinking=True)


def test_unfinished_reasoning_is_reasoning():
    check("<think>\nHm, \n", "Hm,")
    check("Hm. </thin", "Hm. </thin", thinking=True)
    check("<think>")


def test_think_tags_later_in_an_answer_are_content():
    check("a <think>b</think> c", content="a <think>b</think> c")
    check("a </think> b", content="a </think> b")


def test_qwen_calls_are_parsed():
    check(QWEN_WEATHER, calls=[WEATHER])
    check(f"\n{QWEN_WEATHER}\n{QWEN_TIME}\n", calls=[WEATHER, TIME])
    check(QWEN_WEATHER.replace("\n", ""), calls=[WEATHER])
    check(f"<think>\n{QWEN_TIME}\n</think>\n\n{QWEN_WEATHER}", reasoning=QWEN_TIME, calls=[WEATHER])
    check('<tool_call>{"name": "time"}</tool_call>', calls=[TIME])
    check('<tool_call>{"name": "time", "arguments": null}</tool_call>', calls=[TIME])
    check(
        '<tool_call>{"name": "other", "parameters": {"a": [1]}}</tool_call>', calls=[("other", '{"a": [1]}')]
    )


def test_white_space_at_the_ends_of_content_with_calls_is_dropped():
    check(f"Let me see.\n\n{QWEN_WEATHER}\n", content="Let me see.", calls=[WEATHER])
    check(f" \n{QWEN_WEATHER}\nDone.\n", content="Done.", calls=[WEATHER])
    check(f" One.\n{QWEN_WEATHER}\nTwo.", content=" One.\n\nTwo.", calls=[WEATHER])


def test_without_tools_calls_are_content():
    for text in (QWEN_WEATHER, LLAMA_WEATHER, f"<|python_tag|>{LLAMA_TIME}"):
        for tools in (None, (), []):
            check(text, content=text, tools=tools)
    check(f"<think>a</think>{QWEN_TIME}", "a", QWEN_TIME, tools=None)


def test_tags_in_the_strings_of_a_call_do_not_end_it():
    code = 'say("</tool_call>") \\ <tool_call> </think>'
    text = json.dumps({"name": "time", "arguments": {"code": code}})
    check(
        f"<tool_call>{text}</tool_call> {QWEN_WEATHER}",
        calls=[ToolCall("time", json.dumps({"code": code})), WEATHER],
    )


def test_finished_qwen_calls_need_no_end_tag():
    check(QWEN_WEATHER.removesuffix("</tool_call>"), calls=[WEATHER])
    check(f"{QWEN_WEATHER.removesuffix('</tool_call>')}{QWEN_TIME}", calls=[WEATHER, TIME])
    for text in (
        'a\n<tool_call>\n{"name": "weather", "arg',
        "<tool_call>",
        "a <tool_call>\n",
        '<tool_call>{"a\\',
    ):
        check(text, content=text)


@pytest.mark.parametrize(
    "block",
    [
        "{}",
        "",
        "no JSON",
        "[1]",
        '{"name": "weather", "arguments": {"city": "Köln"}',
        '{"name": "weather", "arguments": {"city": "Köln}}\n',
        '{"name": "weather", "arguments": {"city": "a\nb"}}',
        '{"name": "weather", "arguments": [1]}',
        '{"name": "weather", "arguments": "Köln"}',
        '{"name": "weather", "arguments": ""}',
        '{"name": "weather", "arguments": "[1]"}',
        '{"name": "weather", "arguments": {"a": NaN}}',
        '{"name": "weather", "arguments": {"a": 1e999}}',
        '{"name": "weather", "arguments": "{\\"a\\": Infinity}"}',
        '{"name": "weather", "arguments": {"a": "\\ud800"}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "weather", "arguments": {"a": ' + "1" * 5000 + "}}",
        '{"name": "weather", "arguments": ' + "[" * 2000,
    ],
    ids=lambda block: repr(block[:60]),
)
def test_invalid_calls_are_content(block):
    text = f"<tool_call>{block}</tool_call>"
    check(text, content=text)
    check(f"a\n{text}\n{QWEN_TIME}", content=f"a\n{text}", calls=[TIME])


def test_a_tag_without_a_call_holds_no_text_back():
    assert AnswerParser(TOOLS).more("A <tool_call> tag").content == "A <tool_call> tag"
    check(f"<tool_call> begins it: {QWEN_TIME}", content="<tool_call> begins it:", calls=[TIME])
    check(f"<tool_call>\n{QWEN_TIME}", content="<tool_call>", calls=[TIME])


def test_arguments_that_are_a_string_are_passed_on():
    arguments = '{"city":  "Bonn"}'
    call = json.dumps({"name": "weather", "arguments": arguments})
    check(f"<tool_call>{call}</tool_call>", calls=[("weather", arguments)])
    check(call, calls=[("weather", arguments)])


@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
def test_llama_calls_are_parsed(tag):
    check(f"\n{tag}{LLAMA_WEATHER}\n", calls=[WEATHER])
    check(f"{tag}{LLAMA_WEATHER}; {tag}{LLAMA_TIME};", calls=[WEATHER, TIME])
    check(f"{tag}{LLAMA_WEATHER}\n{LLAMA_TIME}", calls=[WEATHER, TIME])
    check(f"{tag} [{LLAMA_WEATHER}, {LLAMA_TIME}]", calls=[WEATHER, TIME])
    check(f"<think>a</think>\n\n{tag}{LLAMA_WEATHER}", "a", calls=[WEATHER])
    check(tag + LLAMA_TIME.replace("{", '{"type": "function", ', 1), calls=[TIME])


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 2.50]}\n',
        '\n{"name": "Anna", "parameters": {}}',
        '{"name": "weather"}',
        '[ {"name": "weather", "parameters": {}}, 3]',
        LLAMA_WEATHER + '; {"a": 1}',
        LLAMA_WEATHER + "\nDone.",
        LLAMA_WEATHER[:-1],
        "[]",
        "[[]]",
        "{",
        "[1] says so.",
        '[weather(city="Köln")]',
        "<|python_tag|>",
        '<|python_tag|>search.call(query="a")',
        "The call is " + LLAMA_WEATHER,
        "[" * 2000,
        '{"a":' * 2000,
    ],
    ids=lambda text: repr(text[:60]),
)
def test_json_and_code_that_are_no_calls_are_content(text):
    check(text, content=text)


def test_qwen_calls_may_follow_content_that_begins_like_json():
    check(f"[1] says so.\n{QWEN_TIME}", content="[1] says so.", calls=[TIME])


def test_text_is_returned_as_early_as_possible():
    parser = AnswerParser(TOOLS)
    assert parser.more("<thi") == ("", "", [])
    assert parser.more("nk>\nHm") == ("Hm", "", [])
    assert parser.more(". ") == (".", "", [])
    assert parser.more("So</") == (" So", "", [])
    assert parser.more("think>\n\nA") == ("", "A", [])
    assert parser.more("nd <") == ("", "nd", [])
    assert parser.more("b <tool_call>") == ("", " <b", [])
    assert not any(parser.more('{"name": "time"}'))
    assert parser.more("</tool_call>") == ("", "", [TIME])
    assert parser.more("\n") == parser.end() == ("", "", [])


FRAGMENTS = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<", "</", "<t", "<|"),
        *(QWEN_WEATHER, QWEN_TIME, LLAMA_WEATHER, LLAMA_TIME, LLAMA_WEATHER[:30], "[", "]", "{", "}", ";"),
        *(" ", "\n", '"', "\\", "a", "Köln", "\N{NO-BREAK SPACE}", "\U0001f600"),
    ]
)
TEXTS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=12).map("".join)


@given(TEXTS, st.lists(st.integers(0, 400), max_size=12), st.booleans(), st.booleans())
@example(QWEN_WEATHER + LLAMA_TIME, [3, 15, 60], True, False)
def test_pieces_do_not_change_the_result(text, cuts, offered, thinking):
    places = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    options = dict(tools=TOOLS if offered else None, thinking=thinking)
    assert parsed(pieces, **options) == parsed([text], **options) == parsed(text, **options)


@given(TEXTS)
def test_no_text_is_lost(text):
    """Without reasoning and calls the content is the text. Otherwise only tags, calls and white space are missing."""
    answer = parsed([text])
    if not text.lstrip().startswith("<think>") and not answer.tool_calls:
        assert answer == ("", text, [])
    without_tools = parsed([text], tools=None)
    rest = (
        text.lstrip().removeprefix("<think>").replace("</think>", "", 1)
        if without_tools.content != text
        else text
    )
    assert "".join((without_tools.reasoning + without_tools.content).split()) == "".join(rest.split())


def test_deeply_nested_text_is_content():
    for depth in (900, 100_000):
        for text in ("[" * depth, "[" * depth + "]" * depth, "<tool_call>{" + "[" * depth + "</tool_call>"):
            assert parsed([text]) == ("", text, [])


TIMED = """
import sys, time
from kvjax.serve.answer_parser import AnswerParser
for unit in sys.argv[1:]:
    text = unit * (200_000 // len(unit))
    start = time.process_time()
    parser = AnswerParser(["time"])
    for character in text:
        parser.more(character)
    parser.end()
    print(time.process_time() - start)
"""


def test_time_is_linear_in_the_length():
    """Each kind of text takes about 0.25 s for 200,000 characters that arrive one at a time. The process has no type
    checks, unlike the tests."""
    units = (
        "a",
        " ",
        "<",
        '[{"a": 1},',
        "<tool_call>",
        '<tool_call>{"\\"',
        '<tool_call>{"}</tool_call>',
        LLAMA_TIME,
    )
    command = [sys.executable, "-c", TIMED, *units]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    seconds = [float(line) for line in done.stdout.split()]
    assert len(seconds) == len(units)
    assert max(seconds) < 2, seconds
