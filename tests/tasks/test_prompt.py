"""Test examples: their scores, and token ids in which the context's do not depend on the question."""

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kvjax.builtin import builtin_model
from kvjax.errors import UserError
from kvjax.tasks import Example, ExampleQuestion, PromptEncoder
from kvjax.tasks.prompt import all_present, prompt_size
from kvjax.tasks.ruler import make_ruler_task


def question(text="What is x?", prefix="\nIt is", expected=("Abc", "12"), scoring="all", reserved=7):
    return ExampleQuestion(text, prefix, expected, scoring, reserved, "test")


@pytest.fixture(scope="module")
def plain():
    return Tokenizer.from_file(str(builtin_model() / "tokenizer.json"))


@pytest.fixture(scope="module")
def chat(plain):
    """Return the same tokenizer as transformers wraps it, with a template that trims and can think."""
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        chat_template=(
            "{{ bos_token }}{% for m in messages %}<|question|>{{ m['content'] | trim }}<|end|>\n{% endfor %}"
            "<|separator|>\n{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
        ),
    )


@pytest.mark.parametrize(
    ("answer", "scoring", "score"),
    [
        ("it is ABC and 123", "all", 1.0),
        ("abc", "all", 0.5),
        ("ab c", "all", 0.0),
        ("", "all", 0.0),
        ("abc", "any", 1.0),
        ("the 12th", "any", 1.0),
        ("none", "any", 0.0),
    ],
)
def test_answers_are_scored_by_the_expected_strings_in_them(answer, scoring, score):
    assert question(scoring=scoring).score(answer) == score


def test_a_prompt_has_opening_token_context_question_and_prefix(plain):
    example = Example("Some text.\n", (question(), question("Why?", "")))
    prompt = PromptEncoder(plain)(example)
    whole = plain.encode("Some text.\nWhat is x?\nIt is").ids
    assert [*prompt.context, *prompt.questions[0].prompt] == whole
    assert whole[0] == plain.token_to_id("<|begin|>")
    assert prompt.context.dtype == prompt.questions[0].prompt.dtype == np.int32
    assert plain.decode(prompt.questions[1].prompt.tolist()) == "Why?"
    assert prompt_size(example, PromptEncoder(plain)) == len(whole) + 7


def test_the_chat_template_surrounds_the_users_text(plain, chat):
    example = Example("Some text.\n", (question(),))
    encode = PromptEncoder(chat)
    assert encode.chat
    prompt = encode(example)
    turn = chat.apply_chat_template(
        [{"role": "user", "content": "Some text.\nWhat is x?"}],
        add_generation_prompt=True,
        enable_thinking=False,
        return_dict=False,
    )
    prefix = plain.encode("It is", add_special_tokens=False).ids
    assert [*prompt.context, *prompt.questions[0].prompt] == [*turn, *prefix]
    # without the template the ids are those of the tokenizer alone
    assert not PromptEncoder(chat, chat=False).chat
    one, other = PromptEncoder(chat, chat=False)(example), PromptEncoder(plain)(example)
    np.testing.assert_array_equal(one.context, other.context)
    np.testing.assert_array_equal(one.questions[0].prompt, other.questions[0].prompt)


def test_a_text_with_a_template_gets_no_second_template(plain, chat):
    text = "<|begin|><|question|>Some text.\nWhat is x?<|end|>\n<|separator|>\n It is"
    cut = text.index("What is x?")
    asked = question(text[cut : -len(" It is")], " It is")
    for encode in (PromptEncoder(chat), PromptEncoder(chat, chat=False), PromptEncoder(plain)):
        prompt = encode(Example(text[:cut], (asked,), as_is=True))
        ids = [*prompt.context, *prompt.questions[0].prompt]
        assert ids == plain.encode(text, add_special_tokens=False).ids
        # the opening token is added where the text does not spell it
        bare = encode(Example(text[len("<|begin|>") : cut], (asked,), as_is=True))
        assert [*bare.context, *bare.questions[0].prompt] == ids


def test_the_template_size_excludes_the_users_text(plain, chat):
    around = plain.encode("<|begin|><|question|><|end|>\n<|separator|>\n", add_special_tokens=False).ids
    assert PromptEncoder(chat).template_size == len(around)
    assert PromptEncoder(chat, chat=False).template_size == PromptEncoder(plain).template_size == 0


