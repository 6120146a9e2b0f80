"""Draw the next token of each sequence from its logits. Sampling parameters are arrays with one row per sequence, so
one program serves sequences with different parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, UInt

from kvjax.errors import UserError
from kvjax.mesh import BATCH, P, put
from kvjax.sampling_params import SamplingParams
from kvjax.struct import static, struct

SMALLEST_SPACE = 8
"""The smallest space for stop tokens and for biases, so that different numbers of them run the same program."""


@struct
class Sampler:
    """Sampling parameters of `b` sequences."""

    temperature: Float32[Array, " b"]
    top_k: Int[Array, " b"]
    top_p: Float32[Array, " b"]
    min_p: Float32[Array, " b"]
    repetition: Float32[Array, " b"]
    presence: Float32[Array, " b"]
    frequency: Float32[Array, " b"]
    stop: Int[Array, "b s"]
    """Tokens that end a sequence, padded with −1."""
    biased: Int[Array, "b m"]
    """Token ids with a bias, padded with the vocabulary's size."""
    bias: Float32[Array, "b m"]
    most: Int[Array, " b"]
    """The most tokens of an answer."""
    key: jax.Array
    """Random keys [b]."""
    allowed: Bool[Array, "b v"] | None = None
    """Mask of the tokens that may come next; None: all may."""
    greedy: bool = static(default=False)
    """True if every sequence takes its most likely token."""
    penalized: bool = static(default=False)
    """True if one of the sequences has a penalty, for which tokens are counted."""
    alternatives: int | None = static(default=None)
    """The number of most likely tokens to return at each place; None: no log-probabilities are returned."""

    def ends(self, token: Int[Array, " b"], made: Int[Array, "*b"] | int) -> Bool[Array, " b"]:
        """Return a mask of the sequences that end with `token`. made: the number of tokens of each answer, including
        this one; one number for all or one for each."""
        return (token[:, None] == self.stop).any(-1) | (made >= self.most)


@struct
class Counts:
    """Counts of the tokens so far, for penalties."""

    answer: Int[Array, "b v"]
    """The number of times that each token occurs in the answer."""
    prompt: Bool[Array, "b v"]
    """True for the tokens that occur in the prompt."""

    def with_token(self, token: Int[Array, " b"], drawn: Bool[Array, " b"]) -> Counts:
        """Return the counts after one more token of each sequence that drew one."""
        vocabulary = self.answer.shape[-1]
        new = (jnp.arange(vocabulary) == token[:, None]) & drawn[:, None]
        return dataclasses.replace(self, answer=self.answer + new)


def make_sampler(
    params: Sequence[SamplingParams],
    answers: Sequence[int],
    eos: Sequence[int],
    vocabulary: int,
    rows: Sequence[int] | None = None,
    batch: int | None = None,
    stops: int = 0,
    biases: int = 0,
) -> Sampler:
    """Return the sampler of a batch on the current mesh.

    Args:
        params: the parameters of each answer.
        answers: the index of each answer among those to its prompt, from 0.
        eos: the model's own stop tokens.
        rows: the row of each answer in the batch; by default answers are in order.
        batch: rows of the batch. Those without an answer end with their first token.
        stops, biases: the smallest space for stop tokens and for biases.

    Raises:
        UserError: a token id is outside the vocabulary.
    """
    rows = range(len(params)) if rows is None else rows
    batch = len(params) if batch is None else batch
    for sampling in params:
        named = {"stop_token_ids": sampling.stop_token_ids, "logit_bias": sampling.logit_bias}
        for name, ids in named.items():
            if (largest := max(ids, default=0)) >= vocabulary:
                raise UserError(
                    f"sampling: {name} has token id {largest}, the model's vocabulary is 0 … {vocabulary - 1}"
                )
    ends_of = [sampling.stop_tokens(eos) for sampling in params]
    longest = max((len(sampling.logit_bias) for sampling in params), default=0)
    stop = np.full((batch, max(stops, _space(max(map(len, ends_of), default=0)))), -1, np.int32)
    biased = np.full((batch, max(biases, _space(longest) if longest else 0)), vocabulary, np.int32)
    bias = np.zeros(biased.shape, np.float32)
    max_tokens = np.ones(batch, np.int32)
    seeds, numbers = np.zeros(batch, np.uint32), np.zeros(batch, np.uint32)
    fields = {
        "temperature": (0.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "repetition_penalty": (1.0, np.float32),
        "presence_penalty": (0.0, np.float32),
        "frequency_penalty": (0.0, np.float32),
    }
    columns = {name: np.full(batch, default, dtype) for name, (default, dtype) in fields.items()}
    for row, sampling, number, ends in zip(rows, params, answers, ends_of, strict=True):
        for name, column in columns.items():
            column[row] = getattr(sampling, name)
        stop[row, : len(ends)] = ends
        biased[row, : len(sampling.logit_bias)] = [*sampling.logit_bias]
        bias[row, : len(sampling.logit_bias)] = [*sampling.logit_bias.values()]
        max_tokens[row], seeds[row], numbers[row] = sampling.max_new_tokens, sampling.seed, number
    alternatives = [sampling.logprobs for sampling in params if sampling.logprobs is not None]
    return Sampler(
        *(put(column, BATCH) for column in columns.values()),
        stop=put(stop, BATCH, None),
        biased=put(biased, BATCH, None),
        bias=put(bias, BATCH, None),
        most=put(max_tokens, BATCH),
        key=_keys(put(seeds, BATCH), put(numbers, BATCH)),
        greedy=all(sampling.temperature == 0 for sampling in params),
        penalized=any(sampling.penalized for sampling in params),
        alternatives=max(alternatives) if alternatives else None,
    )


@jax.jit
@jax.vmap
def _keys(seed: UInt[Array, ""], number: UInt[Array, ""]) -> jax.Array:
    """Return the random key of an answer."""
    return jax.random.fold_in(jax.random.key(seed), number)


def _space(count: int) -> int:
    """Return a power of two that is at least `count` and `SMALLEST_SPACE`."""
    return max(SMALLEST_SPACE, 1 << max(count - 1, 0).bit_length())


def count_tokens(
    sampler: Sampler, prompts: Sequence[Int[np.ndarray, " _"]], vocabulary: int
) -> Counts | None:
    """Return the counts before the first token; None if no sequence has a penalty.

    Args:
        prompts: token ids of each row of the batch.
    """
    if not sampler.penalized:
        return None
    seen = np.zeros((len(sampler.stop), vocabulary), bool)
    for row, prompt in enumerate(prompts):
        seen[row, prompt] = True
    return Counts(put(np.zeros(seen.shape, np.int32), BATCH, None), put(seen, BATCH, None))


def draw(
    sampler: Sampler, logits: Float[Array, "b v"], index: Int[Array, "*b"] | int, counts: Counts | None = None
) -> Int[Array, " b"]:
    """Return the next token of each sequence.

    Args:
        index: the index of the token in its answer, from 0, one for all sequences or one for each. The random numbers
            depend only on it and on the sequence's key, not on the batch or on blocks.
        counts: counts of the tokens so far; None if no sequence has a penalty.
    """
    logits = jax.sharding.reshard(logits.astype(jnp.float32), P(BATCH, None))
    logits = _biased(sampler, logits)
    if counts is not None:
        logits = _penalized(sampler, logits, counts)
    if sampler.allowed is not None:
        logits = jnp.where(sampler.allowed, logits, -jnp.inf)
    likely = jnp.argmax(logits, -1).astype(jnp.int32)
    if sampler.greedy:
        return likely
    greedy = sampler.temperature == 0
    logits = logits / jnp.where(greedy, 1.0, sampler.temperature)[:, None]
    logits = jnp.where(logits >= _floor(sampler, logits)[:, None], logits, -jnp.inf)
    vocabulary = logits.shape[-1]
    index = jax.sharding.reshard(jnp.broadcast_to(index, greedy.shape), P(BATCH))
    keys = jax.vmap(jax.random.fold_in)(sampler.key, index)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocabulary,)))(keys)
    return jnp.where(greedy, likely, jnp.argmax(logits + noise, -1).astype(jnp.int32))


