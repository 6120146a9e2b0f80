"""The gate, which predicts how much a token's key and value will be needed from the layer's input or the key alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from kvjax.errors import one_of, whole_number
from kvjax.mesh import HEADS
from kvjax.policies.numbers import EXACT, uniform_parameter
from kvjax.policies.views import Step

INPUTS = "hidden", "k", "k_pre"
"""The inputs that a gate may have, by their names in `Step`."""
Input = Float[Array, "b t d"] | Float[Array, "b k t d"]
Draw = Callable[..., nnx.Param]


class SinkGate(nnx.Module):
    """One gate per layer and kv head: attention of a token's own queries to its own key, against learned sink keys.

    A kv head has a key k and, for each of its `group` query heads, a query q_g. They have width D' = `dim`, are linear
    in the input, and are normed (RMSNorm with weights that a layer's heads share). With c = 1/√D', a_g = c q_g·k + b_g
    and the sinks' logits e_gr = c q_g·k_base_r (sink keys are not normed),

        s = mean_g softmax([a_g, e_g1 … e_gS])_0   (Fast KVzip, Sec. 3.4).

    b is added only to the numerator's logit, whatever its sign. Published gates have this form. `form` names it or one
    of the paper's alternatives (`FORMS`), which have other parameters.

    Arrays are float32, with layers as the first axis, and are sharded by kv head. They are initialised as a torch
    linear layer, U(±1/√width), and sinks and b as 0. A layer's scores are local code: call the gate inside `shard_map`
    with the layer's part of the arrays. For all layers at once, in training, with x [l b t d] sharded by sequence:

        def local(gates, x):
            return jax.vmap(lambda gate, x: gate(x))(gates, x)
        scores = jax.shard_map(local, out_specs=P(None, BATCH, HEADS))(gates, x)
    """

    b: nnx.Param
    """The bias, which every form has, by layer, kv head and, in forms with queries, query head."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        group: int,
        width: int,
        *,
        dim: int = 16,
        sinks: int = 16,
        form: str = "sink",
        rngs: nnx.Rngs,
    ):
        one_of("fast_kvzip", "form", form, list(FORMS))
        self.group = whole_number("fast_kvzip", "group", group)
        self.width = whole_number("fast_kvzip", "width", width)
        self.dim = whole_number("fast_kvzip", "dim", dim)
        self.sinks = whole_number("fast_kvzip", "sinks", sinks)
        self.form = form

        def draw(*shape: int, heads: bool = True, value: float | None = None) -> nnx.Param:
            shape = (layers, kv_heads, *shape) if heads else (layers, *shape)
            spec = P(None, HEADS if heads else None, *(None,) * (len(shape) - 2))
            if value is not None:
                return nnx.Param(jnp.full(shape, value, jnp.float32, out_sharding=spec))
            return uniform_parameter(rngs, shape, width, spec)

        FORMS[form].parameters(self, draw)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The numbers of layers, kv heads and query heads of each, and the width of the input, of the whole module."""
        layers, kv_heads = self.b.shape[:2]
        return layers, kv_heads, self.group, self.width

    def __call__(self, x: Input) -> Float[Array, "b k t"]:
        """Return the scores of one layer's tokens (this module sliced to that layer), in (0, 1), float32.

        Args:
            x: one input for all kv heads (hidden states), or one for each (keys). The large products are computed in
                x's dtype with float32 sums: for a 16-bit input the gates are rounded to its dtype, as they are
                published.
        """
        return FORMS[self.form].score(self, x)


def inputs(step: Step, which: str) -> Input:
    """Return the input `which` (one of `INPUTS`) of gates: the layer's hidden states, or each kv head's own key after
    (`k`) or before RoPE (`k_pre`)."""
    return getattr(step, which)


def _attention(gate: Any, draw: Draw) -> None:
    _queries_and_key(gate, draw)
    gate.k_base = draw(gate.sinks, gate.dim, value=0.0)


def _queries_and_key(gate: Any, draw: Draw) -> None:
    gate.w_q, gate.bias_q = draw(gate.group, gate.dim, gate.width), draw(gate.group, gate.dim)
    gate.w_k = draw(gate.dim, gate.width)
    gate.norm_q, gate.norm_k = (draw(gate.dim, heads=False, value=1.0) for _ in range(2))
    gate.b = draw(gate.group, value=0.0)


def _linear(gate: Any, draw: Draw) -> None:
    gate.w, gate.b = draw(gate.width), draw(value=0.0)


def _swiglu(gate: Any, draw: Draw) -> None:
    hidden = max(1, round((gate.group + 1) * gate.dim / 2))
    gate.w_gate, gate.w_up = draw(hidden, gate.width), draw(hidden, gate.width)
    gate.w_down, gate.b = draw(hidden), draw(value=0.0)


def _sink_score(gate: Any, x: Input) -> Float[Array, "b k t"]:
    logits, sinks = _logits(gate, x)
    return jax.nn.sigmoid(logits + gate.b[...][:, None] - sinks).mean(-1)


def _paper_score(gate: Any, x: Input) -> Float[Array, "b k t"]:
    logits, sinks = _logits(gate, x)
    b = jnp.maximum(jax.nn.softplus(gate.b[...]), jnp.finfo(jnp.float32).tiny)
    return jax.nn.sigmoid(logits - jnp.logaddexp(sinks, jnp.log(b)[:, None])).mean(-1)


def _sigmoid_score(gate: Any, x: Input) -> Float[Array, "b k t"]:
    logits, _ = _queries(gate, x)
    return jax.nn.sigmoid(logits + gate.b[...][:, None]).mean(-1)


def _linear_score(gate: Any, x: Input) -> Float[Array, "b k t"]:
    return jax.nn.sigmoid(_project(x, gate.w[...][:, None])[..., 0] + gate.b[...][:, None])


def _swiglu_score(gate: Any, x: Input) -> Float[Array, "b k t"]:
    hidden = jax.nn.silu(_project(x, gate.w_gate[...])) * _project(x, gate.w_up[...])
    return jax.nn.sigmoid(
        jnp.einsum("bktm,km->bkt", hidden, gate.w_down[...], **EXACT) + gate.b[...][:, None]
    )


def _logits(gate: Any, x: Input) -> tuple[Float[Array, "b k t g"], Float[Array, "b k t g"]]:
    """Return c q·k, and the logarithm of the sinks' summed exponentials."""
    logits, q = _queries(gate, x)
    sinks = jnp.einsum("bktgc,ksc->bktgs", q, gate.k_base[...], **EXACT) / math.sqrt(gate.dim)
    return logits, jax.nn.logsumexp(sinks, -1)


