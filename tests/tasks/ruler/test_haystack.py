"""Test where needles are hidden in haystacks."""

import re
from collections import Counter

import numpy as np

from kvjax.tasks import heldout_files
from kvjax.tasks.prompt import PromptEncoder, prompt_size
from kvjax.tasks.ruler import make_ruler_task
from kvjax.tasks.ruler.haystack import DEPTHS, LONGEST, PASSAGE, Essays, Lines, split_sentences


def test_depths_are_uniform_over_the_sentences():
    rng = np.random.default_rng(0)
    sentences = ["word " * int(rng.integers(1, 12)) + "end." for _ in range(400)]
    text = " ".join(sentences)
    essays = Essays(text, "test")
    assert tuple(round(100 * i / 39) for i in range(40)) == DEPTHS
    depths = []
    for _ in range(500):
        needles = [f"Needle {i}." for i in range(4)]
        hidden = essays.hide(rng, len(text.split()), needles)
        assert re.sub(r" ?Needle \d\.", "", hidden).strip() == text
        assert all(re.search(rf"(end\. |^|\. ){needle}($| )", hidden) for needle in needles)
        places = [hidden.index(needle) for needle in needles]
        assert places == sorted(places)
        found = [hidden[:place].count("end.") / 4 for place in places]
        assert len(set(found)) == 4
        depths += found
    assert set(depths) == set(DEPTHS)
    # without replacement, a count varies by less than a binomial one
    assert all(abs(count - 50) < 4 * np.sqrt(50) for count in Counter(depths).values())


def test_a_short_text_is_repeated():
    essays = Essays("One two. Three four five.\n\nSix.", "test", depths=(50,))
    hidden = essays.hide(np.random.default_rng(0), 14, ["Needle."])
    # seven sentences begin within 14 words, so the needle stands before the fourth
    assert hidden == (
        "One two. Three four five.\n\nSix.\n\nNeedle.\n\nOne two. Three four five.\n\nSix.\n\nOne two."
    )
    assert Essays("One two. Three", "test", depths=(100,)).hide(np.random.default_rng(0), 3, ["N."]) == (
        "One two. Three N."
    )


def test_a_short_file_of_essays_is_repeated(smol, tmp_path):
    (tmp_path / "short.txt").write_text("The owl is grey. It sits on a branch of the old tree.")
    task = make_ruler_task("niah_multiquery", smol, {"essays": tmp_path / "short.txt"})
    sample = task.example(0, 2048)
    assert 0.98 * 2048 < prompt_size(sample, PromptEncoder(smol)) <= 2048
    assert sample.context.count("It sits on a branch of the old tree.") > 50
    assert all(sample.context.count(value) == 1 for value in sample.questions[0].expected)


def test_needles_are_hidden_before_random_lines_in_order():
    rng, places = np.random.default_rng(0), []
    for _ in range(300):
        lines = Lines().hide(rng, 20, ["x", "y"]).split("\n")
        assert len(lines) == 22
        assert lines.count(PASSAGE) == 20
        one, two = lines.index("x"), lines.index("y")
        assert lines[one + 1] == lines[two + 1] == PASSAGE
        assert one < two
        places += [one, two - 1]
    counts = np.bincount(places)
    assert len(counts) == 20
    assert np.abs(counts - 30).max() < 4 * np.sqrt(30)


def test_sentences_join_to_the_text():
    text = "\n\n".join(heldout_files().values()).strip()
    assert "".join(split_sentences(text)) == text
    assert split_sentences('One. "Two!" she\nsaid. Three\n\n  Four 4.5 five') == [
        "One. ",
        '"Two!" ',
        "she\nsaid. ",
        "Three\n\n  ",
        "Four 4.5 five",
    ]
    lines = "\n".join(["a line without an end"] * 100)
    assert max(map(len, split_sentences(lines))) < LONGEST
