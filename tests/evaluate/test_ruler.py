"""RULER's tasks by structure: lengths, how often everything occurs, where it is hidden, and repetition."""

import re
from collections import Counter

import numpy as np
import pytest

from kvjax.evaluate.tasks import heldout_files
from kvjax.evaluate.tasks.ruler import RULER_TASKS, Files, make_needle_task, make_ruler_task, ruler_samples
from kvjax.evaluate.tasks.ruler.haystack import DEPTHS, LONGEST, Essays, Lines, split_sentences
from kvjax.evaluate.tasks.ruler.needles import listed
from kvjax.evaluate.tasks.ruler.words import ADJECTIVES, NOUNS
from kvjax.evaluate.tasks.text_prompt import PromptEncoder, prompt_size
from tests.evaluate.ruler_inputs import builtin, chatty, files

__all__ = ["builtin", "chatty", "files"]  # fixtures
LENGTHS = (1500, 5000)  # on both sides of the length from which the word list is a longer one


@pytest.fixture(params=["builtin", "chatty"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("name", RULER_TASKS)
def test_as_many_units_as_fit_and_never_one_too_many(name, tokenizer, files):
    task, encode = make_ruler_task(name, tokenizer, files), PromptEncoder(tokenizer)
    for length in LENGTHS:
        recipe = RULER_TASKS[name].open(name, files)(length)
        counts = [task.units(seed, length) for seed in range(4)]
        for seed, count in enumerate(counts):
            sample = task.sample(seed, length)
            assert sample == recipe.write(seed, count)
            size = prompt_size(sample, encode)
            assert 0.85 * length < size <= length
            # the count is that of seed 0, or less where it would not fit
            assert count <= counts[0]
            if seed == 0 or count < counts[0]:
                assert prompt_size(recipe.write(seed, count + 1), encode) > length


def test_a_question_s_tokens_are_those_of_a_text_s_middle(chatty):
    """This tokenizer puts a space before any text, but the question follows the context."""
    prompt = PromptEncoder(chatty, chat=False)(make_ruler_task("vt", chatty).sample(0, 1500))
    context = chatty.convert_ids_to_tokens(prompt.context.tolist())
    asked = chatty.convert_ids_to_tokens(prompt.questions[0].tolist())
    assert context[0] == "<s>"
    assert context[1].startswith("▁")
    assert not asked[0].startswith("▁")
    assert "</s>" not in context + asked


@pytest.mark.parametrize("name", RULER_TASKS)
def test_a_seed_says_everything(name, builtin, files):
    first = ruler_samples(name, builtin, length=1500, samples=3, seed=5, files=files)
    assert first == ruler_samples(name, builtin, length=1500, samples=3, seed=5, files=files)
    shifted = ruler_samples(name, builtin, length=1500, samples=3, seed=6, files=files)
    assert first[1:] == shifted[:-1]
    assert len({sample.context for sample in first}) == len({sample.questions for sample in first}) == 3


@pytest.mark.parametrize("name", RULER_TASKS)
def test_no_answer_is_in_its_question_and_the_context_ends_with_one_line_break(name, builtin, files):
    for sample in ruler_samples(name, builtin, length=1500, samples=5, files=files):
        (question,) = sample.questions
        assert sample.separable
        assert not sample.published
        assert re.search(r"\S\n\Z", sample.context)
        assert question.text[0].isalpha()
        assert question.answer_prefix == "\n" + question.answer_prefix.strip()
        assert question.score(question.text + question.answer_prefix) == 0
        assert question.score(sample.context) == 1
        assert (question.kind, question.reserved) == (name, RULER_TASKS[name].reserved)


@pytest.mark.parametrize(
    ("name", "keys", "values", "asked"),
    [
        ("niah_single_1", 1, 1, 1),
        ("niah_single_2", 1, 1, 1),
        ("niah_single_3", 1, 1, 1),
        ("niah_multikey_1", 4, 1, 1),
        ("niah_multikey_2", None, 1, 1),
        ("niah_multikey_3", None, 1, 1),
        ("niah_multivalue", 1, 4, 1),
        ("niah_multiquery", 4, 1, 4),
    ],
)
def test_needles_are_hidden_once_and_those_asked_for_are_expected(name, keys, values, asked, builtin):
    word, number, uuid = (
        r"[a-z]+-[a-z]+",
        r"\d{7}",
        r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}",
    )
    key = uuid if name == "niah_multikey_3" else word
    value = uuid if name in ("niah_multikey_3", "niah_single_3") else number
    kind = "UUID" if value == uuid else "number"
    task = make_ruler_task(name, builtin)
    for seed in range(5):
        sample = task.sample(seed, 1500)
        (question,) = sample.questions
        found = re.findall(rf"A secret {kind} of ({key}) is ({value})\.", sample.context)
        count = keys or task.units(seed, 1500)
        assert len(found) == count * values == len({v for _, v in found})
        assert len({k for k, _ in found}) == count
        assert all(sample.context.count(v) == 1 for _, v in found)
        assert len(question.expected) == asked * values
        wanted = {k for k, v in found if v in question.expected}
        assert [v for k, v in found if k in wanted] == [v for _, v in found if v in question.expected]
        plural = len(question.expected) > 1
        assert f"secret {kind}{'s' if plural else ''} of " in question.text
        assert sorted(re.findall(key, question.text)) == sorted(wanted)
        if not keys:
            assert sample.context.count("\n") == count + 2  # nothing but needles


def test_a_chain_of_variables_is_in_order(builtin):
    for sample in ruler_samples("vt", builtin, length=1500, samples=5):
        (question,) = sample.questions
        lines = re.findall(r"^Set ([A-Z]{5}) = (\w{5})$", sample.context, re.MULTILINE)
        assert tuple(name for name, _ in lines) == question.expected
        value = lines[0][1]
        assert value.isdigit()
        assert value in question.text
        assert sample.context.count(value) == 1
        assert [source for _, source in lines[1:]] == list(question.expected[:-1])
        assert [sample.context.count(name) for name in question.expected] == [2, 2, 2, 2, 1]


@pytest.mark.parametrize(("length", "words", "example"), [(1500, (6, 1), (3, 1)), (5000, (30, 3), (10, 3))])
def test_common_words_are_as_common_as_defined(length, words, example, builtin):
    task = make_ruler_task("cwe", builtin)
    for seed in range(3):
        sample = task.sample(seed, length)
        (question,) = sample.questions
        shown, asked = re.split(r"are .*\.\n\n", sample.context)
        lists = []
        for text, (often, seldom) in ((shown, example), (asked, words)):
            entries = re.findall(r"^(\d+)\. ([a-z-]+)$", text, re.MULTILINE)
            assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
            counts = Counter(word for _, word in entries)
            assert set(counts.values()) == {often, seldom}
            lists.append({word: count == often for word, count in counts.items()})
        assert not lists[0].keys() & lists[1].keys()
        assert len(lists[0]) == (40 if length >= 4096 else 20)
        assert len(lists[1]) == 10 + task.units(seed, length)
        assert {word for word, often in lists[1].items() if often} == set(question.expected)
        solved = re.search(r"are (.*)\.\n\n", sample.context)
        assert solved is not None
        assert set(solved[1].split(", ")) == {word for word, often in lists[0].items() if often}


def test_words_are_single_where_the_list_surely_lasts_and_pairs_elsewhere():
    for length, single in ((1500, True), (4096, True), (8192, True), (16384, False), (131072, False)):
        recipe = RULER_TASKS["cwe"].open("cwe", Files())(length)
        sample = recipe.write(0, 300)
        assert all(("-" not in word) is single for word in sample.questions[0].expected)
        assert recipe.supply.most > length / 3 / (1 if length < 4096 else 3) - 400


@pytest.mark.parametrize("length", LENGTHS)
def test_coded_words_follow_the_zeta_law(length, builtin):
    task = make_ruler_task("fwe", builtin)
    for seed in range(3):
        sample = task.sample(seed, length)
        counts = Counter(sample.context.split("\n\n")[1].split())
        ranks = np.arange(1, length // 50 + 1)
        expected = np.floor(task.units(seed, length) * 6 / np.pi**2 / ranks**2).astype(int)
        ranked = counts.most_common()
        assert [count for _, count in ranked] == expected[expected > 0].tolist()
        assert tuple(word for word, _ in ranked[:4]) == ("...", *sample.questions[0].expected)
        assert ranked[3][1] > ranked[4][1]
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])