def test_the_right_answer_is_encoded_as_a_continuation(plain):
    """The answer has all expected strings, or the first one where any of them is enough."""
    share = question(scoring=lambda answer, expected: all_present(answer, expected))
    questions = question(), question(scoring="any"), question("Why?\n", "", ("7",)), share
    prompt = PromptEncoder(plain)(Example("Some text.\n", questions))
    assert [plain.decode(answer.tolist()) for answer in (q.answer for q in prompt.questions)] == [
        " Abc, 12",
        " Abc",
        "7",
        " Abc, 12",
    ]
    whole = plain.encode("Some text.\nWhat is x?\nIt is Abc, 12").ids
    assert [*prompt.context, *prompt.questions[0].prompt, *prompt.questions[0].answer] == whole


def test_the_contexts_tokens_do_not_depend_on_the_question(plain, chat):
    """This also holds where a token of the whole text would reach across the cut."""
    for tokenizer in (plain, chat):
        encode = PromptEncoder(tokenizer)
        alone = encode(Example("self.retur", (question(""),)))
        joined = encode(Example("self.retur", (question("n None"), question("ning"))))
        np.testing.assert_array_equal(alone.context, joined.context)
        assert plain.decode(joined.questions[0].prompt.tolist()).startswith("n None")
    assert plain.encode("return").ids != [*plain.encode("retur").ids, *plain.encode("n").ids[1:]]


def test_tasks_are_cut_between_tokens_of_the_whole_text(plain):
    encode = PromptEncoder(plain)
    for name in ("niah_single_1", "niah_multivalue", "cwe", "fwe", "vt"):
        example = make_ruler_task(name, plain).example(0, 1500)
        prompt, asked = encode(example), example.questions[0]
        whole = plain.encode(example.context + asked.text + asked.answer_prefix).ids
        assert [*prompt.context, *prompt.questions[0].prompt] == whole


def test_a_template_without_the_users_text_is_refused(plain):
    silent = PreTrainedTokenizerFast(tokenizer_object=plain, chat_template="hello")
    with pytest.raises(UserError, match="does not show the user's text exactly once"):
        PromptEncoder(silent)
    first = PreTrainedTokenizerFast(tokenizer_object=plain, chat_template="{{ messages[0]['content'] }}")
    with pytest.raises(UserError, match="does not show the turns of a conversation exactly once"):
        _ = PromptEncoder(first).next_turn


def test_the_text_between_turns_comes_from_the_template(plain, smol):
    """The texts are the user's and the model's turns of a conversation."""
    encode, texts = PromptEncoder(smol), ("One?", "Two.", "Three?")
    messages = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant", "user"), texts, strict=True)
    ]
    whole = smol.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert texts[0] + encode.answer_turn(texts[1]) + texts[2] in whole
    assert encode.answer_turn("Two.").endswith("Two." + encode.next_turn)
    assert PromptEncoder(plain).answer_turn("Two.") == "Two.\n\n"


def test_answers_are_scored_as_text(plain, chat):
    for tokenizer in (plain, chat):
        sample = PromptEncoder(tokenizer)(Example("Some text.\n", (question(),)))
        (asked,) = sample.questions
        assert (asked.answer_tokens, asked.kind, asked.stops, asked.teacher_forced) == (
            7,
            "test",
            True,
            False,
        )
        assert asked.score(asked.answer) == 1
        half = plain.encode(" abc 1", add_special_tokens=False).ids
        assert asked.score(np.array(half, np.int32)) == 0.5
        # a special token is not text
        split = [*half, plain.token_to_id("<|end|>"), *plain.encode("2", add_special_tokens=False).ids]
        assert asked.score(np.array(split, np.int32)) == 1
        assert sample.separable
        assert not PromptEncoder(tokenizer)(Example("", (question(),))).separable


def test_without_end_drops_the_last_tokens(plain, chat):
    text = "Nine grey owls sit on the branches."
    for encode in (PromptEncoder(plain), PromptEncoder(chat)):
        ids = plain.encode(text, add_special_tokens=False).ids
        assert plain.encode(encode.without_end(text, 3), add_special_tokens=False).ids == ids[:-3]
        assert encode.without_end(text, len(ids)) == encode.without_end(text, 99) == ""
