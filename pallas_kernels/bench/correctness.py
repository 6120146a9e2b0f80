"""Every op against its reference on fresh random inputs, before anything is timed."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.bench.offered import OFFERED
from pallas_kernels.mlstm import mlstm
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.running_topk import ranks, running_topk
from pallas_kernels.vertical_slash import ends, vertical_slash
from pallas_kernels.vertical_slash.hopper import targeted

LIMITS = {jnp.float32.dtype: 1e-5, jnp.bfloat16.dtype: 1e-2}
"""Of results by their own dtype, which of a log-sum-exp is always float32; of gradients by that of q."""
S, H = 270, 64
"""Keys, not a multiple of any block, and head_dim."""


class Wrong(Exception):
    """An op differs from its reference: then no time of it means anything."""


class Case(NamedTuple):
    """`call(implementation, *args)` gives what `results` names."""

    op: str
    """Its name."""
    call: Callable[..., Any]
    """What is checked."""
    args: tuple
    """Of the call, after the implementation."""
    results: tuple[str, ...]
    """Names, in the order of the call's."""
    dtype: Any
    """Of the arguments."""
    gradient: bool = False
    """Whether the call differentiates."""
    what: str = ""
    """What is special about it, for its name."""

    def __str__(self) -> str:
        dtype = f", {self.dtype}" if jnp.issubdtype(self.dtype, jnp.floating) else ""
        return f"{self.op}{self.what}{dtype}"

    def limit(self, result: Any) -> float:
        """What a result may be off by."""
        if jnp.issubdtype(result.dtype, jnp.integer):
            return 0.0
        return LIMITS[self.dtype if self.gradient else result.dtype]


def check(implementations: Iterable[str], key: jax.Array) -> list[dict]:
    """A row for each result with the worst error of each implementation; raises `Wrong` at the first that is off."""
    rows = []
    for case in _cases(key):
        with jax.default_matmul_precision("highest"):
            expected = jax.jit(functools.partial(case.call, "reference"))(*_exact(case.args))
        names = [name for name in implementations if _takes(name, case)]
        actual = {name: jax.jit(functools.partial(case.call, name))(*case.args) for name in names}
        for at, result in enumerate(case.results):
            errors, limit = {}, 0.0
            for name, results in actual.items():
                limit = case.limit(results[at])
                measure = _error_of_queries if result == "o" else _error
                errors[name] = error = measure(results[at], expected[at])
                if not error <= limit:
                    raise Wrong(f"{case}: {result} of {name!r} is off by {error:.2e}, allowed is {limit:.0e}")
            rows.append({"case": f"{case}: {result}", "errors": errors, "limit": limit})
    return rows


def _takes(implementation: str, case: Case) -> bool:
    """Hopper's kernels are for its GPUs and bfloat16 alone."""
    offered = implementation in OFFERED[case.op]
    return offered and (implementation != "hopper" or (targeted() and case.dtype == jnp.bfloat16))


