"""Published scores in float64, one sequence and layer at a time: q `[n t h]`, k and v `[k t h]`, scores `[k t]`."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Captured:
    """Results of a layer's attention; hidden: its normed input `[t d]`; frequencies: RoPE's radians per position;
    output: `[n h d]`."""

    hidden: np.ndarray
    q: np.ndarray
    q_pre: np.ndarray
    k: np.ndarray
    v: np.ndarray
    output: np.ndarray
    frequencies: np.ndarray

    @property
    def group(self) -> int:
        return len(self.q) // len(self.k)


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def attention(c: Captured) -> np.ndarray:
    """Return causal probabilities `[n t t]`."""
    t, h = c.q.shape[1:]
    logits = np.einsum("nth,nsh->nts", c.q, np.repeat(c.k, c.group, 0)) / np.sqrt(h)
    return softmax(np.where(np.tril(np.ones((t, t), bool)), logits, -np.inf))


def over_group(x: np.ndarray, group: int) -> np.ndarray:
    return x.reshape(-1, group, *x.shape[1:]).mean(1)


def snapkv_of_groups(c: Captured, observed: int, pool: int = 5) -> np.ndarray:
    """Return WG-KV's composition: the maximum over a group for each query, and the maximum over the neighbours."""
    t = c.q.shape[1]
    p = attention(c)[:, -observed:].reshape(len(c.k), c.group, observed, t).max(1).mean(1)
    p[:, -observed:] = 0
    padded = np.pad(p, ((0, 0), (pool // 2, pool // 2)), constant_values=-np.inf)
    return np.lib.stride_tricks.sliding_window_view(padded, pool, -1).max(-1)


def snapkv(c: Captured, observed: int, pool: int = 5) -> np.ndarray:
    mass = attention(c)[:, -observed:, :-observed].mean(1)
    kernel = np.ones(pool) / pool
    smooth = np.stack([np.convolve(row, kernel, "same") for row in mass])
    return np.pad(over_group(smooth, c.group), ((0, 0), (0, observed)))


def snapkv_of_stored(
    q: np.ndarray, k: np.ndarray, *, pool: int = 5, group: str = "mean", pooling: str = "average"
) -> np.ndarray:
    """Return scores of a kv head's stored keys `[s h]`: the attention to them alone of queries `[g w h]` that are newer
    than all of them (WG-KV's composition with "max" and "max")."""
    p = softmax(np.einsum("gwh,sh->gws", q, k) / np.sqrt(q.shape[-1]))
    mass = (p.max(0) if group == "max" else p.mean(0)).mean(0)
    around = np.lib.stride_tricks.sliding_window_view(
        np.pad(mass, pool // 2, constant_values=-np.inf if pooling == "max" else 0), pool
    )
    return around.max(-1) if pooling == "max" else around.mean(-1)


def dropkv(c: Captured, observed: int, pool: int, pooling: str) -> np.ndarray:
    """Return DropKV's scores, by dropping one entry after another."""
    p, v = attention(c)[:, -observed:], np.repeat(c.v, c.group, 0)
    output, change = p @ v, np.zeros((len(v), v.shape[1]))
    for entry in range(v.shape[1]):
        left = np.delete(p, entry, -1)
        total = left.sum(-1, keepdims=True)
        moved = left / total @ np.delete(v, entry, 1) - output
        change[:, entry] = ((moved * total / (total + 1e-6)) ** 2).sum((1, 2))
    padded = np.pad(over_group(change, c.group), ((0, 0), (pool // 2, pool // 2)))
    around = np.lib.stride_tricks.sliding_window_view(padded, pool, -1)
    return around.max(-1) if pooling == "max" else around.mean(-1)


def tova(c: Captured) -> np.ndarray:
    return np.repeat(attention(c)[:, -1].mean(0, keepdims=True), len(c.k), 0)


def knorm(c: Captured) -> np.ndarray:
    return -np.linalg.norm(c.k, axis=-1)


def keydiff(c: Captured) -> np.ndarray:
    unit = c.k / np.linalg.norm(c.k, axis=-1, keepdims=True)
    anchor = unit.mean(1, keepdims=True)
    return -(unit * anchor).sum(-1) / np.linalg.norm(anchor, axis=-1)


def h2o(c: Captured) -> np.ndarray:
    return over_group(attention(c).sum(1), c.group)


def r_kv(c: Captured, observed: int = 8, pool: int = 7, balance: float = 0.07) -> np.ndarray:
    t, h = c.q.shape[1:]
    logits = np.einsum("nth,nsh->nts", c.q[:, -observed:], np.repeat(c.k, c.group, 0)) / np.sqrt(h)
    logits = logits.reshape(len(c.k), c.group, observed, t).max(1)[..., : t - observed]
    importance = np.pad(softmax(logits).mean(1), ((0, 0), (pool // 2, pool // 2)), constant_values=-np.inf)
    importance = np.lib.stride_tricks.sliding_window_view(importance, pool, -1).max(-1)
    unit = c.k / np.linalg.norm(c.k, axis=-1, keepdims=True)
    cosine = np.einsum("kih,kjh->kij", unit, unit)
    for head in cosine:
        np.fill_diagonal(head, 0)
        for row in head:
            alike = np.flatnonzero(row > 0.5)
            row[alike[-1:]] = 0
    redundancy = softmax(cosine.mean(1))
    return balance * np.pad(importance, ((0, 0), (0, observed))) - (1 - balance) * redundancy


def kvzip(
    c: Captured, tokens: int, end: int, pass_: Any, queries: slice = slice(None), plus: bool = False
) -> np.ndarray:
    """Return the scores of a pass's part `[k s]`, from these of its queries. The prompt has `tokens` tokens, and the
    pass after it ends at `end`. plus: KVzip+."""
    seen = np.r_[: pass_.first, pass_.start : pass_.stop, tokens:end]
    own = end - tokens
    logits = np.einsum("nth,nsh->nts", c.q[:, tokens:end], np.repeat(c.k[:, seen], c.group, 0))
    visible = np.tril(np.ones((own, len(seen)), bool), len(seen) - own)
    p = softmax(np.where(visible, logits / np.sqrt(c.q.shape[-1]), -np.inf))
    if plus:
        added = np.linalg.norm(
            np.einsum("nsh,nhd->nsd", np.repeat(c.v[:, seen], c.group, 0), c.output), axis=-1
        )
        p = p * added[:, None] / np.linalg.norm(c.hidden[tokens:end], axis=-1)[:, None]
    largest = p[:, queries, pass_.first : pass_.first + pass_.stop - pass_.start].max(1)
    return largest.reshape(len(c.k), c.group, -1).max(1)


def expected_attention(c: Captured, sink: int = 4, future: int = 512, values: bool = True) -> np.ndarray:
    t, h = c.q.shape[1:]
    q = c.q_pre[:, sink:]
    mean = q.mean(1)
    centred = q - mean[:, None]
    covariance = np.einsum("nti,ntj->nij", centred, centred) / q.shape[1]
    turn = np.zeros((h, h))
    for position in range(t, t + future):
        cos, sin = np.diag(np.cos(position * c.frequencies)), np.diag(np.sin(position * c.frequencies))
        turned = 2 * len(cos)
        rotation = np.eye(h)
        rotation[:turned, :turned] = np.block([[cos, -sin], [sin, cos]])
        turn += rotation / future
    mean, covariance = mean @ turn.T, turn @ covariance @ turn.T
    k = np.repeat(c.k, c.group, 0)[:, sink:]
    z = np.einsum("nsh,nh->ns", k, mean) / np.sqrt(h)
    z += np.einsum("nsi,nij,nsj->ns", k, covariance, k) / (2 * h)
    score = over_group(softmax(z), c.group)
    if values:
        score = score * np.linalg.norm(c.v[:, sink:], axis=-1)
    return np.pad(score, ((0, 0), (sink, 0)))


def triattention(
    k: np.ndarray,
    position: np.ndarray,
    mean: np.ndarray,
    length: np.ndarray,
    frequencies: np.ndarray,
    tokens: int,
) -> np.ndarray:
    """Return TriAttention's scores `[s]` of one kv head's keys `[s h]`, from a group's statistics `[g h/2]`, after
    `tokens` tokens. Keys are rotated back by their positions, and every distance is evaluated, as in the authors'
    code."""
    turned = len(frequencies)
    halves = [*np.split(k[:, : 2 * turned], 2, 1), *np.split(k[:, 2 * turned :], 2, 1)]
    omega = np.pad(frequencies, (0, k.shape[1] // 2 - turned))
    k = np.hstack(halves[::2]) + 1j * np.hstack(halves[1::2])
    relative = mean[:, None] * np.conj(k * np.exp(-1j * position[:, None] * omega))
    offsets = 2 ** np.arange(17)
    distance = (tokens - position)[:, None] + offsets
    phase = distance[..., None] * omega + np.angle(relative)[:, :, None]
    score = (np.abs(relative)[:, :, None] * np.cos(phase)).sum(-1).mean(-1)
    score += ((length - np.abs(mean))[:, None] * np.abs(k)).sum(-1)
    return ((score - score.mean(1, keepdims=True)) / score.std(1, keepdims=True)).max(0)


def critical(c: Captured, score: np.ndarray, forced: np.ndarray, kept: int, share: float = 0.5) -> np.ndarray:
    """Return the scores of CriticalKV's second stage, infinite where the first stage already keeps the entry."""
    first = best(np.where(forced, np.inf, score), int(share * kept))
    return np.where(first, np.inf, (score + 1e-4) * output_norm(c))


def output_norm(c: Captured) -> np.ndarray:
    added = np.einsum("nsh,nhd->nsd", np.repeat(c.v, c.group, 0), c.output)
    return over_group(np.abs(added).sum(-1), c.group)


def defensive(c: Captured, observed: int, places: np.ndarray, pool: int = 5) -> np.ndarray:
    """Return DefensiveKV's scores. places: the largest numbers of entries in each head's first stage `[k]`."""
    p = attention(c)[:, -observed:, :-observed]
    smooth = np.lib.stride_tricks.sliding_window_view(
        np.pad(p, ((0, 0), (0, 0), (pool // 2, pool // 2))), pool, -1
    )
    smooth = smooth.mean(-1)
    smooth *= p.sum(-1, keepdims=True) / smooth.sum(-1, keepdims=True)
    risk = smooth.reshape(len(c.k), -1, smooth.shape[-1]).max(1)
    risk = np.maximum(risk, risk.mean(-1, keepdims=True))
    norm = output_norm(c)[:, :-observed]
    score = risk * norm / norm.sum(0)
    mean = over_group(p.mean(1), c.group)
    beta = mean[:, -observed:].sum(-1).mean()
    first = np.zeros(score.shape, bool)
    for head, (row, count) in enumerate(zip(mean, places, strict=True)):
        order = np.argsort(-row)
        reached = np.cumsum(row[order]) / row.sum()
        first[head, order[: min(np.argmax(reached >= 0.9 - beta), count)]] = True
    return np.pad(np.where(first, score.max(), score), ((0, 0), (0, observed)))


def best(score: np.ndarray, count: int) -> np.ndarray:
    """Return a mask of the `count` highest along the last axis; of equal ones the earlier come first."""
    order = np.argsort(-score, axis=-1, kind="stable")
    return np.argsort(order, axis=-1) < count
