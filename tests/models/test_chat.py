"""Tests of texts and chats as tokens, rendered by the chat template as a whole and in two parts."""

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from kvjax import chat_template
from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.models import load_tokenizer
from kvjax.models.chat import encode, stable_prefix_length, token_rows
from tests.tasks.model_tokenizers import byte_tokenizer, smol_tokenizer, spaced_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PICKY = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "def f(x):\n"}]


@pytest.fixture
def plain():
    return load_tokenizer(builtin_model("test_model"))


@pytest.fixture
def templated(plain):
    plain.chat_template = TEMPLATE
    return plain


def test_text_without_a_template_is_tokenized_plainly(plain):
    assert encode(plain, "def f(") == plain("def f(")["input_ids"]
    both = encode(plain, "def f(", "beginning") + encode(plain, "x):", "end")
    assert plain.decode(both) == "<|begin|>def f(x):"


def test_text_becomes_the_users_turn(templated):
    assert templated.decode(encode(templated, " hello ")) == "[user]hello\n[assistant]"
    assert encode(templated, "hello") == encode(templated, [{"role": "user", "content": "hello"}])


def test_beginning_leaves_the_turn_open_for_an_end(templated):
    opened, closed = encode(templated, CHAT, "beginning"), encode(templated, "    return", "end")
    assert templated.decode(opened) == "[system]Be short.\n[user]def f(x):\n"
    assert templated.decode(opened + closed) == (
        "[system]Be short.\n[user]def f(x):\n    return\n[assistant]"
    )


THINKS = TEMPLATE.replace(
    "[assistant]{% endif", "[assistant]{{ '' if thinks | default(true) else '<none>' }}{% endif"
)


def test_variables_reach_the_template(plain):
    plain.chat_template = THINKS
    assert plain.decode(encode(plain, "hello", "whole", thinks=False)) == "[user]hello\n[assistant]<none>"
    assert plain.decode(encode(plain, "hello", "end", thinks=False)) == "hello\n[assistant]<none>"
    for part in ("whole", "beginning"):
        (row,) = token_rows([CHAT], len(plain), plain, part, thinks=False)
        assert row.tolist() == encode(plain, CHAT, part, thinks=False)


@pytest.mark.parametrize("kind", [byte_tokenizer, smol_tokenizer, spaced_tokenizer])
def test_templates_without_thinking_keep_turns(kind):
    tokenizer = kind()
    assert chat_template.keeps_turns(tokenizer)
    tokenizer.chat_template = None
    assert chat_template.keeps_turns(tokenizer)


@pytest.mark.parametrize(
    ("template", "variables", "keeps"),
    [
        (THINKS, {}, True),
        (THINKS, {"thinks": False}, False),
        (
            TEMPLATE.replace("{{ m['content']", "{{ ' ' if m['role'] == 'assistant' }}{{ m['content']"),
            {},
            True,
        ),
        (TEMPLATE.replace("| trim", ".split('</think>')[-1]"), {}, False),
        ("{{ messages | length }}" + TEMPLATE, {}, False),
        (
            TEMPLATE + "{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}",
            {},
            False,
        ),
    ],
)
def test_keeps_turns_compares_renderings_with_and_without_a_later_turn(plain, template, variables, keeps):
    plain.chat_template = template
    assert chat_template.keeps_turns(plain, **variables) == keeps


def test_stable_prefix_ends_before_the_generation_prompt(plain):
    plain.chat_template = THINKS
    for variables in ({}, {"thinks": False}):
        ids = encode(plain, CHAT, "whole", **variables)
        end = stable_prefix_length(plain, CHAT, **variables)
        assert plain.decode(ids[:end]) == "[system]Be short.\n[user]def f(x):\n"
    plain.chat_template = None
    assert stable_prefix_length(plain, "def f(") == len(encode(plain, "def f("))


