"""Test rows of RULER's own data as examples, and the errors for damaged ones."""

import pytest

from kvjax.errors import UserError
from kvjax.tasks import PromptEncoder
from kvjax.tasks.ruler import RULER_TASKS, make_ruler_task, published_examples
from tests.tasks.ruler.rows import HUB, PUBLISHED, write_rows


def test_published_data_is_cut_before_its_question(tmp_path):
    whole = {**PUBLISHED, "input": PUBLISHED["input"] + PUBLISHED["answer_prefix"]}
    bare = {"input": "docs\n\nQuestion: Who?\nAnswer:", "outputs": ["A", "B"], "length": 9}
    first, second, third = published_examples(
        write_rows(tmp_path, PUBLISHED, whole, bare), "niah_multivalue", 99
    )
    assert first == second
    assert not first.as_is
    assert first.context == "Some numbers are hidden.\nWhat is hidden?\nfiller filler\n"
    (question,) = first.questions
    assert question.text == "What is the number for x in the text?"
    assert (question.answer_prefix, question.expected) == (" The number is", ("123", "456"))
    assert (question.scoring, question.reserved, question.kind) == ("all", 128, "niah_multivalue")
    assert (third.context, third.questions[0].text) == ("docs\n\n", "Question: Who?\nAnswer:")
    write_rows(tmp_path, bare, file="qa_1/validation.jsonl")
    (asked,) = published_examples(tmp_path, "qa_1", 99)[0].questions
    assert (asked.scoring, asked.reserved) == ("any", 32)


@pytest.mark.parametrize("text", ["no question", "a\nWhat is it?\n" + "far from the end. " * 100])
def test_published_data_without_a_question_at_its_end_is_not_cut(text, tmp_path):
    write_rows(tmp_path, {"input": text, "outputs": ["1"]}, file="vt.jsonl")
    (sample,) = published_examples(tmp_path, "vt", 99)
    assert sample.context == ""
    assert sample.questions[0].text == text


def test_a_single_answer_may_be_a_string(tmp_path):
    (sample,) = published_examples(write_rows(tmp_path, HUB | {"answer": "123"}), "niah_multivalue", 99)
    assert sample.questions[0].expected == ("123",)


@pytest.mark.parametrize(
    ("template", "templated"),
    [
        ("{}", False),
        ("[INST] {} [/INST]", True),
        ("<s>[INST] {} [/INST]", True),
        ("A chat between a curious user and an assistant. USER: {} ASSISTANT:", True),
        ("You are a helpful assistant. USER: {} ASSISTANT: ", True),
        ("<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>{}<|END_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", True),
        ("[gMASK]sop<|user|> \n {}<|assistant|> \n ", True),
        ("User: hi\n\nAssistant: Hi.\n\nUser: {}\n\nAssistant:", True),
        ("<|user|>\n{}<|end|>\n<|assistant|>\n", True),
        ("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>", True),
        ("<SPECIAL_10>System\n\n<SPECIAL_11>User\n{}\n<SPECIAL_11>Assistant\n", True),
        ("<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n", True),
        ("<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", True),
    ],
)
def test_a_chat_template_in_published_data_is_detected(template, templated, tmp_path, smol):
    """If there is one, no template is applied to the text."""
    row = PUBLISHED | {"input": template.format(PUBLISHED["input"])}
    (sample,) = published_examples(write_rows(tmp_path, row), "niah_multivalue", 99)
    assert sample.as_is is templated
    prompt = PromptEncoder(smol)(sample)
    text = smol.decode([*prompt.context, *prompt.questions[0].prompt])
    if templated:
        assert text == row["input"] + PUBLISHED["answer_prefix"]
    else:
        turn = smol.apply_chat_template(
            [{"role": "user", "content": row["input"]}], tokenize=False, add_generation_prompt=True
        )
        assert text == turn + PUBLISHED["answer_prefix"].lstrip()


@pytest.mark.parametrize("name", RULER_TASKS)
def test_no_task_looks_like_a_chat_template(name, builtin, files, tmp_path):
    sample = make_ruler_task(name, builtin, files).example(0, 1500)
    asked = sample.questions[0].text + sample.questions[0].answer_prefix
    write_rows(tmp_path, {"input": sample.context + asked, "outputs": ["1"]}, file=f"{name}.jsonl")
    (read,) = published_examples(tmp_path, name, 1500)
    assert not read.as_is


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "x", "length": 1}, "line 2 has no field `outputs`, it has input, length"),
        ({"input": "x", "outputs": "1"}, "line 2: expected `outputs` to be a list of strings, got 1"),
        ({"input": 1, "outputs": ["1"]}, "line 2: expected `input` to be a string, got 1"),
        (
            {"input": "x", "outputs": ["1"], "answer_prefix": 2},
            "expected `answer_prefix` to be a string, got 2",
        ),
        ({"context": "x", "answer": ["1"]}, "line 2 has no field `question`, it has context, answer"),
        ({"context": "x", "question": "y", "answer": []}, "expected `answer` to be a list of strings, got "),
        (HUB | {"max_new_tokens": 0}, "line 2: `max_new_tokens` must be a whole number of at least 1, got 0"),
        ("[1]", r"line 2 is no JSON object, it starts \[1\]"),
        ("{", "line 2 is no JSON object"),
    ],
)
def test_errors_name_damaged_rows(row, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        published_examples(write_rows(tmp_path, PUBLISHED, row), "niah_multivalue", 99)
    assert str(error.value).startswith(f"--data ruler {tmp_path}")
