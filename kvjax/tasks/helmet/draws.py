"""HELMET's random draws, exactly as its loader makes them: the evaluated records, their order, and the demonstrations
of a prompt. The tests compare them with the official loader's prompts."""

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
"""The number of questions that the official runs draw from a retrieval task. Each has records at several depths."""
TEXTS = 500
"""The number of texts that the official runs draw from a classification task."""
SHOTS = 2
"""The number of demonstrations in a prompt. Classification tasks have their own number."""
Key = str | int


def shuffled(items: Sequence[Any], seed: int = SEED) -> list[Any]:
    """Return the items as the package datasets shuffles rows."""
    return [items[index] for index in np.random.default_rng(seed).permutation(len(items))]


def text_seed(text: str, seed: int = 0) -> int:
    """Return the seed of a prompt's own draws, from its question."""
    return (int(hashlib.sha256(text.encode()).hexdigest(), 16) + seed) % 2**31


def row_key(row: Row, name: str) -> Key:
    """Return a field that tells questions apart. Raises UserError if it is no string or whole number."""
    at, fields = row
    key = row_field(fields, name, at)
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise UserError(f"{at}: expected `{name}` to be a string or a whole number, got {str(key)[:60]}")
    return key


def drawn_first(rows: Sequence[Row], name: str) -> tuple[list[Row], set[Key]]:
    """Return the records of the questions that the official run draws, then the others, and the drawn questions' keys.
    Both parts are in the file's order."""
    keys = [row_key(row, name) for row in rows]
    known = sorted(set(keys), key=lambda key: (isinstance(key, str), key))
    drawn = set(random.Random(SEED).sample(known, min(QUESTIONS, len(known))))
    order = sorted(range(len(rows)), key=lambda index: keys[index] not in drawn)
    return [rows[index] for index in order], drawn


def demonstrations(row: Row, others: Sequence[Row], name: str) -> list[Row]:
    """Return the first of the others that ask different questions, after the shuffle of the row's own question. Raises
    UserError if there are too few."""
    found: dict[Key, Row] = {}
    for other in shuffled(others, text_seed(str(row_key(row, name)))):
        found.setdefault(row_key(other, name), other)
        if len(found) == SHOTS:
            return list(found.values())
    raise UserError(f"{row[0]} needs demonstrations of {SHOTS} questions, got {len(found)}")


def balanced(labels: Sequence[int], count: int, seed: int) -> list[int]:
    """Return the indices of `count` texts, in rounds that have every label once, each round in random order. A text
    comes again if its label has fewer texts than there are rounds."""
    own: dict[int, list[int]] = {}
    for place, label in enumerate(labels):
        own.setdefault(label, []).append(place)
    draw = random.Random(seed)
    rounds: list[list[int]] = [[] for _ in range(math.ceil(count / len(own)))]
    for places in own.values():
        chosen = draw.sample(places, len(rounds) % len(places))
        while len(chosen) < len(rounds):
            chosen += draw.sample(places, min(len(rounds) - len(chosen), len(places)))
        for one, place in zip(rounds, chosen, strict=True):
            one.append(place)
    for one in rounds:
        draw.shuffle(one)
    return [place for one in rounds for place in one][:count]


def split_off_tenth(items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return nine tenths of the items and the other tenth, as the package datasets splits rows."""
    order, tenth = shuffled(items), math.ceil(len(items) * 0.1)
    return order[tenth:], order[:tenth]


def shuffled_numbers(count: int, seed: int) -> list[int]:
    """Return the numbers that stand for a task's labels in a prompt."""
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    return numbers
