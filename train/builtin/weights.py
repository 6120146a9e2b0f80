"""The built-in model's initial weights: random, except that some attention heads start as look-up heads.

With random initial weights a model this small does not learn to look something up in millions of tokens. So some heads
start as matchers, in the unchanged architecture. Their queries and keys are not trained (`trained`).

The residual stream has three parts. Dimension 0 is a constant, and dimensions 1 to 3 flag the type of answer that the
token asks for. Four slots at the end hold the token itself and the ones 1, 2 and 3 places back, in a random projection.
The rest holds the token and everything else.

* Layer 0: kv head i looks i places back, by the fastest RoPE pairs, and fills slot i.
* Finding a record (`<|record|> a b c`) by the key in slot 1 of a question's last token: F matches it with slot 1 (the
  place of `b`), S with slot 2 (the place of `c`), R with slot 0 (the place of `b`; its output is slot 1, `a`). One more
  dimension checks that the record mark is where it should be. Queries of other tokens look at their own place, so that
  plain text does not need the keys that these heads keep.
* Continuing a passage: one head matches slot 0 with slot 1, another matches slot 1 with slot 2. Neither alone can
  distinguish passages that share a token; their sum can. Queries that ask for a record look at their own place.

All of these match in the slowest RoPE pairs, so that the distance does not matter.

The margin of the right key is set after training (`settle_margins`), when the strength of matches is known. A soft gate
lowers a key's logit by at most |log 1e-3|. If the right key wins by more, gate training does not notice that a token is
needed, although dropping it later costs the answer. So a query that asks for a record also attends to its own place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder, causal_attention, positions_of, scan_layers
from kvjax.tasks import Recall, Vocabulary, pack

Weights = dict[str, np.ndarray]
"""Arrays by their names in the decoder, layers stacked: q [l d n h], k and v [l d k h], o [l n h d], gate [l d f], …"""

SLOTS = 4
CONSTANT, ASKS = 0, (1, 2, 3)
"""Reserved dimensions of the residual stream, before those of the token."""
CONSTANT_VALUE, FLAG_VALUE = 0.3, 0.8
OWN_PLACE_KEY, OWN_PLACE_QUERY = 4.0, 8.0
"""The strength, in keys and queries, of the part that makes a query look at its own place. The parts that are compared
have a strength of about 1."""
MARK_KEY, MARK_QUERY = 0.5, 2.0
"""The strength, in keys and queries, of the part that checks the record mark."""
SHARP_PLACE, SHARP_RECORD, SHARP_PASSAGE = 4.0, 3.0, 3.0
"""The scale of queries and keys after their norms: in layer 0, and in the layers of record and passage matchers."""
FAST_PAIRS, NEAR_PAIRS = 5, 7
"""The number of fastest RoPE pairs by which layer 0 finds a place, and by which later layers find their own."""
NEAR = 16
"""The number of last places against which the margin of a right key is measured."""
MIN_MARGIN = 2.5
"""The margin in nats by which 9 of 10 right keys should win over the last `NEAR` places together."""
KEY_OFFSETS = (2, 3, 2)
"""The distance from the record mark to the right key, for each type of question."""


@dataclass(frozen=True)
class Matcher:
    """A kv head that starts as a matcher.

    query_slot, key_slot: the slots that it compares. value_slot: the slot that it copies to the output, multiplied by
    output_scale. question_type: the index of the type of question (F, S, R) that it serves; None: it serves all tokens
    except questions. mark_slot: the slot in which the record mark should be. own_place_bias: the strength with which
    queries of such a question attend to their own place in training.
    """

    layer: int
    head: int
    query_slot: int
    key_slot: int
    value_slot: int = 0
    output_scale: float = 0.4
    question_type: int | None = None
    mark_slot: int = 0
    own_place_bias: float = 0.0


def record_matchers(layer: int) -> tuple[Matcher, ...]:
    return (
        Matcher(layer, 0, query_slot=1, key_slot=1, question_type=0, mark_slot=2, own_place_bias=0.15),
        Matcher(layer, 1, query_slot=1, key_slot=2, question_type=1, mark_slot=3, own_place_bias=0.4),
        Matcher(
            layer,
            2,
            query_slot=1,
            key_slot=0,
            question_type=2,
            mark_slot=2,
            value_slot=1,
            own_place_bias=0.35,
        ),
    )


def passage_matchers(layer: int) -> tuple[Matcher, ...]:
    # their attention is spread over all passages of a family, so their output is scaled up
    return (
        Matcher(layer, 0, query_slot=0, key_slot=1, output_scale=1.2),
        Matcher(layer, 1, query_slot=1, key_slot=2, output_scale=1.2),
    )


def initial_weights(
    config: ModelConfig, matchers: tuple[Matcher, ...], vocabulary: Vocabulary, seed: int
) -> Weights:
    """Return the initial weights, in float32, by their names in the decoder."""
    rng = np.random.default_rng(seed)
    weights = _random_weights(config, rng)
    token, slots = _parts(config)
    # the random projection of a token that a slot holds
    view = np.zeros((config.width, slots[0].stop - slots[0].start))
    view[token] = rng.normal(size=view[token].shape) / np.sqrt(token.stop - token.start)

    embed = weights["embed"]
    embed[:, : token.start] = 0
    embed[:, token.stop :] = 0
    embed[:, CONSTANT] = CONSTANT_VALUE
    embed[vocabulary.types, ASKS] = FLAG_VALUE
    # marks of questions must not match anything by chance
    embed[[vocabulary.begin, vocabulary.question, *vocabulary.types], token] = 0
    embed[vocabulary.record, token] *= 1.5
    mark = view.T @ embed[vocabulary.record]
    mark /= np.linalg.norm(mark)
    for name in ("o", "down"):
        weights[name][..., : token.start] = 0
        weights[name][..., token.stop :] = 0

    for offset, slot in enumerate(slots):
        _look_back(config, weights, offset, view, slot)
    for m in matchers:
        _match(config, weights, m, slots)
        _look_at_own_place(config, weights, m)
        if m.question_type is not None:
            _match_mark(config, weights, m, mark, slots[m.mark_slot])
        _set_output(config, weights, m, view, slots)
    for name in ("q_norm.scale", "k_norm.scale"):
        weights[name][0] = SHARP_PLACE
        for m in matchers:
            weights[name][m.layer] = SHARP_PASSAGE if m.question_type is None else SHARP_RECORD
    return {name: array.astype(np.float32) for name, array in weights.items()}


def trained(config: ModelConfig, matchers: tuple[Matcher, ...]) -> Weights:
    """Return 1 for weights that are trained and 0 for fixed ones, in arrays that broadcast against the weights.

    The queries and keys of the record heads are fixed, as are the queries, keys and values of layer 0's slot heads, and
    the scales of both after their norms. Nothing else may write to the constant, the flags and the slots. The passage
    heads are only trained in the slow RoPE pairs: with the fast ones they would attend to the last few tokens. Heads
    that are trained freely on short sequences fail on long ones.
    """
    layers, d, h = config.num_layers, config.width, config.head_dim
    n, k = config.num_heads, config.num_kv_heads
    token, _ = _parts(config)
    token_dimensions = np.zeros(d)
    token_dimensions[token] = 1
    q, kv, v = np.ones((layers, d, n, h)), np.ones((layers, d, k, h)), np.ones((layers, d, k, h))
    o, norms = np.tile(token_dimensions, (layers, n, h, 1)), np.ones((layers, h))
    for head in range(SLOTS):
        q[0, :, _query_heads(config, head)] = 0
        kv[0, :, head] = 0
        v[0, :, head] = 0
    norms[0] = 0
    slow = np.tile(np.arange(h // 2) >= h // 4, 2)
    for m in matchers:
        trained_dimensions = slow if m.question_type is None else 0
        q[m.layer, :, _query_heads(config, m.head)] = trained_dimensions
        kv[m.layer, :, m.head] = trained_dimensions
        norms[m.layer] = m.question_type is None
    masks = {
        "embed": token_dimensions,
        "q": q,
        "k": kv,
        "v": v,
        "o": o,
        "down": token_dimensions,
        "q_norm.scale": norms,
        "k_norm.scale": norms,
    }
    return {name: array.astype(np.float32) for name, array in masks.items()}


def set_own_place_bias(
    weights: Weights, matchers: tuple[Matcher, ...], biases: Sequence[float] | np.ndarray
) -> Weights:
    """Return the weights with the `own_place_bias` of each type of question replaced."""
    q = np.array(weights["q"])
    group, dimension = q.shape[2] // weights["k"].shape[2], _slow_dimensions(q.shape[3])[2]
    for m in matchers:
        if m.question_type is not None:
            q[m.layer, ASKS[m.question_type], m.head * group : (m.head + 1) * group, dimension] = biases[
                m.question_type
            ]
    return weights | {"q": q}


@jax.jit
def queries_and_keys(model: Decoder, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return every layer's queries [l b n t h] and keys [l b k t h], as attention compares them."""

    def attend(step, carry, xs):
        return causal_attention(step), carry, (step.q, step.k)

    return scan_layers(model, model.embed_tokens(tokens), positions_of(tokens), attend)[2]


