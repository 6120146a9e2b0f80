"""Similarities of a text and a true one, from 0 to 1: by words, longest common subsequences, characters, or runs of
words.

Each gives the figure of the scorer that published results were made with, and is implemented here anew.
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
LONGEST_RUN = 4
"""The number of words in BLEU's longest runs."""


def f1(answer: Sequence[Hashable], true: Sequence[Hashable]) -> float:
    """Return the harmonic mean of precision and recall of the items in both, each counted as often as both have it."""
    same = (Counter(answer) & Counter(true)).total()
    return 2 * same / (len(answer) + len(true)) if same else 0.0


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
    """Return the ROUGE-L F of summaries as the package rouge 1.0.1 gives it, which LongBench uses. Sentences end with
    full stops, words with spaces. The words in the sentences' longest common subsequences (LCS), and those of both
    texts, are counted as sets. The score is 0 if a text has no sentence."""
    told, wanted = _sentences(answer), _sentences(true)
    if not told or not wanted:
        return 0.0
    shared: set[str] = set()
    for sentence in wanted:
        for other in told:
            shared |= {sentence[index] for index in _lcs(sentence, other, _rouge_steps_back)}
    recall, precision = (len(shared) / len({word for one in text for word in one}) for text in (wanted, told))
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(one.split()).split(" ") for one in text.split(".") if one]


def rouge_l_sum(answer: str, true: str) -> float:
    """Return rougeLsum's F as the package rouge_score 0.1.2 gives it without a stemmer, which SCBench uses. Every line
    is a sentence, and words are runs of a–z and digits in lower case. The words of a true sentence that are in its LCS
    with any sentence count, each at most as often as both texts have it."""
    told, wanted = (
        [re.findall(r"[a-z0-9]+", line) for line in x.lower().split("\n")] for x in (answer, true)
    )
    shared: Counter[str] = Counter()
    for sentence in wanted:
        found = {index for other in told for index in _lcs(sentence, other, _rouge_score_steps_back)}
        shared.update(sentence[index] for index in found)
    left, right = (Counter(word for one in text for word in one) for text in (told, wanted))
    hits = (shared & left & right).total()
    return 2 * hits / (left.total() + right.total()) if hits else 0.0


StepsBack = Callable[[int, int], bool]
"""Decides, from the lengths of the LCS without the first text's last word and without the second's, whether to take the
first."""


def _rouge_steps_back(without_first: int, without_second: int) -> bool:
    return without_first > without_second


def _rouge_score_steps_back(without_first: int, without_second: int) -> bool:
    return without_first >= without_second


def _lcs(first: Sequence[str], second: Sequence[str], steps_back: StepsBack) -> list[int]:
    """Return the places in the first text of the words of a longest common subsequence. If there are several,
    `steps_back` chooses; the scorers differ in it."""
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, word in enumerate(first):
        for j, other in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if word == other else max(table[i][j + 1], table[i + 1][j])
    i, j, found = len(first), len(second), []
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            found.append(i)
        elif steps_back(table[i - 1][j], table[i][j - 1]):
            i -= 1
        else:
            j -= 1
    return found


def similarity(answer: str, true: str) -> float:
    """Return the share of the characters that match, to hundredths. This is fuzzywuzzy's ratio on difflib, without
    python-Levenshtein. It is 0 if one of two different texts is empty."""
    if answer == true:
        return 1.0
    if not answer or not true:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, answer, true).ratio()) / 100


def bleu(answer: Sequence[str], true: Sequence[str]) -> float:
    """Return BLEU of runs of up to four words, as nltk's `sentence_bleu` gives it with one reference and its smoothing
    method 4 (Chen & Cherry 2014). If no run of a length is right, that length counts ln(words) / (5 · 2ⁿ), n being the
    number of such lengths up to this one. In an answer of one word such lengths do not count."""
    logs, none = 0.0, 0
    for n in range(1, LONGEST_RUN + 1):
        told, wanted = (Counter(tuple(x[i : i + n]) for i in range(len(x) - n + 1)) for x in (answer, true))
        right: float = (told & wanted).total()
        if not right:
            if n == 1:
                return 0.0
            if len(answer) > 1:
                none += 1
                right = math.log(len(answer)) / (5 * 2**none)
        if right:
            logs += math.log(right / max(1, told.total()))
    brevity = min(0.0, 1 - len(true) / len(answer))
    return math.exp(brevity + logs / LONGEST_RUN)
