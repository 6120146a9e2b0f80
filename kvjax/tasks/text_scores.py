"""Similarities of an answer and a true text, from 0 to 1: by words, longest common subsequences, characters or n-grams.

Each function is a new implementation that gives the same scores as the scorer of the published results.
"""

import difflib
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

ARTICLES = re.compile(r"\b(a|an|the)\b")
CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、"
    "〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
"""Punctuation as LongBench and SCBench list it, without 《."""
MAX_N = 4
"""The most words of BLEU's n-grams."""


def f1(answer: Sequence[Hashable], true: Sequence[Hashable]) -> float:
    """Return the harmonic mean of precision and recall of the items, where repeated items count repeatedly."""
    shared = (Counter(answer) & Counter(true)).total()
    return 2 * shared / (len(answer) + len(true)) if shared else 0.0


def words_f1(answer: str, true: str) -> float:
    """Return F1 of the words as SQuAD scores it: in lower case, without punctuation and articles."""
    return f1(bare_words(answer), bare_words(true))


def bare_words(text: str) -> list[str]:
    """Return the words in lower case, without punctuation and articles."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return ARTICLES.sub(" ", bare).split()


def characters_f1(answer: str, true: str) -> float:
    """Return F1 of the characters as SCBench scores Chinese: in lower case, without punctuation and white space."""
    return f1(bare_characters(answer), bare_characters(true))


def bare_characters(text: str) -> str:
    """Return the text in lower case, without punctuation and white space."""
    punctuation = string.punctuation + CHINESE_PUNCTUATION
    return "".join(letter for letter in text.lower() if letter not in punctuation and not letter.isspace())


def rouge_l(answer: str, true: str) -> float:
    """Return the ROUGE-L F of summaries as in the package rouge 1.0.1, which LongBench uses.

    Sentences end with full stops, words with spaces. The words in the sentences' longest common subsequences (LCS), and
    those of both texts, are counted as sets. The score is 0 if a text has no sentence.
    """
    answer_sentences, true_sentences = _sentences(answer), _sentences(true)
    if not answer_sentences or not true_sentences:
        return 0.0
    shared: set[str] = set()
    for sentence in true_sentences:
        for other in answer_sentences:
            shared |= {sentence[index] for index in _lcs(sentence, other, _rouge_steps_back)}
    recall, precision = (
        len(shared) / len({word for sentence in text for word in sentence})
        for text in (true_sentences, answer_sentences)
    )
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def rouge_l_sum(answer: str, true: str) -> float:
    """Return rougeLsum's F as in the package rouge_score 0.1.2 without a stemmer, which SCBench uses.

    Every line is a sentence, and words are runs of a–z and digits in lower case. The words of a true sentence in its
    LCS with any sentence count, each at most as often as both texts have it.
    """
    answer_sentences, true_sentences = (
        [re.findall(r"[a-z0-9]+", line) for line in x.lower().split("\n")] for x in (answer, true)
    )
    shared: Counter[str] = Counter()
    for sentence in true_sentences:
        matched = {
            index for other in answer_sentences for index in _lcs(sentence, other, _rouge_score_steps_back)
        }
        shared.update(sentence[index] for index in matched)
    answer_words, true_words = (
        Counter(word for sentence in text for word in sentence) for text in (answer_sentences, true_sentences)
    )
    hits = (shared & answer_words & true_words).total()
    return 2 * hits / (answer_words.total() + true_words.total()) if hits else 0.0


StepsBack = Callable[[int, int], bool]
"""Decides whether backtracking drops the last word of the first text (or else of the second), given the lengths of the
LCS without the first text's last word and without the second's."""


def _rouge_steps_back(without_first: int, without_second: int) -> bool:
    return without_first > without_second


def _rouge_score_steps_back(without_first: int, without_second: int) -> bool:
    return without_first >= without_second


def _lcs(first: Sequence[str], second: Sequence[str], steps_back: StepsBack) -> list[int]:
    """Return the indices in the first text of a longest common subsequence. If there are several, `steps_back` chooses,
    which differs between the scorers."""
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, word in enumerate(first):
        for j, other in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if word == other else max(table[i][j + 1], table[i + 1][j])
    i, j, indices = len(first), len(second), []
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            indices.append(i)
        elif steps_back(table[i - 1][j], table[i][j - 1]):
            i -= 1
        else:
            j -= 1
    return indices


def similarity(answer: str, true: str) -> float:
    """Return the share of characters that match, rounded to hundredths; 0 if one of two different texts is empty.

    This is the ratio of fuzzywuzzy with difflib instead of python-Levenshtein.
    """
    if answer == true:
        return 1.0
    if not answer or not true:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, answer, true).ratio()) / 100


def bleu(answer: Sequence[str], true: Sequence[str]) -> float:
    """Return BLEU with n-grams of up to four words, as in nltk's `sentence_bleu` with smoothing method 4 (Chen & Cherry
    2014).

    If no n-gram of a length matches, ln(words) / (5 · 2ᵏ) counts as matches, where k numbers such lengths from 1. In an
    answer of one word such lengths do not count.
    """
    logs, lengths_without_match = 0.0, 0
    for n in range(1, MAX_N + 1):
        answer_ngrams, true_ngrams = (
            Counter(tuple(x[i : i + n]) for i in range(len(x) - n + 1)) for x in (answer, true)
        )
        matches: float = (answer_ngrams & true_ngrams).total()
        if not matches:
            if n == 1:
                return 0.0
            if len(answer) > 1:
                lengths_without_match += 1
                matches = math.log(len(answer)) / (5 * 2**lengths_without_match)
        if matches:
            logs += math.log(matches / max(1, answer_ngrams.total()))
    brevity = min(0.0, 1 - len(true) / len(answer))
    return math.exp(brevity + logs / MAX_N)
