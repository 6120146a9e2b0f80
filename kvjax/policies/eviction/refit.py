"""Refit after eviction (Attention Matching: Zweiger et al., 2026, arXiv:2602.16284): the entries that stay get new
values and biases, so that they replace the dropped ones."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import cho_factor, cho_solve
from jaxtyping import Array, Bool, Float

from kvjax.errors import UserError, shown, whole_number
from kvjax.policies.base import BIAS, Eviction, Reconstruction
from kvjax.policies.eviction.kvzip import KVzip
from kvjax.policies.eviction.wrapper import Wrapper, innermost
from kvjax.policies.numbers import EXACT
from kvjax.policies.schedule import Schedule
from kvjax.struct import assign, host, struct
from pallas_kernels.softmax import logits

LARGEST = 3.0
"""The largest size of a bias, as in the authors' configurations."""
STEPS = 2
"""The number of gradient steps after the clipped least squares, as in the authors' configurations."""
RIDGE = 0.01
"""The weight of the squared distance to the entry's own value, and to no bias, relative to the mean squared norm of the
matrix's rows. The authors use none, with up to 50,000 queries. Here there are often more entries than queries, and
float32 cannot solve the equations without it."""
POWER_STEPS = 8
"""The number of power iterations for the largest eigenvalue. They begin with a vector of ones. It is never orthogonal
to the eigenvector, since no number of the matrix is negative."""
BLOCK = 128
"""The number of queries whose attention to all entries is computed at a time."""


@struct
class Refit(Wrapper):
    """A wrapper that refits the entries that a compaction leaves. Each gets a bias, so that the entries together have
    the attention mass of all entries before (`bias`), and a new value, so that their attention output is that of all
    entries (`fit`). Both are least squares over reference queries, for each kv head alone. Keys do not change.

    The reference queries come from the tokens of KVzip's reconstruction passes, in which the model repeats the context
    (the paper's repeat-prefill), spread evenly over all passes. Attention to anything but the prompt's entries does not
    count. Unlike in the authors' code, entries that always stay are fitted, too.
    """

    tokenizer: Any = host(default=None, repr=False)
    """The model's tokenizer, for the texts of the passes. Only their token ids are kept."""
    reader: Any = host(default=None, repr=False)
    """The method whose reconstruction passes are read; None: the wrapped eviction if it has passes, else
    `KVzip(tokenizer)`."""
    queries: int = host(default=1024)
    """The number of reference queries of each kv head, over all query heads of its group."""
    name = "refit"

    def __post_init__(self):
        super().__post_init__()
        method = innermost(self.eviction)
        reader = method if self.reader is None and isinstance(method, Reconstruction) else self.reader
        if reader is None:
            if self.tokenizer is None:
                raise UserError(
                    f"{self.name} needs tokenizer=: it asks the model in text to repeat the context (or give reader=, "
                    "such as KVzip with token ids)"
                )
            reader = KVzip(tokenizer=self.tokenizer)
        if not isinstance(reader, Reconstruction):
            raise UserError(f"{self.name}: reader must be a method such as KVzip(…), got {shown(reader)}")
        queries = whole_number(self.name, "queries", self.queries)
        assign(self, tokenizer=None, reader=reader, queries=queries)

    def check(self, model: Any) -> None:
        super().check(model)
        self.reader.check(model)

    @property
    def entry_fields(self) -> Mapping[str, str]:
        return {**super().entry_fields, BIAS: "float32"}

    def refusal(self, schedule: Schedule, stores_all: bool) -> str:
        when = schedule.trigger.when
        if when != "prompt":
            return f"fits the remaining entries to the whole prompt once: when must be 'prompt', got {when!r}"
        if not stores_all:
            return (
                "fits the remaining entries to the whole prompt, and an admission does not store every token"
            )
        if BIAS in super().entry_fields:
            return "gives entries biases, and so does the eviction that it wraps"
        return super().refusal(schedule, stores_all)


def refitting(eviction: Eviction | None) -> Refit | None:
    """Return the refit among an eviction's wrappers, or None."""
    while isinstance(eviction, Wrapper) and not isinstance(eviction, Refit):
        eviction = eviction.eviction
    return eviction if isinstance(eviction, Refit) else None


class Target(NamedTuple):
    """The attention of reference queries to all entries of a head cache, in float32."""

    output: Float[Array, "*r n h"]
    """softmax(q · K / √h) V."""
    largest: Float[Array, "*r n"]
    """The largest logit, which is subtracted from all logits of a query."""
    mass: Float[Array, "*r n"]
    """Σ exp(logit − largest)."""


