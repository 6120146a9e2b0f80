"""Benchmark of `paged_decode`: one token over the caches of one sequence or a batch, with uneven head caches."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.choose import target
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.softmax import MASKED
from pallas_kernels.timing import Check, Line, Part, Setting, program, random, run, tokens
from pallas_kernels.vertical_slash.bench import SHARES, has_torch, same_mask_is_timed, torch_program, usual


def dense() -> tuple[str, Callable]:
    """Return the name and function of dense attention of one query [b 1 n h] over contiguous k and v [b s k h]."""
    name = "cudnn" if target().platform == "gpu" else "xla"
    attend = functools.partial(jax.nn.dot_product_attention, implementation=name)
    return {"cudnn": "cuDNN, dense", "xla": "XLA, dense"}[name], attend


def torch_dense(torch, q, k, v) -> Callable:
    """Return torch's dense attention of q [b n 1 h] over k and v [b s k h]."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return functools.partial(attend, q, k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True)


def gathered(q, pool, table, length, ring_length, new, *, ring_pages):
    """Compute `paged_decode` in XLA: gather pages to contiguous keys, then dense attention over them with a mask."""
    b, n, t, h = q.shape
    heads, columns = table.shape[1:]
    page = pool.shape[1]
    entries = pool[table].reshape(b, heads, columns * page, 2 * h)
    position = jnp.arange(columns * page)
    stored = jnp.where(
        position < ring_pages * page,
        position < ring_length[:, None, None],
        position - ring_pages * page < length[..., None],
    )
    grouped = q.reshape(b, heads, n // heads, h)

    def logits(k):
        return jnp.einsum("bkgh,bksh->bkgs", grouped, k, preferred_element_type=jnp.float32) * h**-0.5

    x = jnp.where(stored[:, :, None], logits(entries[..., :h]), MASKED)
    p = jax.nn.softmax(jnp.concatenate([x, logits(new[0])], -1), -1).astype(q.dtype)
    o = jnp.einsum("bkgs,bksh->bkgh", p[..., :-t], entries[..., h:])
    return (o + jnp.einsum("bkgt,bkth->bkgh", p[..., -t:], new[1])).reshape(q.shape)


def lengths(setting: Setting, s: int) -> dict[str, list[int]]:
    """Return the entries of each head in each case. The last two have equal totals; in the last, one head has nearly
    all."""
    k, page = setting.k, setting.page
    cases = {f"{share:.0%} kept": [round(share * s)] * k for share in SHARES}
    cases[f"1/{k} kept"] = [s // k] * k
    cases[f"1/{k} kept, all by one head"] = [s - (k - 1) * page, *[page] * (k - 1)]
    return cases


def one(setting: Setting, key: jax.Array, s: int, implementations: tuple[str, ...]) -> list[Line]:
    return batch(setting._replace(batch=1), key, s, implementations)


def batch(setting: Setting, key: jax.Array, s: int, implementations: tuple[str, ...]) -> list[Line]:
    b, n, k, h, page = setting.batch, setting.n, setting.k, setting.h, setting.page
    keys = jax.random.split(key, 5)
    ring_pages = -(-setting.window // page)
    columns = ring_pages + -(-s // page)
    pool = random(keys[0], (b * k * columns, page, 2 * h), setting.dtype)
    table = jax.random.permutation(keys[1], b * k * columns).reshape(b, k, columns).astype(jnp.int32)
    ring = jnp.full(b, setting.window, jnp.int32)
    q = random(keys[2], (b, n, 1, h), setting.dtype)
    new = tuple(random(x, (b, k, 1, h), setting.dtype) for x in keys[3:])
    cache = tuple(random(x, (b, s, k, h), setting.dtype) for x in keys[3:])
    entry = 2 * h * pool.dtype.itemsize
    full_bytes = b * k * s * entry
    name, attention = dense()
    dense_rivals = {name: program(attention, (q.swapaxes(1, 2), *cache), full_bytes, setting.inner)}
    if has_torch():
        dense_rivals["torch SDPA, dense"] = torch_program(torch_dense, (q, *cache), full_bytes, setting.inner)

    def attend(implementation, q, pool, table, length, ring, new):
        options = {"ring_pages": ring_pages, "implementation": implementation}
        return paged_decode(q, pool, table, length, ring, new=new, **options)

    calls = {x: functools.partial(attend, x) for x in implementations}
    gather = functools.partial(gathered, ring_pages=ring_pages)
    lines = []
    for share, counts in lengths(setting, s).items():
        length = jnp.broadcast_to(jnp.array(counts, jnp.int32), (b, k))
        work = (b * sum(counts) + b * k * setting.window) * entry
        rivals = dict(dense_rivals)
        if same_mask_is_timed(share):
            # Gather only the columns that some head uses.
            used = table[..., : ring_pages + -(-max(counts) // page)]
            args = q, pool, used, length, ring, new
            rivals["XLA, pages gathered"] = program(gather, args, work, setting.inner)
        for x, call in calls.items():
            ours = program(call, (q, pool, table, length, ring, new), work, setting.inner)
            lines.append(Line(f"batch {b}, {tokens(s)}, {share}", x, ours, rivals, "TB/s", "device copy"))
    return lines


def checks(key: jax.Array, dtype: Any) -> list[Check]:
    """Check 2 and 12 tokens (more than a decoding step has) over heads that are empty, full and in between."""
    h, page, columns, ring_pages = 64, 16, 12, 2
    keys = jax.random.split(key, 5)
    pool = random(keys[0], (4 * columns, page, 2 * h), dtype)
    table = jax.random.permutation(keys[1], 4 * columns).reshape(2, 2, columns).astype(jnp.int32)
    length, ring = jnp.array([[0, 160], [37, 16]], jnp.int32), jnp.array([32, 5], jnp.int32)

    def call(implementation, q, pool, table, length, ring, *new):
        options = {"ring_pages": ring_pages, "implementation": implementation}
        return paged_decode(q, pool, table, length, ring, new=new, **options)

    def check(t: int) -> Check:
        q, *new = (random(x, (2, n, t, h), dtype) for x, n in zip(keys[2:], (8, 2, 2), strict=True))
        return Check(f"{t} tokens", call, (q, pool, table, length, ring, *new))

    return [check(2), check(12)]


def main(arguments: list[str] | None = None) -> list[dict]:
    contexts = (8192, 32768, 131072, 262144), (16384,)
    parts = [Part("paged_decode", lines, *contexts) for lines in (one, batch)]
    return run("paged_decode", usual, checks, parts, arguments)


if __name__ == "__main__":
    main()
