"""Test which documents are in the context of a question."""

import re
from collections import Counter

from kvjax.tasks.ruler import make_ruler_task
from kvjax.tasks.ruler.questions import DataQuestion, QuestionAnswering
from kvjax.tasks.splits import Split


def documents(sample):
    parts = re.split(r"Document (\d+):\n", sample.context)[1:]
    assert parts[::2] == [str(number) for number in range(1, len(parts) // 2 + 1)]
    return [text.strip() for text in parts[1::2]]


def test_given_documents_come_first_then_near_ones_then_others():
    """A document's heading takes two words."""
    texts = tuple(
        f"{name} " * (size - 2) for name, size in zip("abcdefg", (10, 20, 30, 40, 50, 6, 7), strict=True)
    )
    writer = QuestionAnswering("qa_1", texts, (DataQuestion("?", ("x",), (0, 1), (3, 4)),))
    in_context = {
        1: "ab", 35: "ab", 36: "abf", 37: "abf abg", 43: "abfg", 70: "abd", 80: "abdf abdg abe", 120: "abde",
        133: "abdefg", 162: "abcdeg abdefg abcdef", 163: "abcdefg",
    }  # fmt: skip
    for units, expected in in_context.items():
        samples = [documents(writer.write(seed, units)) for seed in range(40)]
        found = {"".join(sorted(text[0] for text in texts)) for texts in samples}
        assert found == set(expected.split()), units
    # once all documents are used, all except the question's own are used again
    again = Counter(text[0] for text in documents(writer.write(0, 30 + 2 * 133 + 13)))
    assert again == Counter("ab" + "cdefg" * 2 + "fg")


def test_no_question_is_both_compared_and_calibrated_on():
    """The seeds of both are apart by a multiple of the number of questions."""
    questions = tuple(DataQuestion(f"{i}?", ("x",), (0,), (1,)) for i in range(100))
    writer = QuestionAnswering("qa_1", ("a b", "c d"), questions)

    def asked(split, count):
        return [writer.write(split.first + i, 9).questions[0].text for i in range(count)]

    runs = [asked(Split(seed, 30), 30) for seed in (0, 1)]
    chosen = asked(Split(0, 30, calibration=True), 4) + asked(Split(0, 30, calibration=True, skipped=4), 10)
    assert len({*runs[0], *chosen}) == 44
    assert runs[0] != runs[1]


def test_questions_are_asked_of_their_own_documents(files, builtin):
    for name, of_it in (("qa_1", 5), ("qa_2", 10)):
        task = make_ruler_task(name, builtin, files)
        writer, questions = task.writer(0), set()
        for seed in range(10):
            sample = writer.write(seed, 1)
            (question,) = sample.questions
            (answer,) = question.expected
            i = int(re.findall(r"\d+", answer)[0])
            assert len(documents(sample)) == (1 if name == "qa_1" else 10)
            assert sum(answer in text for text in documents(sample)) == 1
            more = documents(writer.write(seed, 600))
            assert len(set(more)) == len(more) > 20
            assert sum(f"guild{i}x" in text or f" m{i}n" in text for text in more) == of_it
            assert sum(answer in text for text in more) == 1
            questions.add(question.text)
        assert len(questions) == 10
        first = 0
        for seed in range(100):
            sample = writer.write(seed, 200)
            count = len(documents(sample))
            first += (sample.questions[0].expected[0] in documents(sample)[0]) * count
        assert 50 < first < 150  # the expected number is 100: one place in `count`, times `count`