def _biased(sampler: Sampler, logits: Float32[Array, "b v"]) -> Float32[Array, "b v"]:
    if sampler.biased.shape[1] == 0:
        return logits
    return jax.vmap(lambda row, ids, bias: row.at[ids].add(bias, mode="drop"))(
        logits, sampler.biased, sampler.bias
    )


def _penalized(sampler: Sampler, logits: Float32[Array, "b v"], counts: Counts) -> Float32[Array, "b v"]:
    occurred = counts.prompt | (counts.answer > 0)
    repetition = sampler.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(occurred, repeated, logits)
    logits -= sampler.frequency[:, None] * counts.answer
    return logits - sampler.presence[:, None] * (counts.answer > 0)


def _floor(sampler: Sampler, logits: Float32[Array, "b v"]) -> Float32[Array, " b"]:
    """Return the smallest logit that top_k, top_p and min_p keep."""
    vocabulary = logits.shape[-1]
    ranked = -jnp.sort(-logits, axis=-1)
    kth = jnp.where(sampler.top_k > 0, jnp.minimum(sampler.top_k, vocabulary), vocabulary) - 1
    place = jnp.arange(vocabulary)
    floor_k = jnp.where(place == kth[:, None], ranked, 0).sum(-1)
    p = jax.nn.softmax(jnp.where(ranked >= floor_k[:, None], ranked, -jnp.inf), -1)
    # the smallest set of most likely tokens whose probability reaches top_p: tokens for which the more likely ones sum
    # to less than top_p, and always the first one, since devices flush a tiny top_p to zero
    inside = (jnp.cumsum(p, -1) - p < sampler.top_p[:, None]) | (place == 0)
    floor_p = jnp.where(inside, ranked, jnp.inf).min(-1)
    return jnp.maximum(jnp.maximum(floor_k, floor_p), ranked[:, 0] + jnp.log(sampler.min_p))


@struct
class Logprobs:
    """Log-probabilities by the model's own distribution, before any sampling parameter."""

    chosen: Float32[Array, " b"]
    tokens: Int[Array, "b m"]
    """The most likely tokens, the likeliest first."""
    values: Float32[Array, "b m"]


def log_probabilities(
    sampler: Sampler, logits: Float[Array, "b v"], token: Int[Array, " b"]
) -> Logprobs | None:
    """Return the log-probabilities of `token` and of the most likely tokens; None if no sequence wants them."""
    if sampler.alternatives is None:
        return None
    logits = jax.sharding.reshard(logits.astype(jnp.float32), P(BATCH, None))
    norm = jax.nn.logsumexp(logits, -1, keepdims=True)
    chosen = jnp.where(jnp.arange(logits.shape[-1]) == token[:, None], logits, 0).sum(-1, keepdims=True)
    # at least one, since an array without elements is not split by its sharding
    values, tokens = jax.lax.top_k(logits, min(max(1, sampler.alternatives), logits.shape[-1]))
    return Logprobs((chosen - norm)[:, 0], tokens.astype(jnp.int32), values - norm)
