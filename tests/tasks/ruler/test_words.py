"""Test the words that tasks are written with."""

import re

from kvjax.tasks.ruler.words import ADJECTIVES, NOUNS, invented_words


def test_no_word_is_part_of_another():
    words = [*ADJECTIVES, *NOUNS]
    assert len(words) == len(set(words)) > 900
    text = " ".join(words)
    assert all(text.count(word) == 1 for word in words)
    assert all(re.fullmatch("[a-z]+", word) for word in words)
    invented = invented_words()
    assert len(invented) == len(set(invented)) > 60_000
    assert {len(word) for word in invented} == {5}
    sounds = re.compile("([bdfgjklmnrstvw][aeiou]){2}[bdfgjklmnrstvw]")
    assert all(sounds.fullmatch(word) for word in invented[::97])
    assert all(word not in text for word in invented[::97])
    joined = " ".join(invented)
    assert not any(word in joined for word in words)
