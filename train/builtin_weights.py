"""The built-in model's initial weights: random, but some attention heads start as what they will be used for.

From a random start a model this small does not find out in millions of tokens how to look something up. So some
heads start as matchers, in the unchanged architecture, and keep to it in training (`paces`).

The residual stream starts in three parts. Dimension 0 is a constant, dimension 1 says that the token asks for a type
of answer, dimension 2 that it begins the sequence. Four slots at the end hold the token itself and the ones 1, 2 and
3 places back, in a random projection. The rest is the token, and where everything else happens.

* Layer 0: kv head i looks i places back, by the fastest RoPE pairs, and fills slot i.
* Finding a record (`<|record|> a b c`) by the key in slot 1 of a question's last token: F matches it with slot 1 (the
  place of `b`), S with slot 2 (the place of `c`), R with slot 0 (the place of `b`, and gives slot 1, `a`).
  One dimension more says whether the record mark is where it should be. Another makes every query that is not a
  question's last rest on the sequence's first token, so that plain text has no use for what these heads keep.
* Going on with a passage: one head matches slot 0 with slot 1, another matches slot 1 with slot 2. Neither alone can
  tell passages apart that share a token; their sum can.

All of these match in the slowest RoPE pairs, so that the distance does not matter.
"""

from dataclasses import dataclass

import numpy as np

from kvjax.evaluate.tasks import Vocabulary
from kvjax.models.config import ModelConfig

Weights = dict[str, np.ndarray]
"""Arrays by their names in the decoder, layers stacked: q [l d n h], k and v [l d k h], o [l n h d], gate [l d f], …"""

SLOTS = 4
CONSTANT, ASKS, BEGINS = 0, 1, 2
"""Dimensions of the residual stream that are set apart, before the token's."""
CONSTANT_VALUE, FLAG_VALUE = 0.3, 0.8
REST = 5.0
SHARPNESS = 2.5
"""Scale of queries and of keys after their norms, where heads have a purpose from the start."""
SLOW = 0.05
"""How fast these heads' queries and keys are trained, relative to everything else."""
FAST_PAIRS = 4


@dataclass(frozen=True)
class Matcher:
    """A kv head that starts as a matcher.

    query and key: the slots it compares. mark: the slot in which the record mark should be (0: no mark is wanted).
    gives: the slot it hands on (0: the token, from the middle of the stream).
    """

    layer: int
    head: int
    query: int
    key: int
    mark: int = 0
    gives: int = 0


def record_matchers(layer: int) -> tuple[Matcher, ...]:
    return (
        Matcher(layer, 0, query=1, key=1, mark=2),
        Matcher(layer, 1, query=1, key=2, mark=3),
        Matcher(layer, 2, query=1, key=0, mark=2, gives=1),
    )


def passage_matchers(layer: int) -> tuple[Matcher, ...]:
    return (Matcher(layer, 0, query=0, key=1), Matcher(layer, 1, query=1, key=2))


def initial_weights(
    config: ModelConfig, matchers: tuple[Matcher, ...], vocabulary: Vocabulary, seed: int
) -> Weights:
    """Weights to start from, float32, by their names in the decoder."""
    rng = np.random.default_rng(seed)
    weights = _random_weights(config, rng)
    token, slots = _parts(config)
    # what of a token a slot holds
    view = np.zeros((config.width, slots[0].stop - slots[0].start))
    view[token] = rng.normal(size=view[token].shape) / np.sqrt(token.stop - token.start)

    embed = weights["embed"]
    embed[:, : token.start] = 0
    embed[:, token.stop :] = 0
    embed[:, CONSTANT] = CONSTANT_VALUE
    embed[list(vocabulary.types), ASKS] = FLAG_VALUE
    # nothing is read where a query rests
    embed[vocabulary.begin, token] = 0
    embed[vocabulary.begin, BEGINS] = FLAG_VALUE
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
        if m.mark:
            _look_for_mark(config, weights, m, mark, slots[m.mark])
        _hand_on(config, weights, m, view, slots, token, rng)
    for layer in {0} | {m.layer for m in matchers}:
        weights["q_norm.scale"][layer] = SHARPNESS
        weights["k_norm.scale"][layer] = SHARPNESS
    return {name: array.astype(np.float32) for name, array in weights.items()}


def paces(config: ModelConfig, matchers: tuple[Matcher, ...]) -> Weights:
    """What to multiply each weight's updates with.

    Nothing else may write to the constant, the flags and the slots, and where heads with a purpose look changes slowly.
    """
    layers, n, k = config.num_layers, config.num_heads, config.num_kv_heads
    token, _ = _parts(config)
    middle = np.zeros(config.width)
    middle[token] = 1
    q, kv, norms = np.ones((layers, 1, n, 1)), np.ones((layers, 1, k, 1)), np.ones((layers, 1))
    v, o = np.ones_like(kv), np.tile(middle, (layers, n, 1, 1))
    for layer, head in [(0, head) for head in range(SLOTS)] + [(m.layer, m.head) for m in matchers]:
        q[layer, :, _query_heads(config, head)] = SLOW
        kv[layer, :, head] = SLOW
        norms[layer] = SLOW
    v[0, :, :SLOTS] = SLOW
    pace = {
        "embed": middle,
        "q": q,
        "k": kv,
        "v": v,
        "o": o,
        "down": middle,
        "q_norm.scale": norms,
        "k_norm.scale": norms,
    }
    return {name: array.astype(np.float32) for name, array in pace.items()}


