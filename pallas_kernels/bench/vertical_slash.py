"""`vertical_slash`: prefill at several shares of kept keys, and the backward pass of training."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.bench import torch_rivals
from pallas_kernels.bench.job import Job, Line, Task, compared, random, tokens
from pallas_kernels.bench.rivals import dense, dense_name, whole
from pallas_kernels.bench.setting import Setting
from pallas_kernels.bench.timing import Candidate, program, runs
from pallas_kernels.vertical_slash import ends, vertical_slash
from pallas_kernels.vertical_slash.hopper import targeted

BACKWARD = 2.5
"""Products of the backward pass to those of the forward pass."""
WINDOWED = "cuDNN, window only"


def jobs(setting: Setting, key: jax.Array) -> list[Task]:
    def task(op, make, s):
        return Task(op, tokens(s), functools.partial(make, setting, key, s))

    prefills = [task("vertical_slash", prefill, s) for s in setting.prefill]
    trainings = [task("vertical_slash, backward", training, s) for s in setting.training]
    return prefills[:1] + trainings + prefills[1:]


def arrays(setting: Setting, key: jax.Array, s: int):
    keys = jax.random.split(key, 3)
    heads = setting.n, setting.k, setting.k
    return (random(x, (1, n, s, setting.h), setting.dtype) for x, n in zip(keys, heads, strict=True))


def kept(setting: Setting, key: jax.Array, s: int) -> dict[str, jax.Array]:
    """`end` for every share, and for one head that keeps all while the others keep nothing, beside the same total."""
    shape = (1, setting.k, s)
    even = f"1/{setting.k} kept"
    shares = {f"{share:.0%} kept": share for share in setting.kept} | {even: 1 / setting.k}
    admitted = {name: jax.random.bernoulli(key, share, shape) for name, share in shares.items()}
    first = jnp.arange(setting.k)[:, None] == 0
    admitted[f"{even}, all by one head"] = jnp.broadcast_to(first, shape)
    return {name: ends(x, setting.window) for name, x in admitted.items()}


def pairs(end: jax.Array) -> float:
    """How many (query, key) pairs are visible to the heads together."""
    s = end.shape[2]
    return float(jnp.sum((jnp.minimum(end, s) - jnp.arange(s)).astype(jnp.float32)))


def flops(setting: Setting, pairs: float) -> float:
    """Of two products, with a group of query heads for every kv head."""
    return 4.0 * setting.h * (setting.n // setting.k) * pairs


def bound(setting: Setting) -> str:
    """Whose rate is the bound: cuDNN's dense attention; where there is none a matrix product's, since XLA's dense
    attention does not come near it."""
    return dense_name(setting) if setting.dense == "cudnn" else "matrix product"


def forms(setting: Setting) -> tuple[str, ...]:
    """What is timed, which on an H100 is Hopper's kernel for Triton's, and what beside it."""
    own = "hopper" if setting.implementation == "gpu" and targeted() else setting.implementation
    return tuple(dict.fromkeys((own, setting.implementation, *setting.beside)))


def prefill(setting: Setting, key: jax.Array, s: int) -> Job:
    q, k, v = arrays(setting, key, s)
    swapped = tuple(x.swapaxes(1, 2) for x in (q, k, v))
    name = dense_name(setting)
    all_pairs = setting.k * s * (s + 1) / 2
    full = flops(setting, all_pairs)
    candidates = {name: program(dense(setting), swapped, full)}
    always = {name: name}
    floor: tuple[str, ...] = ()
    if setting.dense == "cudnn":
        visible = flops(setting, pairs(ends(jnp.zeros((1, setting.k, s), bool), setting.window)))
        candidates[WINDOWED] = program(dense(setting, setting.window), swapped, visible)
        floor = (WINDOWED,)
    elif setting.n * s * s * 4 <= setting.logits:
        candidates["XLA, dense"] = program(whole, swapped, full)
        always["XLA, dense"] = "XLA, dense"
    if torch_rivals.installed(setting):
        candidates["torch SDPA, dense"] = torch_rivals.candidate(torch_rivals.causal, (q, k, v), full)
        always["torch SDPA, dense"] = "torch SDPA, dense"
    lines = []
    for share, end in kept(setting, key, s).items():
        work = flops(setting, pairs(end))
        own, *others = forms(setting)
        ours = f"{own}, {share}"
        beside = {form: f"{form}, {share}" for form in others}
        for form, candidate in {own: ours, **beside}.items():
            call = functools.partial(vertical_slash, window=setting.window, implementation=form)
            candidates[candidate] = program(call, (q, k, v, end), work)
        rivals = always | beside
        if torch_rivals.installed(setting) and s <= setting.mask and compared(share):
            for masked, make in torch_rivals.MASKED.items():
                rivals[masked] = f"{masked}, {share}"
                candidates[rivals[masked]] = torch_rivals.candidate(make, (q, k, v, end), work)
        lines.append(Line(f"{tokens(s)}, {share}", ours, rivals, "TFLOP/s", bound(setting), floor))
    return Job(candidates, lines)


def training(setting: Setting, key: jax.Array, s: int) -> Job:
    """The backward pass alone."""
    q, k, v = arrays(setting, key, s)
    swapped = tuple(x.swapaxes(1, 2) for x in (q, k, v))
    name = dense_name(setting)
    gate = jax.nn.log_sigmoid(jax.random.normal(key, (1, setting.k, s)))
    call = functools.partial(vertical_slash, window=setting.window, implementation=setting.implementation)

    def gated(q, k, v, gate):
        return call(q, k, v, log_gate=gate)[0]

    full = BACKWARD * flops(setting, setting.k * s * (s + 1) / 2)
    candidates = {
        name: backward(dense(setting), swapped, full),
        "gates": backward(gated, (q, k, v, gate), full),
    }
    lines = [Line(f"{tokens(s)}, gates", "gates", {name: name}, "TFLOP/s", bound(setting))]
    for share, end in kept(setting, key, s).items():
        if share != "25% kept":
            continue
        step = lambda q, k, v, end=end: call(q, k, v, end)[0]  # noqa: E731
        candidates[share] = backward(step, (q, k, v), BACKWARD * flops(setting, pairs(end)))
        lines.append(Line(f"{tokens(s)}, {share}", share, {name: name}, "TFLOP/s", bound(setting)))
    return Job(candidates, lines)


def backward(call, args, work: int | float) -> Candidate:
    def prepare():
        out, pull = jax.vjp(jax.jit(call), *args)
        return runs(jax.jit(lambda pull, cotangent: pull(cotangent)), (pull, jnp.ones_like(out)))

    return Candidate(prepare, work)