def _queries(gate: Any, x: Input) -> tuple[Float[Array, "b k t g"], Float[Array, "b k t g c"]]:
    """Return c q·k, and q."""
    q = _project(x, gate.w_q[...].reshape(-1, gate.group * gate.dim, gate.width))
    q = _rms(q.reshape(*q.shape[:-1], gate.group, gate.dim) + gate.bias_q[...][:, None], gate.norm_q[...])
    k = _rms(_project(x, gate.w_k[...]), gate.norm_k[...])
    return jnp.einsum("bktgc,bktc->bktg", q, k, **EXACT) / math.sqrt(gate.dim), q


def _project(x: Input, w: Float[Array, "k o d"]) -> Float[Array, "b k t o"]:
    heads = "k" if x.ndim == 4 else ""
    return jnp.einsum(f"b{heads}td,kod->bkto", x, w.astype(x.dtype), **EXACT)


def _rms(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


@dataclass(frozen=True)
class Form:
    """A form of the gate: its parameters, and the score that it computes from an input."""

    parameters: Callable[[Any, Draw], None]
    """The function that gives a gate its arrays."""
    score: Callable[[Any, Input], Float[Array, "b k t"]]
    """The function that scores one layer's tokens."""


FORMS = {
    "sink": Form(_attention, _sink_score),
    "paper": Form(_attention, _paper_score),
    "sigmoid": Form(_queries_and_key, _sigmoid_score),
    "linear": Form(_linear, _linear_score),
    "mlp": Form(_swiglu, _swiglu_score),
}
"""The forms of the gate. sink: as published. paper: b = softplus(β) ≥ 0 in the denominator instead, as the paper prints
it. sigmoid: no sinks, σ(a_g) (the code's S = 0, where b stays 0). linear: one logit per kv head. mlp: two layers with
SwiGLU, with a hidden width that gives about as many parameters."""