def test_the_fourth_coded_word_always_leads_the_fifth():
    recipe = RULER_TASKS["fwe"].open("fwe", Files())(1000)
    for units in range(recipe.fewest, 200):
        sample = recipe.write(0, units)
        counts = Counter(sample.context.split("\n\n")[1].split()).most_common()
        assert counts[3][1] > (counts[4][1] if len(counts) > 4 else 0)


def test_documents_are_the_right_ones_then_near_ones_then_any(files, builtin):
    for name, n_right, n_near in (("qa_1", 1, 4), ("qa_2", 2, 3)):
        recipe = RULER_TASKS[name].open(name, files)(0)
        questions = set()
        for seed in range(10):
            for units in (1, 4, 5, 30):
                sample = recipe.write(seed, units)
                (question,) = sample.questions
                documents = re.split(r"Document (\d+):\n", sample.context)[1:]
                texts = [text.strip() for text in documents[1::2]]
                assert documents[::2] == [str(i) for i in range(1, len(texts) + 1)]
                assert len(set(texts)) == len(texts) == max(units, n_right)
                i = int(re.findall(r"\d+", question.expected[0])[0])
                siblings = [t for t in texts if f"guild{i}x" in t or f" m{i}n" in t]
                assert len(siblings) == min(len(texts), n_right + n_near)
                assert sum(question.expected[0] in text for text in texts) == 1
                if name == "qa_2":
                    assert any(text.startswith(f"{NOUNS[i]} 1\n") for text in texts)
            questions.add(question.text)
        assert len(questions) == 10
        first = 0
        for seed in range(100):
            sample = recipe.write(seed, 5)
            first += sample.questions[0].expected[0] in sample.context.partition("Document 2:")[0]
        assert 8 < first < 32  # of 100, at one place in five