@pytest.mark.parametrize(
    ("template", "prompt", "part", "message"),
    [
        (None, CHAT, "whole", "chat messages need a tokenizer with a chat template"),
        (TEMPLATE, CHAT, "end", "a cache is continued by text or token ids"),
        (TEMPLATE, [{"role": "user"}], "whole", "a prompt is a text or a chat, .* got"),
        ("hello", "x", "beginning", "does not show the user's text exactly once"),
        (None, "x\udcff", "whole", "a prompt must be Unicode text, but character 1 is not: "),
        (TEMPLATE, [{"role": "user", "content": "\udcff"}], "whole", "a prompt must be Unicode text"),
        (PICKY, CHAT, "whole", r"does not take these messages \(of system, user\): no system role here$"),
        (PICKY, CHAT, "beginning", r"does not take these messages \(of system, user\): no system role here$"),
        ("{{ messages[0].nothing.more }}", "x", "whole", r"does not take these messages \(of user\): "),
        ("{{ broken", "x", "whole", r"does not take these messages \(of user\): "),
        ("{{ 1 / 0 }}", "x", "whole", r"\(of user\): ZeroDivisionError division by zero$"),
        ("{{ none + 1 }}", "x", "beginning", r"\(of user\): TypeError unsupported operand"),
        ("{{ 10.0 ** 400 }}", "x", "whole", r"\(of user\): OverflowError "),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "x", "whole", r"\(of user\): RecursionError "),
        ("{{ 'a' * 10**10 }}", "x", "whole", r"\(of user\): MemoryError$"),
        ("{{ 'a'|center(10**10) }}", "x", "end", r"\(of user\): MemoryError$"),
        ("{{ 'a' * 2000000 }}", "x", "whole", "it writes more than 1,0.* characters$"),
        ("{{ '\\ud800' }}", "x", "whole", "its text must be Unicode text"),
        (
            "{{ raise_exception('two\nlines ' ~ 'x' * 900) }}",
            "x",
            "whole",
            r"\(of user\): two lines x{289,}$",
        ),
        (
            {"rag": "", "tool_use": ""},
            "x",
            "whole",
            "none of the chat .* 'default', there are 'rag', 'tool_use'",
        ),
        ([{"name": "rag", "template": ""}], "x", "whole", "none of the chat templates .* there are 'rag'"),
        ("x" * 300_000, "x", "whole", "a chat template has 300,000 characters, expected at most 262,144$"),
        ([1], "x", "whole", r"a chat template must be a text, got \[1\]$"),
    ],
)
def test_prompts_that_cannot_be_encoded_raise_one_line(plain, template, prompt, part, message):
    plain.chat_template = template
    with pytest.raises(UserError, match=message) as caught:
        encode(plain, prompt, part)
    assert len(str(caught.value)) <= 500


@pytest.mark.slow
def test_endless_template_is_stopped(templated):
    templated.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match="it takes longer than 2 s, or more memory than 1024 MiB$"):
        encode(templated, "hello")
    templated.chat_template = TEMPLATE
    assert templated.decode(encode(templated, "hello")) == "[user]hello\n[assistant]"


@pytest.mark.parametrize("named", [dict, lambda **both: [{"name": k, "template": both[k]} for k in both]])
def test_default_of_several_templates_is_used(plain, named):
    plain.chat_template = named(rag="no", default=TEMPLATE)
    assert plain.decode(encode(plain, "hello")) == "[user]hello\n[assistant]"


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE + "{{ bos_token }}{{ tools }}{{ documents is none }}{{ thinking|default('unset') }}",
        "{{ messages|tojson }}{{ messages|tojson(indent=2, sort_keys=true) }}\n\n  {%- if true %}  \n x{% endif %}\n",
        "{% for m in messages %}{% if m.role == 'assistant' %}{% set x = 1 %}{% generation %}{{ m.content }}"
        "{{ m.reasoning_content }}{{ m.thinking }}{{ x }}{% endgeneration %}{% endif %}{% endfor %}",
        "{% set n = namespace(a=1) %}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{% set n.a = n.a + loop.index %}{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}{{ n.a }}"
        "{{ dict(a=1) }}{{ dict.fromkeys('ab') }}{{ strftime_now('%Y') }}{{ messages[1].keys()|list }}",
    ],
)
def test_templates_are_rendered_as_in_transformers(plain, template):
    plain.chat_template = template
    chat = [
        {"role": "system", "content": "a <b> & ü 😀"},
        {"role": "assistant", "content": "c", "reasoning": "d", "tool_calls": None},
        {"role": "user", "content": "e\n"},
    ]
    expected = plain.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert chat_template.templated(plain, chat) == expected


def test_panic_of_a_tokenizer_raises_one_line(plain):
    plain.backend_tokenizer.pre_tokenizer = Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(UserError, match="the tokenizer cannot read the text"):
        encode(plain, "a" * 40 + "b")
