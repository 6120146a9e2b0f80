"""Test scores of texts against the published packages' figures, figures by hand, and brute force."""

import itertools

import pytest

from kvjax.tasks.text_scores import bleu, characters_f1, f1, rouge_l, rouge_l_sum, similarity, words_f1

SAME = pytest.approx


@pytest.mark.parametrize(
    ("answer", "true", "words", "lines", "sentences"),
    [
        (
            "The cat sat on the mat. It was happy.",
            "A cat was on the mat. It looked happy and it slept.",
            *(0.705882, 0.571429, 0.666667),
        ),
        ("the the cat", "the cat", 1.0, 0.8, 1.0),
        (
            "Agency spending rose 5% in 2019. GAO recommends a review. GAO recommends a plan.",
            "GAO recommends that the agency review its spending plan.\nSpending rose in 2019.\n",
            *(0.75, 0.592593, 0.64),
        ),
        (
            "one two six seven eight. one three eight nine five",
            "one two three four five",
            *(0.533333, 0.533333, 0.615385),
        ),
        (
            "police killed the gunman\nthe gunman kill police",
            "police kill the gunman",
            0.666667,
            0.5,
            0.666667,
        ),
        ("", ". .", 0, 0, 0),
        ("nothing alike", "other words", 0, 0, 0),
        ("Same. Text.", "Same. Text.", 1, 1, 1),
    ],
)
def test_scores_equal_those_of_the_published_scorers(answer, true, words, lines, sentences):
    """The figures are those of LongBench's qa_f1_score, rouge_score 0.1.2 and rouge 1.0.1."""
    assert words_f1(answer, true) == SAME(words, abs=1e-6)
    assert rouge_l_sum(answer, true) == SAME(lines, abs=1e-6)
    assert rouge_l(answer, true) == SAME(sentences, abs=1e-6)


def test_f1_equals_figures_by_hand():
    """Two of the answer's three characters are right, and the true answer has four."""
    assert f1("abx", "abcd") == SAME(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert f1("aab", "ab") == SAME(2 * 2 / 5), "as often as both have it"
    assert words_f1("The answer: an Apple!", "apple answer") == 1
    assert characters_f1("他在，根特。 A", "根特a") == SAME(2 * 3 / (5 + 3))
    assert characters_f1("。", "。") == f1("", "") == 0


def test_one_sentence_scores_by_its_longest_common_subsequence():
    """The subsequence is found by brute force over all subsequences."""

    def longest(first, second):
        for size in range(len(first), 0, -1):
            of_both = (set(itertools.combinations(text, size)) for text in (first, second))
            if set.intersection(*of_both):
                return size
        return 0

    texts = "a b c d e", "b a d c e", "e d c", "c x e y", "x"
    for answer, true in itertools.product(texts, repeat=2):
        first, second = answer.split(), true.split()
        wanted = 2 * longest(first, second) / (len(first) + len(second))
        assert rouge_l(answer, true) == SAME(wanted, abs=1e-6)
        assert rouge_l_sum(answer, true) == SAME(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("answer", "true", "score"),
    [
        ("return x + 1", "return x + 2", 0.92),
        ("    self.assertEqual(a, b)", "        self.assertEquals(b, a)", 0.84),
        ("", "x", 0),
        ("", "", 1),
        ("for i in range(10):", "for i in range(10):", 1),
    ],
)
def test_similarity_equals_fuzzywuzzys_ratio(answer, true, score):
    assert similarity(answer, true) == score


@pytest.mark.parametrize(
    ("answer", "true", "score"),
    [
        ("def one(a, b): c = a + b return c", "def one(a, b): c = a - b return c", 0.658037),
        ("a b c d e", "a b c d e", 1),
        ("a b c", "a b c d e", 0.295584),
        ("a x b y c z", "a b c", 0.049476),
        ("a b c d e f g", "a b c", 0.193085),
        ("a", "a b", 0.367879),
        ("x", "a b", 0),
        ("", "a b", 0),
    ],
)
def test_bleu_equals_nltks_with_smoothing_4(answer, true, score):
    assert bleu(answer.split(" "), true.split(" ")) == SAME(score, abs=1e-6)