def _random_weights(config: ModelConfig, rng: np.random.Generator) -> Weights:
    layers, d, f, h = config.num_layers, config.width, config.mlp_width, config.head_dim
    n, k = config.num_heads, config.num_kv_heads

    def normal(*shape: int, inputs: int, scale: float = 1.0) -> np.ndarray:
        return rng.normal(size=shape) * scale / np.sqrt(inputs)

    # what the layers add starts small beside what the matchers add
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
    """Dimensions of the slower half of the RoPE pairs: those for what is compared, for the mark, and for resting.

    Pair i is dimensions i and i + head_dim / 2. The slowest pair serves the mark and the rest.
    """
    pairs = np.arange(head_dim // 4, head_dim // 2)
    return np.concatenate([pairs[:-1], pairs[:-1] + head_dim // 2]), head_dim - 1, head_dim // 2 - 1


def _parts(config: ModelConfig) -> tuple[slice, list[slice]]:
    """The dimensions of the residual stream that hold the token, and those of each slot."""
    size = min(16, config.width // 8)
    first = config.width - SLOTS * size
    return slice(BEGINS + 1, first), [slice(first + i * size, first + (i + 1) * size) for i in range(SLOTS)]


def _look_back(config: ModelConfig, weights: Weights, offset: int, view: np.ndarray, slot: slice) -> None:
    """Layer 0's kv head `offset` fills `slot` from the token `offset` places back."""
    pairs = config.head_dim // 2
    frequencies = config.rope.theta ** -(np.arange(pairs) / pairs)
    turned = np.full(FAST_PAIRS, 1 / np.sqrt(FAST_PAIRS))
    query, key = np.zeros(config.head_dim), np.zeros(config.head_dim)
    query[:FAST_PAIRS] = turned
    # a key turned ahead by `offset` is best met by the query `offset` places on
    key[:FAST_PAIRS] = turned * np.cos(offset * frequencies[:FAST_PAIRS])
    key[pairs : pairs + FAST_PAIRS] = turned * np.sin(offset * frequencies[:FAST_PAIRS])

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
    """The head's queries and keys are the slots it compares, and nothing else."""
    compared = _slow_dimensions(config.head_dim)[0]
    size = min(slots[0].stop - slots[0].start, len(compared))
    weights["k"][m.layer, :, m.head] = 0
    weights["k"][m.layer, slots[m.key], m.head][:size, compared[:size]] = np.eye(size)
    for query in _query_heads(config, m.head):
        weights["q"][m.layer, :, query] = 0
        weights["q"][m.layer, slots[m.query], query][:size, compared[:size]] = np.eye(size)


def _look_for_mark(config: ModelConfig, weights: Weights, m: Matcher, mark: np.ndarray, slot: slice) -> None:
    """Keys say whether their slot holds the mark; queries want it if they ask, and else the first token."""
    _, marked, rest = _slow_dimensions(config.head_dim)
    weights["k"][m.layer, slot, m.head, marked] = 0.5 * mark
    weights["k"][m.layer, BEGINS, m.head, rest] = 1.6
    for query in _query_heads(config, m.head):
        weights["q"][m.layer, CONSTANT, query, marked] = 2.0
        weights["q"][m.layer, CONSTANT, query, rest] = REST
        # takes the wish to rest away from the tokens that ask
        weights["q"][m.layer, ASKS, query, rest] = -REST * CONSTANT_VALUE / FLAG_VALUE


def _hand_on(
    config: ModelConfig,
    weights: Weights,
    m: Matcher,
    view: np.ndarray,
    slots: list[slice],
    token: slice,
    rng: np.random.Generator,
) -> None:
    """The matcher's values and output: the found token, or what its slot says, goes to the lower half of the stream."""
    h, queries = config.head_dim, _query_heads(config, m.head)
    out = np.zeros((h, config.width))
    weights["v"][m.layer, :, m.head] = 0
    if m.gives:
        size = view.shape[1]
        weights["v"][m.layer, slots[m.gives], m.head, :size] = np.eye(size)
        out[:size] = 0.4 * np.linalg.pinv(view)
    else:
        part = np.linalg.qr(rng.normal(size=(token.stop - token.start, h)))[0]
        weights["v"][m.layer, token, m.head] = part
        out[:, token] = 0.6 * part.T
    weights["o"][m.layer, queries] = out / len(queries)
