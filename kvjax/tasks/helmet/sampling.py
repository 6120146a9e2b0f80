"""HELMET's random choices, exactly as its loader makes them: the evaluated records, their order, and the demonstrations
of a prompt. The tests compare the prompts with those of the official loader."""

import hashlib
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.errors import UserError
from kvjax.tasks.datasets import Row, row_field

SEED = 42
"""Seed of the official runs."""
QUESTIONS = 100
"""The number of questions that the official runs sample from a retrieval task. Each has records at several depths."""
TEXTS = 500
"""The number of texts that the official runs sample from a classification task."""
SHOTS = 2
"""The number of demonstrations in a prompt, except for classification tasks."""
Key = str | int


def shuffled(items: Sequence[Any], seed: int = SEED) -> list[Any]:
    """Return the items in the order in which the package datasets shuffles rows."""
    return [items[index] for index in np.random.default_rng(seed).permutation(len(items))]


def text_seed(text: str, seed: int = 0) -> int:
    """Return the seed of a prompt's random choices, from its question."""
    return (int(hashlib.sha256(text.encode()).hexdigest(), 16) + seed) % 2**31


def row_key(row: Row, name: str) -> Key:
    """Return a field that identifies a question. Raises UserError if it is not a string or a whole number."""
    at, fields = row
    key = row_field(fields, name, at)
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise UserError(f"{at}: expected `{name}` to be a string or a whole number, got {str(key)[:60]}")
    return key


def sampled_first(rows: Sequence[Row], name: str) -> tuple[dict[Key, list[Row]], set[Key]]:
    """Return the records of each question, with those that the official run samples first; and the sampled keys.

    Both parts of the questions are in the file's order.
    """
    by_key: dict[Key, list[Row]] = {}
    for row in rows:
        by_key.setdefault(row_key(row, name), []).append(row)
    distinct = sorted(by_key, key=lambda key: (isinstance(key, str), key))
    sampled = set(random.Random(SEED).sample(distinct, min(QUESTIONS, len(distinct))))
    return {key: by_key[key] for key in sorted(by_key, key=lambda key: key not in sampled)}, sampled


def demonstrations(row: Row, others: Sequence[Row], name: str) -> list[Row]:
    """Return the first `SHOTS` other rows with different questions, in an order that the row's question seeds.

    Raises UserError if there are too few.
    """
    chosen: dict[Key, Row] = {}
    for other in shuffled(others, text_seed(str(row_key(row, name)))):
        chosen.setdefault(row_key(other, name), other)
        if len(chosen) == SHOTS:
            return list(chosen.values())
    raise UserError(f"{row[0]} needs demonstrations of {SHOTS} questions, got {len(chosen)}")


def balanced(labels: Sequence[int], count: int, seed: int) -> list[int]:
    """Return the indices of `count` texts, in rounds that have every label once, each round in random order.

    A text is repeated if its label has fewer texts than there are rounds.
    """
    by_label: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        by_label.setdefault(label, []).append(index)
    rng = random.Random(seed)
    rounds: list[list[int]] = [[] for _ in range(math.ceil(count / len(by_label)))]
    for indices in by_label.values():
        chosen = rng.sample(indices, len(rounds) % len(indices))
        while len(chosen) < len(rounds):
            chosen += rng.sample(indices, min(len(rounds) - len(chosen), len(indices)))
        for group, index in zip(rounds, chosen, strict=True):
            group.append(index)
    for group in rounds:
        rng.shuffle(group)
    return [index for group in rounds for index in group][:count]


def split_off_tenth(items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return nine tenths and one tenth of the items, split like rows in the package datasets."""
    order, tenth = shuffled(items), math.ceil(len(items) * 0.1)
    return order[tenth:], order[:tenth]


def shuffled_numbers(count: int, seed: int) -> list[int]:
    """Return the shuffled numbers that replace a task's labels in a prompt."""
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    return numbers