def margins(
    model: Decoder, matchers: tuple[Matcher, ...], task: Recall, length: int, samples: int
) -> list[np.ndarray]:
    """Return margins by type of question: the right keys' logits minus the log-sum-exp over the last `NEAR` places."""
    v = task.vocabulary
    values_by_type: list[list[float]] = [[] for _ in v.types]
    heads = {m.question_type: m for m in matchers if m.question_type is not None}
    for seed in range(samples):
        sample = task.sample(seed, length)
        questions_length = sum(len(question) for question in sample.questions[1:])
        tokens, _ = pack(sample, length + questions_length, v.end)
        q, k = (np.asarray(x[:, 0], np.float32) for x in queries_and_keys(model, jnp.asarray(tokens[None])))
        starts = np.flatnonzero(sample.context == v.record)
        for position in np.flatnonzero(np.isin(tokens, v.types)):
            question_type = v.types.index(tokens[position])
            m = heads[question_type]
            (start,) = starts[tokens[starts + (2 if question_type == 2 else 1)] == tokens[position - 1]]
            query = q[m.layer, m.head * q.shape[1] // k.shape[1], position] / np.sqrt(q.shape[-1])
            near = k[m.layer, m.head, position - NEAR + 1 : position + 1] @ query
            right = k[m.layer, m.head, start + KEY_OFFSETS[question_type]] @ query
            values_by_type[question_type].append(right - np.logaddexp.reduce(near))
    return [np.array(values) for values in values_by_type]


def settle_margins(
    weights: Weights,
    as_model: Callable[[Weights], Decoder],
    matchers: tuple[Matcher, ...],
    task: Recall,
    *,
    length: int = 512,
    samples: int = 4,
) -> Weights:
    """Return the weights with the largest `own_place_bias` at which right keys keep `MIN_MARGIN`."""
    low, high = np.zeros(3), np.full(3, 4.0)
    for _ in range(10):
        middle = (low + high) / 2
        weights = set_own_place_bias(weights, matchers, middle)
        smallest = [np.quantile(m, 0.1) for m in margins(as_model(weights), matchers, task, length, samples)]
        large_enough = np.array(smallest) > MIN_MARGIN
        low, high = np.where(large_enough, middle, low), np.where(large_enough, high, middle)
    return set_own_place_bias(weights, matchers, low)


def _random_weights(config: ModelConfig, rng: np.random.Generator) -> Weights:
    layers, d, f, h = config.num_layers, config.width, config.mlp_width, config.head_dim
    n, k = config.num_heads, config.num_kv_heads

    def normal(*shape: int, inputs: int, scale: float = 1.0) -> np.ndarray:
        return rng.normal(size=shape) * scale / np.sqrt(inputs)

    # the other parts of the layers start small compared to the matchers
    small = 0.15 / np.sqrt(2 * layers)
    return {
        "embed": rng.normal(size=(config.vocab_size, d)) * 0.1,
        "q": normal(layers, d, n, h, inputs=d),
        "k": normal(layers, d, k, h, inputs=d),
        "v": normal(layers, d, k, h, inputs=d),
        "o": normal(layers, n, h, d, inputs=n * h, scale=small),
        "gate": normal(layers, d, f, inputs=d),
        "up": normal(layers, d, f, inputs=d),
        "down": normal(layers, f, d, inputs=f, scale=small),
        "attention_norm.scale": np.ones((layers, d)),
        "mlp_norm.scale": np.ones((layers, d)),
        "norm.scale": np.ones(d),
        "q_norm.scale": np.ones((layers, h)),
        "k_norm.scale": np.ones((layers, h)),
    }


def _query_heads(config: ModelConfig, head: int) -> list[int]:
    group = config.num_heads // config.num_kv_heads
    return list(range(head * group, (head + 1) * group))


def _slow_dimensions(head_dim: int) -> tuple[np.ndarray, int, int]:
    """Return dimensions of the slower half of the RoPE pairs: for comparison, for the mark, and for the own place.

    Pair i is dimensions i and i + head_dim / 2. The mark and the own place share the slowest pair.
    """
    pairs = np.arange(head_dim // 4, head_dim // 2)
    return np.concatenate([pairs[:-1], pairs[:-1] + head_dim // 2]), head_dim - 1, head_dim // 2 - 1


def _parts(config: ModelConfig) -> tuple[slice, list[slice]]:
    """Return the dimensions of the residual stream that hold the token, and those of each slot."""
    size = min(16, config.width // 8)
    first = config.width - SLOTS * size
    return slice(ASKS[-1] + 1, first), [slice(first + i * size, first + (i + 1) * size) for i in range(SLOTS)]


def _look_back(config: ModelConfig, weights: Weights, offset: int, view: np.ndarray, slot: slice) -> None:
    """Make layer 0's kv head `offset` fill `slot` from the token `offset` places back."""
    pairs = config.head_dim // 2
    frequencies = config.rope.theta ** -(np.arange(pairs) / pairs)
    direction = np.full(FAST_PAIRS, 1 / np.sqrt(FAST_PAIRS))
    query, key = np.zeros(config.head_dim), np.zeros(config.head_dim)
    query[:FAST_PAIRS] = direction
    # a key that is rotated ahead by `offset` matches the query `offset` places later best
    key[:FAST_PAIRS] = direction * np.cos(offset * frequencies[:FAST_PAIRS])
    key[pairs : pairs + FAST_PAIRS] = direction * np.sin(offset * frequencies[:FAST_PAIRS])

    queries, size = _query_heads(config, offset), view.shape[1]
    weights["k"][0, :, offset] = 0
    weights["k"][0, CONSTANT, offset] = key
    weights["q"][0, :, queries] = 0
    weights["q"][0, CONSTANT, queries] = query
    weights["v"][0, :, offset] = 0
    weights["v"][0, :, offset, :size] = view
    weights["o"][0, queries] = 0
    weights["o"][0, queries, :size, slot] = 0.12 / len(queries) * np.eye(size)


def _match(config: ModelConfig, weights: Weights, m: Matcher, slots: list[slice]) -> None:
    """Make the head's queries and keys only the slots that it compares."""
    compared = _slow_dimensions(config.head_dim)[0]
    size = min(slots[0].stop - slots[0].start, len(compared))
    weights["k"][m.layer, :, m.head] = 0
    weights["k"][m.layer, slots[m.key_slot], m.head][:size, compared[:size]] = np.eye(size)
    for query in _query_heads(config, m.head):
        weights["q"][m.layer, :, query] = 0
        weights["q"][m.layer, slots[m.query_slot], query][:size, compared[:size]] = np.eye(size)


def _match_mark(config: ModelConfig, weights: Weights, m: Matcher, mark: np.ndarray, slot: slice) -> None:
    """Make queries prefer keys whose slot holds the record mark."""
    _, dimension, _ = _slow_dimensions(config.head_dim)
    weights["k"][m.layer, slot, m.head, dimension] = MARK_KEY * mark
    weights["q"][m.layer, CONSTANT, _query_heads(config, m.head), dimension] = MARK_QUERY


def _look_at_own_place(config: ModelConfig, weights: Weights, m: Matcher) -> None:
    """Make queries that the head does not serve look at their own place.

    Queries that ask for its type of record look there a little, too. So if a gate lowers the right key, the answer is
    lost before the key is entirely hidden, and the gate can learn.
    """
    dimension, queries = _slow_dimensions(config.head_dim)[2], _query_heads(config, m.head)
    own_place = np.zeros(config.head_dim)
    pairs = min(NEAR_PAIRS, config.head_dim // 4)
    own_place[:pairs] = 1 / np.sqrt(pairs)
    weights["k"][m.layer, CONSTANT, m.head] += OWN_PLACE_KEY * own_place
    for query in queries:
        if m.question_type is None:
            weights["q"][m.layer, ASKS, query] += OWN_PLACE_QUERY * own_place
        else:
            weights["q"][m.layer, CONSTANT, query] += OWN_PLACE_QUERY * own_place
            weights["q"][m.layer, ASKS[m.question_type], query] -= (
                OWN_PLACE_QUERY * CONSTANT_VALUE / FLAG_VALUE * own_place
            )
            weights["q"][m.layer, ASKS[m.question_type], query, dimension] = m.own_place_bias
    if m.question_type is not None:
        weights["k"][m.layer, ASKS[m.question_type], m.head, dimension] = 1.0


def _set_output(
    config: ModelConfig, weights: Weights, m: Matcher, view: np.ndarray, slots: list[slice]
) -> None:
    """Make the matcher's values a slot. Its output maps them back to the token by a pseudo-inverse."""
    queries, size = _query_heads(config, m.head), view.shape[1]
    weights["v"][m.layer, :, m.head] = 0
    weights["v"][m.layer, slots[m.value_slot], m.head, :size] = np.eye(size)
    weights["o"][m.layer, queries] = 0
    weights["o"][m.layer, queries, :size] = m.output_scale / len(queries) * np.linalg.pinv(view)