def test_depths_are_uniform_and_needles_stand_at_the_nearest_border():
    rng = np.random.default_rng(0)
    text = " ".join("word " * int(rng.integers(1, 12)) + "end." for _ in range(400))
    essays = Essays(text, "test")
    grid = np.array(DEPTHS)
    np.testing.assert_allclose(grid, np.linspace(0, 1, 40))
    depths = []
    for _ in range(500):
        needles = [f"Needle {i}." for i in range(4)]
        hidden = essays.hide(rng, 400, needles)
        assert re.sub(r" ?Needle \d\.", "", hidden).strip() == text
        assert all(re.search(rf"(end\. |^|\. ){needle}($| )", hidden) for needle in needles)
        places = [hidden.index(needle) for needle in needles]
        assert places == sorted(places)
        exact = [(place - 10 * i) / len(text) for i, place in enumerate(places)]
        nearest = [int(np.abs(grid - depth).argmin()) for depth in exact]
        assert np.abs(grid[nearest] - exact).max() < 40 / len(text)
        assert len(set(nearest)) == 4
        depths += nearest
    counts = np.bincount(depths, minlength=40)
    assert len(counts) == 40
    # drawn without repetition, a count varies by less than a binomial one
    assert np.abs(counts - 50).max() < 4 * np.sqrt(50)


def test_a_needle_is_at_its_depth_of_the_text(builtin):
    task = make_needle_task(builtin)
    for seed in range(11, 22):
        sample = task.sample(seed, 3000)
        (question,) = sample.questions
        assert question.kind == f"{(seed - 11) / 10:g}"
        text = sample.context.partition("\n\n")[2].rstrip()
        (needle,) = re.findall(r"A secret number of \S+ is \d{7}\.", text)
        assert question.expected[0] in needle
        depth = text.index(needle) / (len(text) - len(needle))
        assert abs(depth - float(question.kind)) < 0.06


def test_lines_are_hidden_anywhere_and_in_order():
    rng, places = np.random.default_rng(0), []
    for _ in range(300):
        lines = Lines().hide(rng, 18, ["x", "y"]).split("\n")
        assert len(lines) == 20
        assert lines.index("x") < lines.index("y")
        places += [lines.index("x"), lines.index("y")]
    counts = np.bincount(places, minlength=20)
    assert np.abs(counts - 30).max() < 4 * np.sqrt(30)


def test_sentences_are_the_text():
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


def test_no_word_is_part_of_another():
    words = [*ADJECTIVES, *NOUNS]
    assert len(words) == len(set(words)) > 900
    text = " ".join(words)
    assert all(text.count(word) == 1 for word in words)
    assert all(re.fullmatch("[a-z]+", word) for word in words)


def test_keys_are_listed():
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c", "d"]) == "a, b, c and d"
