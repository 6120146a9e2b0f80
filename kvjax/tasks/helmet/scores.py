"""HELMET's metrics (its utils.py and the `post_process` functions of its data.py), each from 0 to 1.

Every function scores the answer together with the words that begin it, such as "Answer:".
"""

import importlib
import math
import re
from collections.abc import Mapping, Sequence

from kvjax.errors import UserError
from kvjax.tasks.prompt import Scoring
from kvjax.tasks.text_scores import bare_words

CUT = 10
"""The number of documents that NDCG@10 counts."""
DECIMALS = 5
"""Decimals to which the official scorer rounds NDCG."""


def substring_match(text: str, expected: Sequence[str]) -> float:
    """Return 1 if the text contains an expected string, both in lower case, without punctuation and articles.

    The official scorer also tries the parsed answer, which changes nothing, since it is a part of the text.
    """
    bare = _bare(text)
    return float(any(_bare(true) in bare for true in expected))


def label_match(text: str, expected: Sequence[str]) -> float:
    """Return 1 if the text after "label:" is the expected label."""
    return _exact(_parsed(text, "label:"), expected)


def choice_match(text: str, expected: Sequence[str]) -> float:
    """Return 1 if the text or its parsed answer is an expected string, or the text contains the second ("A. …")."""
    parts = text, _parsed(text, "Answer:")
    return float(any(_exact(part, expected) for part in parts) or expected[1].lower() in text.lower())


def rouge_f1() -> Scoring:
    """Return the scoring by ROUGE-L's F1 of stemmed words, with the package rouge_score.

    It is the best score of the text and its parsed answer with any expected string. Raises UserError if the package is
    not installed.
    """
    try:
        rouge_scorer = importlib.import_module("rouge_score.rouge_scorer")
    except ImportError:
        raise UserError("HELMET's ROUGE needs rouge-score: pip install 'kvjax[rouge]'") from None
    scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)

    def score(text: str, expected: Sequence[str]) -> float:
        parts = text, _parsed(text, "Answer:")
        return max(scorer.score(true, part)["rougeL"].fmeasure for true in expected for part in parts)

    return score


def ranking_gain(labels: Mapping[str, int]) -> Scoring:
    """Return the scoring by NDCG@10 of the ranking in a text. labels: the relevance of each document.

    As in trec_eval, the score is 0 if all labels are 0.
    """
    ideal = _gain(sorted(labels.values(), reverse=True))

    def score(text: str, expected: Sequence[str]) -> float:
        return (
            round(_gain([labels.get(name, 0) for name in _ranking(text)]) / ideal, DECIMALS) if ideal else 0.0
        )

    return score


def _gain(labels: Sequence[int]) -> float:
    return sum(label / math.log2(rank) for rank, label in enumerate(labels[:CUT], 2))


def _ranking(text: str) -> list[str]:
    """Return the distinct numbers of the longest "3 > 1 > 2" in a text, in order."""
    text = re.sub(r"[\[\]:]", "", text).lower().replace("id", "")
    longest = max(re.findall(r"\d+(?:\s*>\s*\d+)*", text), key=len, default="")
    return list(dict.fromkeys(number.strip() for number in longest.split(">")))


def _parsed(text: str, prefix: str) -> str:
    """Return the rest of the line after the first `prefix`, or else the first line, without a second prefix."""
    match = re.search(prefix, text, re.IGNORECASE)
    line = text[match.end() if match else 0 :].partition("\n")[0].strip()
    return re.sub(f"^{prefix}", "", line, flags=re.IGNORECASE).strip()


def _exact(text: str, expected: Sequence[str]) -> float:
    return float(any(_bare(text) == _bare(true) for true in expected))


def _bare(text: str) -> str:
    return " ".join(bare_words(text))
