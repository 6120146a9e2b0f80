"""By how much the right key wins in the built-in model's record heads, and setting that.

A soft gate fades a key by log 1e-3 at most. Where the right key wins by more, training gates cannot see that a token is
needed, and cutting it then costs the answer. So a query that asks for a record is drawn to its own place, and how much
is set after training, when it is settled how strongly keys match.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from kvjax.mesh import BATCH
from kvjax.models.decoder import SPLIT, Decoder, scan_layers
from kvjax.tasks import Recall, pack
from pallas_kernels.vertical_slash import vertical_slash
from train.builtin_weights import Matcher, Weights, set_drawn

NEAR = 16
SMALLEST = 2.5
"""Nats by which nine of ten right keys are to win over the last `NEAR` places together."""
FROM_MARK = (2, 3, 2)
"""Where in a record the key of each type's answer is found."""


@jax.jit
def queries_and_keys(model: Decoder, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What every layer compares: [l b n t h] and [l b k t h]."""

    def attend(step, carry, xs):
        attention = jax.shard_map(lambda q, k, v: vertical_slash(q, k, v, window=1)[0], out_specs=SPLIT)
        return attention(step.q, step.k, step.v), carry, (step.q, step.k)

    position = reshard(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), P(BATCH, None))
    _, _, compared = scan_layers(model, model.embed_tokens(tokens), position, attend)
    return compared


def margins(
    model: Decoder, matchers: tuple[Matcher, ...], task: Recall, length: int, samples: int
) -> list[np.ndarray]:
    """For each type of question the logits of the right keys over the log-sum-exp of the last `NEAR` places'."""
    v = task.vocabulary
    found: list[list[float]] = [[] for _ in v.types]
    heads = {m.way: m for m in matchers if m.way is not None}
    for seed in range(samples):
        sample = task.sample(seed, length)
        room = sum(len(question) for question in sample.questions[1:])
        tokens, _ = pack(sample, length + room, v.end)
        q, k = (np.asarray(x[:, 0], np.float32) for x in queries_and_keys(model, jnp.asarray(tokens[None])))
        starts = np.flatnonzero(sample.context == v.record)
        for at in np.flatnonzero(np.isin(tokens, v.types)):
            way = v.types.index(tokens[at])
            m = heads[way]
            (start,) = starts[tokens[starts + (2 if way == 2 else 1)] == tokens[at - 1]]
            query = q[m.layer, m.head * q.shape[1] // k.shape[1], at] / np.sqrt(q.shape[-1])
            near = k[m.layer, m.head, at - NEAR + 1 : at + 1] @ query
            right = k[m.layer, m.head, start + FROM_MARK[way]] @ query
            found[way].append(right - np.logaddexp.reduce(near))
    return [np.array(values) for values in found]


def settle_margins(
    weights: Weights,
    as_model: Callable[[Weights], Decoder],
    matchers: tuple[Matcher, ...],
    task: Recall,
    *,
    length: int = 512,
    samples: int = 4,
) -> Weights:
    """The weights with asking queries drawn to their own place as much as leaves right keys the margin they need."""
    low, high = np.zeros(3), np.full(3, 4.0)
    for _ in range(10):
        middle = (low + high) / 2
        weights = set_drawn(weights, matchers, middle)
        smallest = [np.quantile(m, 0.1) for m in margins(as_model(weights), matchers, task, length, samples)]
        enough = np.array(smallest) > SMALLEST
        low, high = np.where(enough, middle, low), np.where(enough, high, middle)
    return set_drawn(weights, matchers, low)
