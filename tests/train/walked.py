"""The score loss, computed by a walk through the cache of one head, query by query."""

import numpy as np


def walk_pairs(target, k, window, sink):
    """Return for each token that leaves the window when the cache is full the worst by target of the `k` cached
    tokens."""
    pairs, cached = {}, []
    for query in range(len(target)):
        new = query - window
        if new < sink:
            continue
        if len(cached) == k and k:
            worst = min(cached, key=lambda u: (target[u], -u))
            pairs[new] = worst
        cached = sorted([*cached, new], key=lambda u: (-target[u], u))[:k]
    return pairs


def loss_of_pairs(score, target, pairs, temperature):
    """Return the mean of softplus(−y Δscore / τ) · min(1, |Δtarget|), with y the sign of Δtarget, in float64, and how
    often both have one sign."""
    score, target = (np.asarray(x, np.float64) for x in (score, target))
    score_gap, target_gap = (np.array([x[u] - x[b] for u, b in pairs.items()]) for x in (score, target))
    errors = np.logaddexp(0, -np.sign(target_gap) * score_gap / temperature) * np.minimum(
        1, np.abs(target_gap)
    )
    return errors.mean(), np.mean(np.sign(target_gap) == np.sign(score_gap))
