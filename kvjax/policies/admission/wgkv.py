"""WG-KV: a learned write gate decides which tokens outlive the local window (Huang et al., "KV Admission").

The gate of a kv head looks at a token's key before and after RoPE and says how much it will be needed once it has left
the window. In training the gate is soft: a query at distance ≥ window adds log g to the logit. Afterwards it is hard:
a token is written to the global region iff g ≥ τ.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from safetensors.numpy import load_file

from kvjax.builtin import BUILTIN, builtin_gates
from kvjax.errors import UserError, real_number, shown, whole_number
from kvjax.mesh import axis_size, put, use_mesh
from kvjax.policies.interfaces import Keep
from kvjax.policies.policy import Policy, head_table
from kvjax.step import Step
from kvjax.struct import static, struct
from kvjax.write_tensors import write_tensors
from pallas_kernels.vertical_slash import ends

GATE_FLOOR = 1e-3
"""The smallest soft gate; below it the gradient stops (WG-KV's code, `g_epsilon`)."""


class WriteGate(nnx.Module):
    """One two-layer gate per layer and kv head over (RMSNorm(key before RoPE), RMSNorm(key after RoPE)), in float32.

    The hidden width is `head_dim · expand`: 4 for Llama, 1.5 for Qwen3 in WG-KV's code. The norms' weights are
    shared by the heads of a layer. Initialisation is that of a torch convolution: U(±1/√fan_in), biases too.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, *, expand: float = 4.0, rngs: nnx.Rngs):
        width = round(head_dim * expand)
        split = "fsdp" if width % axis_size("fsdp") == 0 else None

        def uniform(fan_in, shape, *spec):
            bound = 1 / math.sqrt(fan_in)
            drawn = jax.random.uniform(
                rngs.params(), shape, minval=-bound, maxval=bound, out_sharding=P(*spec)
            )
            return nnx.Param(drawn)

        fan_in = 2 * head_dim
        self.norm_pre = nnx.Param(jnp.ones((layers, head_dim), out_sharding=P(None, None)))
        self.norm_post = nnx.Param(jnp.ones((layers, head_dim), out_sharding=P(None, None)))
        self.w1 = uniform(fan_in, (layers, kv_heads, fan_in, width), None, "tensor", None, split)
        self.b1 = uniform(fan_in, (layers, kv_heads, width), None, "tensor", split)
        self.w2 = uniform(width, (layers, kv_heads, width), None, "tensor", split)
        self.b2 = uniform(width, (layers, kv_heads), None, "tensor")

    def __call__(self, k_pre: Float[Array, "b k t h"], k: Float[Array, "b k t h"]) -> Float[Array, "b k t"]:
        """The gates of one layer's tokens (this module sliced to that layer), in (0, 1)."""
        features = jnp.concatenate([_rms(k_pre, self.norm_pre[...]), _rms(k, self.norm_post[...])], -1)
        exact = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
        hidden = jnp.einsum("bktc,kcm->bktm", features, self.w1[...], **exact) + self.b1[...][:, None]
        hidden = _gelu(hidden)
        logit = jnp.einsum("bktm,km->bkt", hidden, self.w2[...], **exact) + self.b2[...][:, None]
        return jax.nn.sigmoid(logit)


@jax.custom_jvp
def _gelu(x):
    return jax.nn.gelu(x, approximate=False)


@_gelu.defjvp
def _gelu_jvp(primals, tangents):
    # by hand, because jax 0.12's derivative of erf does not trace inside shard_map
    (x,), (dx,) = primals, tangents
    below = 0.5 * (1 + jax.lax.erf(x * 0.5**0.5))
    return _gelu(x), dx * (below + x * jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


def _rms(x, scale):
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


@struct
class WGKV:
    """Admission by the gate: a token that leaves the window is written iff g ≥ τ.

    `rate` is the largest share of a sequence's tokens that is expected to be admitted (1 where unknown); it sizes the
    pool.
    """

    gates: WriteGate
    tau: Float[Array, "*l"]
    rate: Float[Array, "*l k"]

    def init(self, batch: int) -> tuple[()]:
        return ()

    def score(self, state: tuple[()], step: Step) -> tuple[tuple[()], Float[Array, "b k t"], int]:
        return state, self.gates(step.k_pre, step.k), 0

    def keep(self) -> Keep:
        return Keep(self.tau)

    def admitted(self, tokens: int) -> Float[np.ndarray, "#l #k"]:
        return np.asarray(self.rate, np.float64) * tokens


@struct
class WriteGateTraining:
    """What training asks of write gates: the soft gate as a logit bias, and the sparsity term.

    `sparsity` "lifetime" is the code's form, R = mean[o_s + (1 − o_s)(1 − (1 − g)²)] with o_s = min(1, W/(N − s)) the
    share of the remaining steps that token s spends in the ring anyway; "paper" is mean[g + g(1 − g)].
    `hard`: the mask is the one of use, binarised at τ, and has no gradient.
    """

    gates: WriteGate
    tau: Float[Array, "*l"]
    window: int = static()
    sparsity: Literal["lifetime", "paper"] = static(default="lifetime")
    hard: bool = static(default=False)

    def sample(self, key: jax.Array) -> "WriteGateTraining":
        return self

    def masks(self, state: Any, step: Step):
        gate = self.gates(step.k_pre, step.k)
        if self.hard:
            return gate, [(None, ends(gate >= self.tau, self.window), None)]
        return gate, [(None, None, jnp.log(jnp.maximum(gate, GATE_FLOOR)))]

    def auxiliary(
        self, state: Float[Array, "b k t"], step: Step, o: Any, lse: Any
    ) -> dict[str, Float[Array, "..."]]:
        """Per sequence and kv head `[b k]`: the sparsity term, the mean gate, the share of tokens that the hard gate
        admits, and the share of the sequence's entries that it would leave in the cache at the end, ring included."""
        admitted, tokens = state >= self.tau, state.shape[-1]
        # the loss sees the floor everywhere, and no gradient comes from below it (WG-KV's code)
        gate = jnp.maximum(state, GATE_FLOOR)
        used = gate * (2 - gate)
        left = jnp.arange(tokens, 0, -1, dtype=jnp.float32)
        if self.sparsity == "lifetime":
            ring = jnp.minimum(1.0, self.window / left)
            used = ring + (1 - ring) * used
        kept = admitted | (left <= self.window)
        return {
            "sparsity": used.mean(-1),
            "gate": gate.mean(-1),
            "admitted": admitted.astype(jnp.float32).mean(-1),
            "kv_size": kept.astype(jnp.float32).mean(-1),
        }


def save_gates(folder: str | Path, gates: WriteGate, description: dict[str, Any]) -> None:
    """Write `gates.safetensors` and `config.json`. `description` holds tau, window, rate and peak_rate (the mean and
    the largest share of a sequence's tokens that were admitted, layers × kv heads), and whatever else says how they
    were made."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: np.asarray(param) for name, param in nnx.to_pure_dict(nnx.state(gates)).items()}
    layers, kv_heads, fan_in, width = arrays["w1"].shape
    shape = {"layers": layers, "kv_heads": kv_heads, "head_dim": fan_in // 2, "expand": width / (fan_in // 2)}
    write_tensors(folder / "gates.safetensors", arrays)
    (folder / "config.json").write_text(json.dumps({"method": "wgkv"} | shape | description, indent=1))


def _files(folder: str | Path) -> tuple[Path, Path]:
    """The weights and the description of exported gates."""
    folder = builtin_gates() if str(folder) == BUILTIN else Path(folder)
    files = folder / "gates.safetensors", folder / "config.json"
    for file in files:
        if not file.is_file():
            raise UserError(f"{folder} holds no gates: it has no {file.name}")
    return files


def describe_gates(folder: str | Path) -> dict[str, Any]:
    """The description that `save_gates` wrote. Raises UserError if it cannot be read."""
    file = _files(folder)[1]
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file}: these are no WG-KV gates, or the file is damaged ({error!r})") from None


def gates_digest(folder: str | Path) -> str:
    """What exported gates are known by, weights and description: other gates in the same folder have another one."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in _files(folder))).hexdigest()[:16]


def load_gates(folder: str | Path, model: Any = None) -> tuple[WriteGate, dict[str, Any]]:
    """The gates and the description that `save_gates` wrote; `builtin` is the folder of those that come with kvjax.

    Raises UserError naming the file that is wrong, and for gates that are not for `model`.
    """
    description = describe_gates(folder)
    weights = _files(folder)[0]
    try:
        layers, kv_heads, head_dim = (int(description[key]) for key in ("layers", "kv_heads", "head_dim"))
        expand = float(description["expand"])
        arrays = load_file(weights)
    except Exception as error:
        raise UserError(f"{folder}: these are no WG-KV gates, or the files are damaged ({error!r})") from None
    _check_made_for((layers, kv_heads, head_dim), model)
    with use_mesh():
        gates = jax.eval_shape(lambda: WriteGate(layers, kv_heads, head_dim, expand=expand, rngs=nnx.Rngs(0)))
        state = nnx.state(gates)
        for path, param in nnx.to_flat_state(state):
            name, wanted = str(path[-1]), param.get_value()
            if name not in arrays or arrays[name].shape != wanted.shape:
                found = arrays[name].shape if name in arrays else "nothing"
                raise UserError(f"{weights}: {name} should have shape {wanted.shape}, found {found}")
            param.set_value(put(arrays[name].astype(np.float32), *wanted.sharding.spec))
        nnx.update(gates, state)
    return gates, description


def _check_made_for(shape: tuple[int, int, int], model: Any) -> None:
    """Refuse gates for another model than `model`, if there is one."""
    if model is not None:
        wanted = (model.config.num_layers, model.config.num_kv_heads, model.config.head_dim)
        if shape != wanted:
            raise UserError(
                f"wgkv: these gates are for (layers, kv heads, head_dim) = {shape}, the model has {wanted}"
            )


def wgkv(
    *,
    gates: str | Path | WriteGate,
    tau: float | None = None,
    window: int | None = None,
    rate: Float[np.ndarray, "l k"] | None = None,
    model: Any = None,
) -> Policy:
    """Write-gated admission.

    Args:
        gates: a folder that training exported, `builtin` for those of the built-in model, or the gates themselves.
        tau: the threshold; a higher one keeps less. By default the folder's, else 0.1.
        window: the local window. By default the folder's, that is the one the gates were trained with.
        rate: the largest share of a sequence's tokens that is expected to be admitted, by layer and kv head, which
            sizes the pool; by default the folder's, if it was exported with this τ or a lower one; else 1.
        model: refuses gates whose layers, kv heads or head_dim are not this model's.
    """
    description: dict[str, Any] = {}
    if isinstance(gates, (str, Path)):
        gates, description = load_gates(gates, model)
    if not isinstance(gates, WriteGate):
        raise UserError(f"wgkv: gates must be a folder of gates or a WriteGate, got {shown(gates)}")
    layers, kv_heads, fan_in, _ = gates.w1.shape
    _check_made_for((layers, kv_heads, fan_in // 2), model)
    tau = real_number("wgkv", "tau", description.get("tau", 0.1) if tau is None else tau, 0.0, 1.0)
    window = whole_number("wgkv", "window", description.get("window") if window is None else window)
    if rate is None and tau >= description.get("tau", tau):
        rate = description.get("peak_rate", description.get("rate"))
    known = np.ones((layers, kv_heads)) if rate is None else rate
    table = head_table("wgkv", "rate", known, layers, kv_heads).astype(np.float32)
    admission = WGKV(gates, put(np.full(layers, tau, np.float32)), put(table, None, "tensor"))
    return Policy(admission, name="wgkv", window=window)
