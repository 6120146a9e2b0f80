"""Test chats about facts: every answer is in the context, copies of the texts lie beside them, and names have no word
of RULER's keys."""

import json

import pytest

from kvjax.errors import UserError
from kvjax.tasks.ruler.words import ADJECTIVES, NOUNS
from train.retrieval_chats import COLORS, FIRST_NAMES, LAST_NAMES, SIZES, THINGS, main


def test_every_answer_is_a_fact_of_the_context(tmp_path):
    text, out = tmp_path / "text", tmp_path / "out"
    text.mkdir()
    (text / "a.txt").write_text("It was a dark night.\n" * 400)
    main(["--text", str(text), "--out", str(out), "--chats", "12"])
    assert (out / "a.txt").read_text() == (text / "a.txt").read_text()
    chats = [json.loads(file.read_text())["messages"] for file in sorted(out.glob("chat-*.jsonl"))]
    assert [len(chat) for chat in chats] == [2 * sizes.questions for sizes in SIZES] * 6
    assert len({"dark night" in chat[0]["content"] for chat in chats}) == 2, (
        "lists of facts, and facts in text"
    )
    for chat in chats:
        assert [message["role"] for message in chat] == ["user", "assistant"] * (len(chat) // 2)
        context, first_question = chat[0]["content"].split("\n\n")
        for index, answer in enumerate(chat[1::2]):
            question = first_question if index == 0 else chat[2 * index]["content"]
            value = answer["content"].removeprefix("It reads ").rstrip(".").split()[-1]
            assert question.endswith("?")
            assert value in context
    with pytest.raises(UserError, match="out already exists"):
        main(["--text", str(text), "--out", str(out)])


def test_no_name_has_a_word_of_rulers_keys():
    names = f"{THINGS} {COLORS} {FIRST_NAMES} {LAST_NAMES}".lower().split()
    assert not {*names} & {*ADJECTIVES, *NOUNS}
    assert len({*names}) == len(names)
