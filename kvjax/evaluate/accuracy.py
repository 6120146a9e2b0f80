"""Accuracy of answers from a cache that was filled before the questions were known."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from kvjax.evaluate import measuring
from kvjax.evaluate.asked import exact
from kvjax.evaluate.measuring import Manner
from kvjax.evaluate.tasks.task import Sample
from kvjax.models.decoder import Decoder
from kvjax.policies.policy import Policy


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """What a policy answered.

    accuracy: share of answers whose tokens are all right. by_kind: the same by kind of question. answers: how many.
    kv_ratio: entries over those of a full cache once the context was read. rates: share of the tokens that left the
    ring and were kept, by layer and kv head.
    """

    accuracy: float
    by_kind: dict[str, float]
    answers: int
    kv_ratio: float
    rates: Float[np.ndarray, "l k"]


def measure(
    model: Decoder,
    policy: Policy,
    samples: Sequence[Sample],
    *,
    batch: int = 16,
    capacity: int | str | None = None,
) -> Accuracy:
    """Read each context into a cache, then ask its questions one by one, each from that same cache, greedily.

    Contexts are read `batch` at a time and must have one length in a batch, as a task gives them.
    """
    found = measuring.measure(model, policy, list(map(exact, samples)), Manner(batch, capacity=capacity))
    return Accuracy(found.score, found.by_kind, found.answers, found.kv_ratio, found.rates)
