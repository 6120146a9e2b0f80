"""Benchmark of `vertical_slash`: prefill at several shares of kept keys, and the backward pass of training."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.choose import BY_PLATFORM, target
from pallas_kernels.timing import (
    Candidate,
    Check,
    Line,
    Part,
    Run,
    Setting,
    program,
    random,
    run,
    runs,
    tokens,
)
from pallas_kernels.vertical_slash import ends, vertical_slash
from pallas_kernels.vertical_slash.hopper import targeted

BACKWARD = 2.5
"""The products of the backward pass, relative to those of the forward pass."""
SHARES = 0.05, 0.25, 1.0
"""The shares of keys that are kept."""
ROWS = 512
"""Queries of a block of `blockwise`."""
LONGEST_MASK = 8192
"""The longest context for which torch gets a full mask."""


def usual() -> tuple[str, ...]:
    return ("hopper", "gpu") if targeted() else (BY_PLATFORM[target().platform],)


def dense() -> tuple[str, Callable]:
    """Return the name and function of dense causal attention of q [b t n h] over k and v [b t k h] on this device."""
    if target().platform == "gpu":
        return "cuDNN, dense", functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
        )
    return "XLA, dense in blocks", blockwise


def blockwise(q, k, v):
    """Compute dense causal attention a block of queries at a time, over the keys up to its end."""
    t = q.shape[1]
    attend = jax.checkpoint(functools.partial(jax.nn.dot_product_attention, implementation="xla"))
    blocks = []
    for first in range(0, t, ROWS):
        end = min(first + ROWS, t)
        seen = jnp.arange(first, end)[:, None] >= jnp.arange(end)
        blocks.append(attend(q[:, first:end], k[:, :end], v[:, :end], mask=seen[None, None]))
    return jnp.concatenate(blocks, 1)


def torch_program(
    make: Callable[..., Callable], args: tuple[jax.Array, ...], work: int | float, inner: int = 1
) -> Candidate:
    """Return the candidate for the call that `make(torch, *tensors)` returns. `make` is not timed."""

    def prepare() -> Run:
        torch: Any = importlib.import_module("torch")
        step = make(torch, *map(torch.from_dlpack, args))

        def repeated(n):
            for _ in range(n * inner):
                step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()

        return repeated

    return Candidate(prepare, work, inner)


def torch_causal(torch, q, k, v) -> Callable:
    attend = torch.nn.functional.scaled_dot_product_attention
    return functools.partial(attend, q, k, v, is_causal=True, enable_gqa=True)


def torch_masked(torch, q, k, v, end) -> Callable:
    """Return torch's attention with the mask of `end` [b k s]. The mask is made beforehand."""
    index = torch.arange(k.shape[2], device=q.device)
    seen = (index[:, None] >= index) & (index[:, None] < end[:, :, None])
    mask = seen.repeat_interleave(q.shape[1] // k.shape[1], 1)
    attend = torch.nn.functional.scaled_dot_product_attention
    return functools.partial(attend, q, k, v, attn_mask=mask, enable_gqa=True)


def torch_flex(torch, q, k, v, end) -> Callable:
    """Return `flex_attention` with the mask of `end`. Its table of blocks is made beforehand."""
    compiled = torch.compile if q.is_cuda else lambda function: function
    module = importlib.import_module("torch.nn.attention.flex_attention")
    group = q.shape[1] // k.shape[1]
    seen = lambda b, head, i, j: (i >= j) & (i < end[b, head // group, j])  # noqa: E731
    size = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    table = compiled(module.create_block_mask)(seen, *size, device=q.device)
    return functools.partial(compiled(module.flex_attention), q, k, v, block_mask=table, enable_gqa=True)


TORCH_MASKED = {"torch SDPA, masked": torch_masked, "torch flex_attention": torch_flex}
"""The rivals with the op's mask."""


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def arrays(setting: Setting, key: jax.Array, s: int) -> tuple[jax.Array, ...]:
    """Return random q, k and v."""
    keys = jax.random.split(key, 3)
    heads = setting.n, setting.k, setting.k
    return tuple(random(x, (1, n, s, setting.h), setting.dtype) for x, n in zip(keys, heads, strict=True))


def kept(setting: Setting, key: jax.Array, s: int) -> dict[str, jax.Array]:
    """Return `end` for every share. The last two keep the same total, spread evenly or in one head."""
    shape = (1, setting.k, s)
    even = f"1/{setting.k} kept"
    shares = {f"{share:.0%} kept": share for share in SHARES} | {even: 1 / setting.k}
    admitted = {name: jax.random.bernoulli(key, share, shape) for name, share in shares.items()}
    first = jnp.arange(setting.k)[:, None] == 0
    admitted[f"{even}, all by one head"] = jnp.broadcast_to(first, shape)
    return {name: ends(x, setting.window) for name, x in admitted.items()}


def same_mask_is_timed(share: str) -> bool:
    """Return True for the shares at which rivals with the same mask are timed: the target share and the hardest
    case."""
    return share.startswith("25%") or share.endswith("one head")


def flops(setting: Setting, end: jax.Array | None, s: int) -> float:
    """Return the FLOPs of two products for each visible pair of query and key, for all query heads."""
    end = jnp.full((1, setting.k, s), s) if end is None else jnp.minimum(end, s)
    pairs = float(jnp.sum((end - jnp.arange(s)).astype(jnp.float32)))
    return 4.0 * setting.h * (setting.n // setting.k) * pairs


def bound() -> str:
    """Return the name of the bound: cuDNN's rate or, without cuDNN, that of a matrix product, since XLA's dense
    attention is far slower."""
    return "cuDNN, dense" if target().platform == "gpu" else "matrix product"


def prefill(setting: Setting, key: jax.Array, s: int, implementations: tuple[str, ...]) -> list[Line]:
    q, k, v = arrays(setting, key, s)
    platform = target().platform
    name, attention = dense()
    full = flops(setting, None, s)
    dense_rivals = {name: program(attention, tuple(x.swapaxes(1, 2) for x in (q, k, v)), full)}
    if has_torch():
        dense_rivals["torch SDPA, dense"] = torch_program(torch_causal, (q, k, v), full)
    calls = {
        x: functools.partial(vertical_slash, window=setting.window, implementation=x) for x in implementations
    }
    lines = []
    for share, end in kept(setting, key, s).items():
        work = flops(setting, end, s)
        rivals = dict(dense_rivals)
        if has_torch() and platform == "gpu" and s <= LONGEST_MASK and same_mask_is_timed(share):
            rivals |= {x: torch_program(make, (q, k, v, end), work) for x, make in TORCH_MASKED.items()}
        for x, call in calls.items():
            ours = program(call, (q, k, v, end), work)
            lines.append(Line(f"{tokens(s)}, {share}", x, ours, rivals, "TFLOP/s", bound()))
    return lines


def training(setting: Setting, key: jax.Array, s: int, implementations: tuple[str, ...]) -> list[Line]:
    """Time only the backward pass."""
    q, k, v = arrays(setting, key, s)
    name, attention = dense()
    gate = jax.nn.log_sigmoid(jax.random.normal(key, (1, setting.k, s)))
    end = kept(setting, key, s)["25% kept"]
    full = BACKWARD * flops(setting, None, s)
    rivals = {name: backward(attention, tuple(x.swapaxes(1, 2) for x in (q, k, v)), full)}
    lines = []
    # "hopper" uses the gradient of "gpu".
    for x in dict.fromkeys("gpu" if x == "hopper" else x for x in implementations):
        call = functools.partial(vertical_slash, window=setting.window, implementation=x)
        gated = backward(
            lambda q, k, v, gate, call=call: call(q, k, v, log_gate=gate)[0], (q, k, v, gate), full
        )
        kept_work = BACKWARD * flops(setting, end, s)
        share = backward(lambda q, k, v, call=call: call(q, k, v, end)[0], (q, k, v), kept_work)
        for label, ours in {"gates": gated, "25% kept": share}.items():
            lines.append(Line(f"{tokens(s)}, {label}", x, ours, rivals, "TFLOP/s", bound()))
    return lines


def backward(call: Callable, args: tuple[jax.Array, ...], work: int | float) -> Candidate:
    def prepare() -> Run:
        out, pull = jax.vjp(jax.jit(call), *args)
        return runs(jax.jit(lambda pull, cotangent: pull(cotangent)), (pull, jnp.ones_like(out)))

    return Candidate(prepare, work)


def checks(key: jax.Array, dtype: Any) -> list[Check]:
    """Check the last 200 queries over kept and dropped keys, and the gradient with gates."""
    s, h, window = 270, 64, 37
    keys = jax.random.split(key, 5)
    q, k, v = (random(x, (2, n, s, h), dtype) for x, n in zip(keys[:3], (8, 2, 2), strict=True))
    end = ends(jax.random.bernoulli(keys[3], 0.3, (2, 2, s)), window)
    gate = jax.nn.log_sigmoid(jax.random.normal(keys[3], (2, 2, s)))
    weight = jax.random.normal(keys[4], q.shape)

    def forward(implementation, q, k, v, end):
        return vertical_slash(q, k, v, end, window=window, implementation=implementation)

    def gradient(implementation, *args):
        def loss(q, k, v, gate):
            o, lse = vertical_slash(q, k, v, window=window, log_gate=gate, implementation=implementation)
            return jnp.sum(o * weight) + jnp.sum(lse)

        *gradients, gates = jax.grad(loss, (0, 1, 2, 3))(*args)
        return *gradients, gates.astype(args[0].dtype)

    return [
        Check("forward", forward, (q[:, :, -200:], k, v, end)),
        Check("gradient", gradient, (q, k, v, gate), gradient=True),
    ]


def main(arguments: list[str] | None = None) -> list[dict]:
    parts = [
        Part("vertical_slash", prefill, (8192, 32768, 131072, 262144), (4096, 16384)),
        Part("vertical_slash, backward", training, (8192, 32768), (2048,)),
    ]
    return run("vertical_slash", usual, checks, parts, arguments)


if __name__ == "__main__":
    main()
