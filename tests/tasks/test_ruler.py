"""RULER's tasks by structure: lengths, how often everything occurs, where it is hidden, and repetition."""

import re
from collections import Counter

import numpy as np
import pytest

from kvjax.tasks import heldout_files
from kvjax.tasks.prompt import PromptEncoder, prompt_size
from kvjax.tasks.ruler import RULER_TASKS, Files, make_needle_task, make_ruler_task, ruler_drafts
from kvjax.tasks.ruler.frequent import CodedWords, CommonWords
from kvjax.tasks.ruler.haystack import DEPTHS, LONGEST, PASSAGE, Essays, Lines, split_sentences
from kvjax.tasks.ruler.needles import join_words
from kvjax.tasks.ruler.questions import DataQuestion, QuestionAnswering
from kvjax.tasks.ruler.words import ADJECTIVES, NOUNS, invented_words
from tests.tasks.ruler_inputs import builtin, chatty, files, smol

__all__ = ["builtin", "chatty", "files", "smol"]  # fixtures
LENGTHS = (1500, 5000)  # on both sides of the length from which the word list is a longer one


@pytest.mark.parametrize("name", RULER_TASKS)
def test_a_sample_fills_its_length(name, smol, files):
    """To within 2%, or within a line where every line is a pair of UUIDs."""
    task, encode = make_ruler_task(name, smol, files), PromptEncoder(smol)
    line = len(smol("A secret UUID of 01234567-0123-4123-8123-0123456789ab is ." * 2)["input_ids"])
    for length in (2048, 4096):
        recipe = task.recipe(length)
        for seed in (3, 0, 1):
            sample, count = task.draft(seed, length), task.units(seed, length)
            assert sample == recipe.write(seed, count)
            size = prompt_size(sample, encode)
            assert length - max(0.02 * length, line if name == "niah_multikey_3" else 0) <= size <= length
            assert prompt_size(recipe.write(seed, count + 1), encode) > length


@pytest.mark.parametrize("name", RULER_TASKS)
def test_a_length_counts_no_template_where_there_is_none(name, builtin, files):
    task, encode = make_ruler_task(name, builtin, files), PromptEncoder(builtin)
    for length in LENGTHS:
        assert 0.95 * length < prompt_size(task.draft(1, length), encode) <= length


def test_a_sample_does_not_depend_on_those_made_before_it(smol):
    task = make_ruler_task("fwe", smol)
    samples = [task.draft(seed, 2048) for seed in (2, 0, 1)]
    assert samples == [make_ruler_task("fwe", smol).draft(seed, 2048) for seed in (2, 0, 1)]


def test_a_question_s_tokens_are_those_of_a_text_s_middle(chatty):
    """This tokenizer puts a space before any text, but the question follows the context."""
    prompt = make_ruler_task("vt", chatty, chat=False).sample(0, 1500)
    context = chatty.convert_ids_to_tokens(prompt.context.tolist())
    asked = chatty.convert_ids_to_tokens(prompt.questions[0].prompt.tolist())
    assert context[0] == "<s>"
    assert context[1].startswith("▁")
    assert not asked[0].startswith("▁")
    assert "</s>" not in context + asked


@pytest.mark.parametrize("name", RULER_TASKS)
def test_a_seed_says_everything(name, builtin, files):
    first = ruler_drafts(name, builtin, length=1500, samples=3, seed=5, files=files)
    assert first == ruler_drafts(name, builtin, length=1500, samples=3, seed=5, files=files)
    shifted = ruler_drafts(name, builtin, length=1500, samples=3, seed=6, files=files)
    assert first[1:] == shifted[:-1]
    assert len({sample.context for sample in first}) == len({sample.questions for sample in first}) == 3


@pytest.mark.parametrize("name", RULER_TASKS)
def test_no_answer_is_in_its_question_and_the_context_ends_with_one_line_break(name, builtin, files):
    for sample in ruler_drafts(name, builtin, length=1500, samples=5, files=files):
        (question,) = sample.questions
        assert sample.context
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
        sample = task.draft(seed, 1500)
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


