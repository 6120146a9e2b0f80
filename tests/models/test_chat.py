"""Text and chats as tokens: what the chat template makes of them, whole and in two parts."""

import pytest

from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.models import load_tokenizer
from kvjax.models.chat import encode

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


def test_a_text_without_a_template_is_its_tokens(plain):
    assert encode(plain, "def f(") == plain("def f(")["input_ids"]
    both = encode(plain, "def f(", "beginning") + encode(plain, "x):", "end")
    assert plain.decode(both) == "<|begin|>def f(x):"


def test_a_text_is_the_user_s_turn(templated):
    assert templated.decode(encode(templated, " hello ")) == "[user]hello\n[assistant]"
    assert encode(templated, "hello") == encode(templated, [{"role": "user", "content": "hello"}])


def test_a_beginning_leaves_the_turn_open_for_its_end(templated):
    opened, closed = encode(templated, CHAT, "beginning"), encode(templated, "    return", "end")
    assert templated.decode(opened) == "[system]Be short.\n[user]def f(x):\n"
    assert templated.decode(opened + closed) == (
        "[system]Be short.\n[user]def f(x):\n    return\n[assistant]"
    )


@pytest.mark.parametrize(
    ("template", "prompt", "part", "says"),
    [
        (None, CHAT, "whole", "chat messages need a tokenizer with a chat template"),
        (TEMPLATE, CHAT, "end", "a cache is continued by text or token ids"),
        (TEMPLATE, [{"role": "user"}], "whole", "a prompt is a text or a chat, .* got"),
        ("hello", "x", "beginning", "does not show the user's text exactly once"),
        (None, "x\udcff", "whole", "a prompt must be Unicode text, and character 1 is none: "),
        (TEMPLATE, [{"role": "user", "content": "\udcff"}], "whole", "a prompt must be Unicode text"),
        (PICKY, CHAT, "whole", r"does not take these messages \(of system, user\): no system role here$"),
        (PICKY, CHAT, "beginning", r"does not take these messages \(of system, user\): no system role here$"),
        ("{{ messages[0].nothing.more }}", "x", "whole", r"does not take these messages \(of user\): "),
        ("{{ broken", "x", "whole", r"does not take these messages \(of user\): "),
    ],
)
def test_what_cannot_be_encoded_is_one_line(plain, template, prompt, part, says):
    plain.chat_template = template
    with pytest.raises(UserError, match=says):
        encode(plain, prompt, part)