def target(
    q: Float[Array, "n h"], k: Float[Array, "s h"], v: Float[Array, "s h"], exists: Bool[Array, " s"]
) -> Target:
    """Return the attention of queries to the entries of one head cache that exist; zeros if none does. There is no
    causal mask: reference queries come after the prompt."""
    k, v = (jnp.where(exists[:, None], x, 0).astype(jnp.float32) for x in (k, v))

    def of_block(q: Float[Array, "n h"]) -> Target:
        x = jnp.where(exists, logits(q, k), -jnp.inf)
        largest = jnp.where(exists.any(), x.max(-1), 0)
        weight = jnp.exp(x - largest[:, None])
        mass = weight.sum(-1)
        output = jnp.einsum("ns,sh->nh", weight, v, **EXACT) / jnp.maximum(mass, 1)[:, None]
        return Target(output, largest, mass)

    count, width = q.shape
    q = jnp.pad(q.astype(jnp.float32), ((0, -count % BLOCK), (0, 0)))
    blocks = lax.map(of_block, q.reshape(-1, BLOCK, width))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], blocks)


def fit(
    q: Float[Array, "n h"],
    real: Bool[Array, " n"],
    full: Target,
    k: Float[Array, "s h"],
    v: Float[Array, "s h"],
    exists: Bool[Array, " s"],
) -> tuple[Float[Array, "s h"], Float[Array, " s"]]:
    """Return new values and biases of the remaining entries of one head cache, in float32, given the attention of its
    queries to all entries (`full`). Queries that are not `real` do not count. If none is, or where no entry exists, the
    value stays and the bias is 0.

    The bias comes first (`bias`). With X = softmax(q · K / √h + bias) over these entries, the values are
    v + argmin_D ‖X (v + D) − output‖² + λ ‖D‖² with λ = `RIDGE` · ‖X‖² / n (the authors' `_compute_C2`, with λ)."""
    k, v = (jnp.where(exists[:, None], x, 0).astype(jnp.float32) for x in (k, v))
    seen = real[:, None] & exists
    x = jnp.where(seen, logits(q.astype(jnp.float32), k), -jnp.inf)
    biases = bias(jnp.exp(x - full.largest[:, None]), jnp.where(real, full.mass, 0))
    attention = jnp.where(seen, jax.nn.softmax(jnp.where(seen, x + biases, -1e30), -1), 0)
    missing = jnp.where(real[:, None], full.output, 0) - jnp.einsum("ns,sh->nh", attention, v, **EXACT)
    return v + ridge(attention, missing), biases


def bias(weight: Float[Array, "n s"], mass: Float[Array, " n"]) -> Float[Array, " s"]:
    """Return log w of the entries, where w minimises Σ_i (Σ_j weight_ij · w_j − mass_i)² with |log w| ≤ `LARGEST` (the
    authors' `_nnls_pg`). The least squares solution with a ridge towards w = 1 is clipped, then improved by `STEPS`
    steps of projected gradient descent of size 1 / ‖weight‖²."""
    smallest_factor, largest_factor = jnp.exp(-LARGEST), jnp.exp(LARGEST)

    def residual(w: Float[Array, " s"]) -> Float[Array, " n"]:
        return mass - jnp.einsum("ns,s->n", weight, w, **EXACT)

    w = jnp.ones_like(weight[0])
    w = jnp.clip(w + ridge(weight, residual(w)[:, None])[:, 0], smallest_factor, largest_factor)
    step = 1 / _positive(largest_eigenvalue(gram(weight)))
    for _ in range(STEPS):
        w = jnp.clip(
            w + step * jnp.einsum("ns,n->s", weight, residual(w), **EXACT), smallest_factor, largest_factor
        )
    return jnp.log(w)


def ridge(x: Float[Array, "n s"], y: Float[Array, "n d"]) -> Float[Array, "s d"]:
    """Return argmin_D ‖X D − Y‖² + λ ‖D‖² with λ = `RIDGE` · ‖X‖² / n, from the equations of the smaller side; rows of
    zeros do not count in n. A matrix of zeros gives zeros."""
    rows = jnp.maximum((x != 0).any(1).sum(), 1)
    weight = _positive(RIDGE * jnp.square(x).sum() / rows)
    factor = cho_factor(gram(x) + weight * jnp.eye(min(x.shape), dtype=x.dtype))
    if x.shape[1] <= x.shape[0]:
        return cho_solve(factor, jnp.einsum("ns,nd->sd", x, y, **EXACT))
    return jnp.einsum("ns,nd->sd", x, cho_solve(factor, y), **EXACT)


def gram(x: Float[Array, "n s"]) -> Float[Array, "m m"]:
    """Return Xᵀ X or X Xᵀ, whichever is smaller."""
    x = x if x.shape[1] <= x.shape[0] else x.T
    return jnp.einsum("ni,nj->ij", x, x, **EXACT)


def largest_eigenvalue(x: Float[Array, "m m"]) -> Float[Array, ""]:
    """Return the largest eigenvalue of a symmetric matrix without negative numbers, by power iteration."""
    vector, eigenvalue = jnp.ones_like(x[0]), jnp.zeros_like(x[0, 0])
    for _ in range(POWER_STEPS):
        vector = vector / _positive(jnp.linalg.norm(vector))
        vector, before = jnp.einsum("ij,j->i", x, vector, **EXACT), vector
        eigenvalue = jnp.dot(before, vector, **EXACT)
    return eigenvalue


def _positive(x: Float[Array, ""]) -> Float[Array, ""]:
    """Return a non-negative number, or 1 in place of 0."""
    return jnp.where(x > 0, x, 1)