def test_a_chain_of_variables_is_in_order_after_a_solved_one(builtin):
    for sample in ruler_drafts("vt", builtin, length=1500, samples=5):
        (question,) = sample.questions
        solved, asked = sample.context.split("\n\nThe text below")
        value = re.findall(r"\d{5}", question.text)[0]
        (shown_value,) = set(re.findall(r"\d{5}", solved))
        assert sample.context.count(value) == 1
        shown = re.findall(r"^Set ([A-Z]{3}) = \w+$", solved, re.MULTILINE)
        assert len(set(shown)) == len(shown) == 5
        # the example ends as a right answer to its question would
        asks = (question.text + question.answer_prefix).replace(value, shown_value)
        assert solved.endswith(f"\n{asks} {' '.join(shown)}")
        for text, first, names in ((solved, shown_value, shown), (asked, value, question.expected)):
            lines = re.findall(r"^Set (\w+) = (\w+)\n(.*)$", text, re.MULTILINE)
            assert [(name, source) for name, source, _ in lines] == list(
                zip(names, [first, *names], strict=False)
            )
            assert all(after == PASSAGE for *_, after in lines)
        assert [sample.context.count(name) for name in question.expected] == [2, 2, 2, 2, 1]
        assert solved.count(PASSAGE) == 14


@pytest.mark.parametrize(("length", "words", "example"), [(1500, (6, 1), (3, 1)), (5000, (30, 3), (10, 3))])
def test_common_words_are_as_common_as_defined(length, words, example, builtin):
    task = make_ruler_task("cwe", builtin)
    for seed in range(3):
        sample = task.draft(seed, length)
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
def test_words_are_single_at_every_length(units):
    """English ones as long as they last."""
    recipe = CommonWords(131072)
    assert recipe.supply.most > 12000
    for seed in range(2):
        sample = recipe.write(seed, units)
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
        sample = task.draft(seed, length)
        counts = Counter(sample.context.split("\n\n")[1].split())
        ranks = np.arange(1, (length - 50) // 50 + 1)
        expected = np.floor(task.units(seed, length) * 6 / np.pi**2 / ranks**2).astype(int)
        ranked = counts.most_common()
        assert [count for _, count in ranked] == expected[expected > 0].tolist()
        assert tuple(word for word, _ in ranked[:4]) == ("...", *sample.questions[0].expected)
        assert ranked[3][1] > ranked[4][1]
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])


def test_the_fourth_coded_word_always_leads_the_fifth():
    recipe = CodedWords(1000)
    for units in range(recipe.fewest, 200):
        sample = recipe.write(0, units)
        counts = Counter(sample.context.split("\n\n")[1].split()).most_common()
        assert counts[3][1] > (counts[4][1] if len(counts) > 4 else 0)


