"""Several questions of one context: which sequence of a cache each continues, and where it stands in the batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax import cache as caches
from kvjax.cache import Cache
from kvjax.errors import UserError, shown, whole_number
from kvjax.inference.checks import check_in_front
from kvjax.mesh import BATCH, batch_shards, put


def contexts_of(share: Any, questions: int, contexts: int) -> list[int]:
    """The context of each question. share: as in `generate`. Raises UserError if it does not fit."""
    if share is True:
        if questions % contexts:
            raise UserError(
                f"generate: share=True asks of each of the cache's {contexts} contexts as many questions, one "
                f"context's after another's, got {questions}; share=[0, 0, 1, …] says whose each is"
            )
        return [index // (questions // contexts) for index in range(questions)]
    if not isinstance(share, Sequence | np.ndarray) or isinstance(share, str):
        raise UserError(
            f"generate: share must be True, False or a list with each question's context, got {shown(share)}"
        )
    found = [whole_number("generate", "a context in share", x, 0, contexts - 1) for x in share]
    if len(found) != questions:
        raise UserError(
            f"generate: share must say the context of each of {questions} questions, got {len(found)}"
        )
    return found


def places(cache: Cache, share: Any, samples: int, answers: int) -> tuple[list[list[int]], list[int]]:
    """Of each of the devices that split the batch its branches' rows of a cache, for so many answers, `samples` to each
    question; and each answer's place in the batch of branches, where a device's are followed by empty ones."""
    contexts = int((np.asarray(cache.seen) > 0).sum())
    each = np.repeat(contexts_of(share, answers // samples, contexts), samples).tolist()
    shards = batch_shards()
    own = cache.seen.shape[0] // shards
    rows: list[list[int]] = [[] for _ in range(shards)]
    found = []
    for context in each:
        rows[context // own].append(context % own)
        found.append((context // own, len(rows[context // own]) - 1))
    most = max(map(len, rows))
    return rows, [shard * most + place for shard, place in found]


def branched(cache: Cache, share: Any, samples: int, answers: int) -> tuple[Cache, list[int]]:
    """A cache with a sequence for each of so many answers, `samples` to each question, which shares its context's
    pages, and each answer's place in the batch: a branch stays on its context's devices. Nothing is copied yet
    (`kvjax.inference.allocation.copy_for_question`)."""
    check_in_front("generate", cache)
    rows, order = places(cache, share, samples, answers)
    index = np.full((len(rows), max(map(len, rows))), -1, np.int32)
    for shard, of in enumerate(rows):
        index[shard, : len(of)] = of
    return caches.selected(cache, put(index.reshape(-1), BATCH)), order


def placed(rows: Sequence[np.ndarray], order: Sequence[int], batch: int) -> list[np.ndarray]:
    """A batch of `batch` rows with these at their places, the others empty."""
    found = [np.zeros(0, np.int32)] * batch
    for row, place in zip(rows, order, strict=True):
        found[place] = row
    return found
