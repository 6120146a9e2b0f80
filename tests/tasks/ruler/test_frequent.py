"""Test the tasks of counted words: how common each word is."""

import re
from collections import Counter

import numpy as np
import pytest

from kvjax.tasks.ruler import make_ruler_task
from kvjax.tasks.ruler.frequent import CodedWords, CommonWords
from kvjax.tasks.ruler.words import ADJECTIVES, NOUNS

LENGTHS = (1500, 5000)  # the word list is a longer one from a length between these two


@pytest.mark.parametrize(("length", "words", "example"), [(1500, (6, 1), (3, 1)), (5000, (30, 3), (10, 3))])
def test_common_words_have_their_numbers_of_occurrences(length, words, example, builtin):
    task = make_ruler_task("cwe", builtin)
    for seed in range(3):
        sample = task.example(seed, length)
        (question,) = sample.questions
        shown, asked = re.split(rf"{re.escape(question.text + question.answer_prefix)}.*\n\n", sample.context)
        lists = []
        for text, (often, seldom) in ((shown, example), (asked, words)):
            _, entries, _ = re.split(r"\n\n|\n$", text)
            assert re.fullmatch(r"(\d+\. [a-z]+ )*\d+\. [a-z]+", entries)
            numbers, items = entries.split()[::2], entries.split()[1::2]
            assert numbers == [f"{number}." for number in range(1, len(items) + 1)]
            counts = Counter(items)
            assert set(counts.values()) == {often, seldom}
            lists.append({word: count == often for word, count in counts.items()})
        assert not lists[0].keys() & lists[1].keys()
        assert len(lists[0]) == (40 if length >= 4096 else 20)
        assert len(lists[1]) == 10 + task.units(seed, length)
        assert {word for word, often in lists[1].items() if often} == set(question.expected)
        solved = re.search(r"common words are: (.*)\n\n", sample.context)
        assert solved is not None
        answer = re.findall(r"(\d+)\. ([a-z]+)", solved[1])
        assert [number for number, _ in answer] == [str(number) for number in range(1, 11)]
        assert {word for _, word in answer} == {word for word, often in lists[0].items() if often}


@pytest.mark.parametrize("units", [300, 900, 1500, 12000])
def test_lists_have_distinct_words_at_every_length(units):
    """English words are used as long as there are enough."""
    writer = CommonWords(131072)
    assert writer.supply.most > 12000
    for seed in range(2):
        sample = writer.write(seed, units)
        listed = sample.context.split("\n\n")[-1].split()[1::2]
        distinct = set(listed)
        assert len(distinct) == units + 10
        assert all(re.fullmatch("[a-z]+", word) for word in distinct)
        solved = sample.context.split("\n\n")[1].split()
        english = {*ADJECTIVES, *NOUNS}
        invented = distinct - english
        assert distinct & {*ADJECTIVES}
        assert distinct & {*NOUNS}
        if units + 10 + 40 <= len(english):
            assert not invented
        else:
            assert english <= distinct | set(solved)
        assert all(re.fullmatch("([^aeiou][aeiou]){2}[^aeiou]", word) for word in invented)


@pytest.mark.parametrize("length", LENGTHS)
def test_coded_words_follow_the_zeta_law(length, builtin):
    task = make_ruler_task("fwe", builtin)
    for seed in range(3):
        sample = task.example(seed, length)
        counts = Counter(sample.context.split("\n\n")[1].split())
        ranks = np.arange(1, (length - 50) // 50 + 1)
        expected = np.floor(task.units(seed, length) * 6 / np.pi**2 / ranks**2).astype(int)
        ranked = counts.most_common()
        assert [count for _, count in ranked] == expected[expected > 0].tolist()
        assert tuple(word for word, _ in ranked[:4]) == ("...", *sample.questions[0].expected)
        assert ranked[3][1] > ranked[4][1]
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])


def test_the_fourth_coded_word_always_leads_the_fifth():
    writer = CodedWords(1000)
    for units in range(writer.fewest, 200):
        sample = writer.write(0, units)
        counts = Counter(sample.context.split("\n\n")[1].split()).most_common()
        assert counts[3][1] > (counts[4][1] if len(counts) > 4 else 0)


def test_the_number_of_coded_words_is_a_fiftieth_of_the_text(smol):
    """The text has the length without the answer (50 tokens) and the chat template."""
    before = "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\n"
    size = len(smol(f"{before}<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    for chat, left in ((True, 1520 - 50 - size), (False, 1520 - 50)):
        sample = make_ruler_task("fwe", smol, chat=chat).writer(1520).write(0, 10**5)
        assert len(set(sample.context.split("\n\n")[1].split())) == left // 50
    assert (1520 - 50 - size) // 50 < (1520 - 50) // 50
