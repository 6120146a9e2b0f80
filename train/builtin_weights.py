"""The built-in model's initial weights: random, but some attention heads start as what they will be used for.

From a random start a model this small does not find out in millions of tokens how to look something up. So some
heads start as matchers, in the unchanged architecture; all weights are then trained freely.

The residual stream is used in two halves. Dimension 0 is a constant, the rest of the lower half is the token itself.
The upper half has three slots of 20 dimensions: the tokens 1, 2 and 3 places back, in a random projection.

* Layer 0: kv heads 0, 1 and 2 look softly 1, 2 and 3 places back, by the fastest RoPE pairs, and fill the slots.
* Finding a record (`<|record|> a b c`) by the key in slot 1 of a question's last token: F matches it with slot 1 (the
  place of `b`), S with slot 2 (the place of `c`), R with the token itself (the place of `b`, and gives slot 1, `a`).
  One dimension more says whether the record mark is where it should be.
* Going on with a passage: one head matches the last token with slot 1, another matches slot 1 with slot 2. Neither
  alone can tell passages apart that share a token; their sum can.

All of these match in the slowest RoPE pairs, so that the distance does not matter.
"""

from dataclasses import dataclass

import numpy as np

from kvjax.models.config import ModelConfig

Weights = dict[str, np.ndarray]
"""Arrays by their names in the decoder, layers stacked: q [l d n h], k and v [l d k h], o [l n h d], gate [l d f], …"""

OFFSETS = (1, 2, 3)
CONSTANT = 0.3
FAST_PAIRS = 4


@dataclass(frozen=True)
class Matcher:
    """A kv head that starts as a matcher.

    query and key: which of the token (0) and the slots (1, 2, 3) it compares. mark: the slot in which the record mark
    should be (0: no mark is wanted). gives: the token (0) or the slot that it hands on.
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
    config: ModelConfig, matchers: tuple[Matcher, ...], record_mark: int, seed: int, mark_weight: float = 1.2
) -> Weights:
    """Weights to start from, float32. `record_mark` is the id of the token that stands before records."""
    rng = np.random.default_rng(seed)
    weights = _random_weights(config, rng)
    half = config.width // 2
    slot_size = min(half // 3, 20)
    slots = [slice(half + i * slot_size, half + (i + 1) * slot_size) for i in range(3)]
    # what of a token a slot holds
    view = np.zeros((config.width, slot_size))
    view[1:half] = rng.normal(size=(half - 1, slot_size)) / np.sqrt(half - 1)

    embed = weights["embed"]
    embed[:, 0] = CONSTANT
    embed[:, half:] *= 0.1
    embed[record_mark, 1:half] *= 1.5
    mark = view.T @ embed[record_mark]
    mark /= np.linalg.norm(mark)

    for head, (offset, slot) in enumerate(zip(OFFSETS, slots, strict=True)):
        _look_back(config, weights, head, offset, view, slot)
    slow = _slow_dimensions(config.head_dim)
    compared, marked = slow[:-1][:slot_size], slow[-1]
    for m in matchers:
        queries = _query_heads(config, m.head)
        weights["k"][m.layer, :, m.head] *= 0.05
        weights["q"][m.layer, :, queries] *= 0.05
        weights["k"][m.layer][:, m.head, compared] = _reader(m.key, view, slots)[:, : len(compared)]
        for query in queries:
            weights["q"][m.layer][:, query, compared] = _reader(m.query, view, slots)[:, : len(compared)]
        if m.mark:
            # the mark weighs less where the token itself is compared, which is larger than what is in a slot
            weights["k"][m.layer, slots[m.mark - 1], m.head, marked] = mark * (
                min(mark_weight, 0.9) if m.key == 0 else mark_weight
            )
            weights["q"][m.layer, 0, queries, marked] = 0.6
        _hand_on(config, weights, m, view, slots, rng)
    for layer in {m.layer for m in matchers}:
        weights["q_norm.scale"][layer] *= 1.5
        weights["k_norm.scale"][layer] *= 1.5
    return {name: array.astype(np.float32) for name, array in weights.items()}


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


def _slow_dimensions(head_dim: int) -> np.ndarray:
    """Dimensions of the slower half of the RoPE pairs: pair i is dimensions i and i + head_dim / 2."""
    pairs = np.arange(head_dim // 4, head_dim // 2)
    return np.concatenate([pairs, pairs + head_dim // 2])


def _reader(place: int, view: np.ndarray, slots: list[slice]) -> np.ndarray:
    """[d, slot size]: reads a slot, or the token as a slot would hold it (place 0)."""
    if place == 0:
        return view
    reader = np.zeros_like(view)
    reader[slots[place - 1]] = np.eye(view.shape[1])
    return reader


def _look_back(
    config: ModelConfig, weights: Weights, head: int, offset: int, view: np.ndarray, slot: slice
) -> None:
    """Layer 0's kv head `head` fills `slot` from the token `offset` places back."""
    pairs = config.head_dim // 2
    frequencies = config.rope.theta ** -(np.arange(pairs) / pairs)
    turned = np.full(FAST_PAIRS, 1 / np.sqrt(FAST_PAIRS))
    query, key = np.zeros(config.head_dim), np.zeros(config.head_dim)
    query[:FAST_PAIRS] = turned
    # a key turned ahead by `offset` is best met by the query `offset` places on
    key[:FAST_PAIRS] = turned * np.cos(offset * frequencies[:FAST_PAIRS])
    key[pairs : pairs + FAST_PAIRS] = turned * np.sin(offset * frequencies[:FAST_PAIRS])

    queries, size = _query_heads(config, head), view.shape[1]
    weights["k"][0, :, head] *= 0.1
    weights["k"][0, 0, head] = 2 * key
    weights["q"][0, :, queries] *= 0.1
    weights["q"][0, 0, queries] = 2 * query
    weights["v"][0, :, head] = 0
    weights["v"][0, :, head, :size] = view
    weights["o"][0, queries] = 0
    weights["o"][0, queries, :size, slot] = 0.12 / len(queries) * np.eye(size)
    if head == 0:
        weights["q_norm.scale"][0] *= 1.7
        weights["k_norm.scale"][0] *= 1.7


def _hand_on(
    config: ModelConfig,
    weights: Weights,
    m: Matcher,
    view: np.ndarray,
    slots: list[slice],
    rng: np.random.Generator,
) -> None:
    """The matcher's values and output: the found token, or what its slot says, goes to the lower half of the stream."""
    half, h, queries = config.width // 2, config.head_dim, _query_heads(config, m.head)
    out = np.zeros((h, config.width))
    weights["v"][m.layer, :, m.head] = 0
    if m.gives:
        size = view.shape[1]
        weights["v"][m.layer, slots[m.gives - 1], m.head, :size] = np.eye(size)
        out[:size] = 0.4 * np.linalg.pinv(view)
    else:
        part = np.linalg.qr(rng.normal(size=(half - 1, h)))[0]
        weights["v"][m.layer, 1:half, m.head] = part
        out[:, 1:half] = 0.6 * part.T
    weights["o"][m.layer, queries] = out / len(queries)