def _exact(args):
    """float32 for bfloat16: the same numbers, and no rounding after."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args)


def _error(actual, expected) -> float:
    """The largest difference, relative to the largest expected number if that is above 1; equal infinities count 0."""
    actual, expected = (x.astype(jnp.float32) for x in (actual, expected))
    difference = jnp.where(actual == expected, 0, jnp.abs(actual - expected))
    scale = jnp.max(jnp.where(jnp.isfinite(expected), jnp.abs(expected), 0))
    error = jnp.max(difference) / jnp.maximum(scale, 1)
    return float(jnp.where(jnp.isnan(error), jnp.inf, error))


def _error_of_queries(actual, expected) -> float:
    """The largest difference of a query's output, relative to its length: over many keys values average out, and one
    number for all queries would let what those are off by pass. Queries that see nothing give zeros."""
    actual, expected = (x.astype(jnp.float32) for x in (actual, expected))
    difference, scale = (jnp.linalg.norm(x, axis=-1) for x in (actual - expected, expected))
    error = jnp.max(jnp.where(difference == 0, 0, difference / scale))
    return float(jnp.where(jnp.isnan(error), jnp.inf, error))


def _cases(key: jax.Array) -> Iterator[Case]:
    for at, dtype in enumerate(LIMITS):
        for case in (_attention, _gradient, _decode, functools.partial(_decode, tokens=12), _mass, _memory):
            key, own = jax.random.split(jax.random.fold_in(key, at))
            yield case(own, dtype)
    yield _threshold(key)


def _normal(key, dtype, *shapes):
    keys = jax.random.split(key, len(shapes))
    return tuple(jax.random.normal(x, shape, dtype) for x, shape in zip(keys, shapes, strict=True))


def _attention(key, dtype):
    """The last 200 queries, kept keys and dropped ones."""
    q, k, v = _normal(key, dtype, (2, 8, 200, H), (2, 2, S, H), (2, 2, S, H))
    end = ends(jax.random.bernoulli(key, 0.3, (2, 2, S)), 37)

    def call(implementation, q, k, v, end):
        return vertical_slash(q, k, v, end, window=37, implementation=implementation)

    return Case("vertical_slash", call, (q, k, v, end), ("o", "lse"), dtype)


def _gradient(key, dtype):
    q, k, v = _normal(key, dtype, (1, 4, S, H), (1, 2, S, H), (1, 2, S, H))
    weight, gate = _normal(key, jnp.float32, (1, 4, S, H), (1, 2, S))

    def call(implementation, q, k, v, gate):
        def loss(q, k, v, gate):
            o, lse = vertical_slash(q, k, v, window=37, log_gate=gate, implementation=implementation)
            return jnp.sum(o * weight) + jnp.sum(lse)

        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, gate)

    results = "dq", "dk", "dv", "d log gate"
    return Case("vertical_slash", call, (q, k, v, jax.nn.log_sigmoid(gate)), results, dtype, gradient=True)


def _decode(key, dtype, tokens=2):
    """A few tokens, or more than a decoding step has; rows that are empty, full and between."""
    page, columns, ring_pages, new = 16, 12, 2, (2, 2, tokens, H)
    q, pool, *new = _normal(key, dtype, (2, 8, tokens, H), (4 * columns, page, 2 * H), new, new)
    table = jax.random.permutation(key, 4 * columns).reshape(2, 2, columns).astype(jnp.int32)
    length = jnp.array([[0, 160], [37, 16]], jnp.int32)

    def call(implementation, q, pool, table, length, ring, *new):
        return paged_decode(
            q, pool, table, length, ring, ring_pages=ring_pages, new=new, implementation=implementation
        )

    args = q, pool, table, length, jnp.array([32, 5], jnp.int32), *new
    return Case("paged_decode", call, args, ("o", "lse"), dtype, what=f" of {tokens} tokens")


def _mass(key, dtype):
    q, k = _normal(key, dtype, (1, 4, 200, H), (1, 2, S, H))

    def call(implementation, q, k):
        rest = functools.partial(attention_mass, q, k, offset=0, implementation=implementation)
        return (
            rest(over="logsumexp", group="max"),
            rest(over="sum", group="mean"),
            rest(over="max", group="max"),
        )

    return Case("attention_mass", call, (q, k), ("logsumexp", "sum", "max"), dtype)


def _memory(key, dtype):
    """What is read and handed on, and the gradient."""
    q, k, v = _normal(key, dtype, (2, 2, S, H), (2, 2, S, H), (2, 2, S, H // 2))
    log_i, log_f, weight = _normal(key, jnp.float32, (2, 2, S), (2, 2, S), (2, 2, S, H // 2))

    def call(implementation, *args):
        def total(*args):
            h, memory = mlstm(*args, implementation=implementation)
            return jnp.sum(h * weight), (h, *memory)

        gradients, found = jax.grad(total, tuple(range(len(args))), has_aux=True)(*args)
        return *found, *(x.astype(jnp.float32) for x in gradients)

    args = jnp.abs(q), jnp.abs(k), v, log_i, -jnp.abs(log_f) / 9
    results = "h", "c", "z", "m", "dq", "dk", "dv", "d log_i", "d log_f"
    return Case("mlstm", call, args, results, dtype, gradient=True)


def _threshold(key) -> Case:
    def call(implementation, rank):
        return running_topk(rank, k=60, window=37, implementation=implementation)

    rank = ranks(jax.random.normal(key, (2, 2, S)))
    return Case("running_topk", call, (rank,), ("threshold", "end"), rank.dtype)