def test_coded_words_are_a_fiftieth_of_what_is_left_for_the_text(smol):
    """What is left by the answer (50 tokens) and the chat template."""
    before = "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\n"
    size = len(smol(f"{before}<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    for chat, left in ((True, 1520 - 50 - size), (False, 1520 - 50)):
        sample = make_ruler_task("fwe", smol, chat=chat).recipe(1520).write(0, 10**5)
        assert len(set(sample.context.split("\n\n")[1].split())) == left // 50
    assert (1520 - 50 - size) // 50 < (1520 - 50) // 50


def documents(sample):
    parts = re.split(r"Document (\d+):\n", sample.context)[1:]
    assert parts[::2] == [str(number) for number in range(1, len(parts) // 2 + 1)]
    return [text.strip() for text in parts[1::2]]


def test_a_question_s_documents_come_first_then_near_ones_then_any_that_fit():
    """Two words are a document's heading."""
    texts = tuple(
        f"{name} " * (size - 2) for name, size in zip("abcdefg", (10, 20, 30, 40, 50, 6, 7), strict=True)
    )
    recipe = QuestionAnswering("qa_1", texts, (DataQuestion("?", ("x",), (0, 1), (3, 4)),))
    in_context = {
        1: "ab", 35: "ab", 36: "abf", 37: "abf abg", 43: "abfg", 70: "abd", 80: "abdf abdg abe", 120: "abde",
        133: "abdefg", 162: "abcdeg abdefg abcdef", 163: "abcdefg",
    }  # fmt: skip
    for units, expected in in_context.items():
        samples = [documents(recipe.write(seed, units)) for seed in range(40)]
        found = {"".join(sorted(text[0] for text in texts)) for texts in samples}
        assert found == set(expected.split()), units
    # where all are used, all but the question's own are used again
    again = Counter(text[0] for text in documents(recipe.write(0, 30 + 2 * 133 + 13)))
    assert again == Counter("ab" + "cdefg" * 2 + "fg")


def test_questions_are_asked_of_their_own_documents(files, builtin):
    for name, of_it in (("qa_1", 5), ("qa_2", 10)):
        task = make_ruler_task(name, builtin, files)
        recipe, questions = task.recipe(0), set()
        for seed in range(10):
            sample = recipe.write(seed, 1)
            (question,) = sample.questions
            (answer,) = question.expected
            i = int(re.findall(r"\d+", answer)[0])
            assert len(documents(sample)) == (1 if name == "qa_1" else 10)
            assert sum(answer in text for text in documents(sample)) == 1
            more = documents(recipe.write(seed, 600))
            assert len(set(more)) == len(more) > 20
            assert sum(f"guild{i}x" in text or f" m{i}n" in text for text in more) == of_it
            assert sum(answer in text for text in more) == 1
            questions.add(question.text)
        assert len(questions) == 10
        first = 0
        for seed in range(100):
            sample = recipe.write(seed, 200)
            count = len(documents(sample))
            first += (sample.questions[0].expected[0] in documents(sample)[0]) * count
        assert 50 < first < 150  # 100 times one place in `count`


def test_depths_are_uniform_shares_of_the_sentences():
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
    # drawn without repetition, a count varies by less than a binomial one
    assert all(abs(count - 50) < 4 * np.sqrt(50) for count in Counter(depths).values())


def test_a_short_text_is_repeated():
    essays = Essays("One two. Three four five.\n\nSix.", "test", depths=(50,))
    hidden = essays.hide(np.random.default_rng(0), 14, ["Needle."])
    # seven sentences begin in 14 words: the needle stands before the fourth
    assert hidden == (
        "One two. Three four five.\n\nSix.\n\nNeedle.\n\nOne two. Three four five.\n\nSix.\n\nOne two."
    )
    assert Essays("One two. Three", "test", depths=(100,)).hide(np.random.default_rng(0), 3, ["N."]) == (
        "One two. Three N."
    )


def test_a_short_file_of_essays_is_long_enough(smol, tmp_path):
    (tmp_path / "short.txt").write_text("The owl is grey. It sits on a branch of the old tree.")
    task = make_ruler_task("niah_multiquery", smol, Files(essays=tmp_path / "short.txt"))
    sample = task.draft(0, 2048)
    assert 0.98 * 2048 < prompt_size(sample, PromptEncoder(smol)) <= 2048
    assert sample.context.count("It sits on a branch of the old tree.") > 50
    assert all(sample.context.count(value) == 1 for value in sample.questions[0].expected)


def test_a_needle_is_at_its_depth_of_the_text(smol):
    task = make_needle_task(smol)
    for seed in range(11, 22):
        sample = task.draft(seed, 2048)
        (question,) = sample.questions
        assert question.kind == f"{(seed - 11) / 10:g}"
        text = sample.context.partition("\n\n")[2].rstrip()
        (needle,) = re.findall(r"A secret number of \S+ is \d{7}\.", text)
        assert question.expected[0] in needle
        depth = text.index(needle) / (len(text) - len(needle))
        assert abs(depth - float(question.kind)) < 0.03


def test_lines_are_hidden_before_any_line_and_in_order():
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
    invented = invented_words()
    assert len(invented) == len(set(invented)) > 60_000
    assert {len(word) for word in invented} == {5}
    sounds = re.compile("([bdfgjklmnrstvw][aeiou]){2}[bdfgjklmnrstvw]")
    assert all(sounds.fullmatch(word) for word in invented[::97])
    assert all(word not in text for word in invented[::97])
    joined = " ".join(invented)
    assert not any(word in joined for word in words)


def test_keys_are_listed():
    assert join_words(["a"]) == "a"
    assert join_words(["a", "b", "c", "d"]) == "a, b, c, and d"
