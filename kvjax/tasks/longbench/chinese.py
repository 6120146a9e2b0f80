"""LongBench's scores of Chinese (its qa_f1_zh_score and rouge_zh_score), with jieba's word segmentation."""

import functools
import importlib
import logging
import warnings
from collections.abc import Callable

from kvjax.errors import UserError
from kvjax.tasks.text_scores import bare_characters, f1, rouge_l


@functools.cache
def words() -> Callable[[str], list[str]]:
    """Return a function that splits a text into words. Raises UserError if jieba is not installed."""
    try:
        with warnings.catch_warnings():
            # newer versions of Python warn of jieba's regular expressions
            warnings.simplefilter("ignore")
            jieba = importlib.import_module("jieba")
    except ImportError:
        raise UserError("Chinese scores need jieba: pip install 'kvjax[chinese]'") from None
    jieba.setLogLevel(logging.WARNING)
    return jieba.lcut


def chinese_f1() -> Callable[[str, str], float]:
    """Return F1 of the words, in lower case, without punctuation. Raises UserError if jieba is not installed."""
    split = words()

    def bare(text: str) -> list[str]:
        return [letters for word in split(text) if (letters := bare_characters(word))]

    return lambda answer, true: f1(bare(answer), bare(true))


def chinese_rouge() -> Callable[[str, str], float]:
    """Return ROUGE-L of the words. Raises UserError if jieba is not installed."""
    split = words()
    return lambda answer, true: rouge_l(" ".join(split(answer)), " ".join(split(true)))
