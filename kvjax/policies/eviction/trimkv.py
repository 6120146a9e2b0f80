"""TrimKV and DBTrimKV (Bui et al., 2025 and 2026, arXiv:2512.03324 and 2605.09649): learned retention that decays."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.checkpoints.folder import DESCRIPTION, read_description
from kvjax.checkpoints.module import filled
from kvjax.checkpoints.published import TRIMKV
from kvjax.checkpoints.torch_file import TorchFile, shape_of
from kvjax.errors import UserError, shown
from kvjax.policies.base import Eviction, Numbers, TokenMetadata
from kvjax.policies.budget import Shares
from kvjax.policies.numbers import EXACT
from kvjax.policies.trigger import Trigger
from kvjax.policies.views import Readout, Step, Stored
from kvjax.struct import assign, struct

TWO_LAYERS = {
    "w_in": "linear1.weight",
    "b_in": "linear1.bias",
    "w_out": "linear2.weight",
    "b_out": "bias",
}
FORMS = {
    "rg": TWO_LAYERS,
    "rg2": TWO_LAYERS,
    "rg3": {
        "w_gate": "gate_proj.weight",
        "w_up": "up_proj.weight",
        "w_out": "down_proj.weight",
        "b_out": "bias",
    },
    "rg10": {
        "w_in": "linear1.weight",
        "b_in": "linear1.bias",
        "w_mid": "linear2.weight",
        "b_mid": "linear2.bias",
        "w_out": "linear3.weight",
        "b_out": "bias",
    },
}
"""The forms of the gate, as config.json names them, and the authors' names of their arrays. rg: an MLP of two layers on
hidden states. rg2: the same on the keys and values of all kv heads. rg3: SwiGLU on these. rg10 (DBTrimKV): an MLP of
three layers on hidden states. Its last layer was trained as one for all layers of the model."""
KEY_VALUE_FORMS = "rg2", "rg3"
"""The forms whose input is the keys, after RoPE, and values of all kv heads."""
PREFIX = re.compile(r"model\.layers\.(\d{1,4})\.self_attn\.retention_gate\.(.+)")
"""The pattern of names in the authors' files: the layer, and an array of its gate."""


class Sizes(NamedTuple):
    """The form and sizes of gates."""

    form: str
    """One of `FORMS`."""
    layers: int
    kv_heads: int
    width: int
    """The width of a gate's input."""
    hidden: int
    """The width of a gate's hidden layers."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's arrays by our names: linear maps [out, in]."""
        k, d, m = self.kv_heads, self.width, self.hidden
        shapes = {
            "w_in": (m, d),
            "b_in": (m,),
            "w_gate": (m, d),
            "w_up": (m, d),
            "w_mid": (m, m),
            "b_mid": (m,),
        }
        shapes |= {"w_out": (k, m), "b_out": (k,)}
        return {name: shapes[name] for name in FORMS[self.form]}


class RetentionGate(nnx.Module):
    """A gate for each layer, which gives log β of a token for each kv head. Arrays are float32, with layers as the
    first axis. A layer's gate is this module sliced to the layer."""

    w_in: nnx.Param
    b_in: nnx.Param
    w_gate: nnx.Param
    w_up: nnx.Param
    w_mid: nnx.Param
    b_mid: nnx.Param
    w_out: nnx.Param
    b_out: nnx.Param

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        for name, shape in sizes.shapes.items():
            setattr(self, name, nnx.Param(jnp.zeros((sizes.layers, *shape), jnp.float32)))

    def __call__(self, x: Float[Array, "b t d"], head: Int[Array, " k"]) -> Float[Array, "b k t"]:
        """Return log β of one layer's tokens for the kv heads of these indices, float32. The products with x are
        computed in x's dtype with float32 sums."""
        if self.sizes.form == "rg3":
            hidden = jax.nn.silu(_project(x, self.w_gate)) * _project(x, self.w_up)
        else:
            hidden = jax.nn.silu(_project(x, self.w_in) + self.b_in[...])
        if self.sizes.form == "rg10":
            hidden = jax.nn.silu(_project(hidden, self.w_mid) + self.b_mid[...])
        logit = jnp.einsum("btm,km->bkt", hidden, self.w_out[...][head], **EXACT)
        return jax.nn.log_sigmoid(logit + self.b_out[...][head][:, None])


def _project(x: Float[Array, "b t d"], w: nnx.Param) -> Float[Array, "b t m"]:
    return jnp.einsum("btd,md->btm", x, w[...].astype(x.dtype), **EXACT)


@struct
class TrimKV(TokenMetadata, Eviction):
    """The score log β^(t + 1 − p) for an entry of position p when t tokens were read. A gate computes β in (0, 1) when
    the token comes. The order of two entries may change with their age.

    The age counts from t + 1, as in the authors' code. Gates of the form rg10 are DBTrimKV's: entries of all layers and
    heads then compete for one budget. A `threshold` is the least log β^(t + 1 − p).
    """

    gates: Any = dataclasses.field(repr=False)
    """The gates, or the authors' folder of trimkv_weights.pth and config.json, or the first of these files."""
    name = "trimkv"

    def __post_init__(self):
        gates = self.gates
        if isinstance(gates, str | Path):
            gates = load_gates(gates)
        if not isinstance(gates, RetentionGate):
            raise UserError(
                f"{self.name}: gates must be the authors' folder or file, or a RetentionGate, got {shown(gates)}"
            )
        assign(self, gates=gates)

    def check(self, model: Any) -> None:
        check_made_for(self.gates.sizes, model)

    @property
    def shares(self) -> Shares:
        return Shares(over="model") if self.gates.sizes.form == "rg10" else Shares()

    @property
    def usual_trigger(self) -> Trigger:
        return Trigger("every", every=128)

    @property
    def metadata(self) -> Mapping[str, str]:
        return {"log_beta": "float32", "position": "int32"}

    def numbers(self, state: Any, step: Step, readout: Readout) -> Numbers:
        if self.gates.sizes.form not in KEY_VALUE_FORMS:
            return {"log_beta": self.gates(step.hidden, step.head)}
        if step.k.shape[1] < self.gates.sizes.kv_heads:
            raise UserError(
                f"{self.name}: gates of the form {self.gates.sizes.form} look at all kv heads of a token: the mesh "
                "must have tensor=1"
            )
        x = rearrange(jnp.concatenate([step.k, step.v], -1), "b k t h -> b t (k h)")
        return {"log_beta": self.gates(x, step.head)}

    def score(self, state: Any, stored: Stored) -> Float[Array, "b k s"]:
        age = stored.seen[:, None, None] + 1 - stored.metadata["position"]
        return age * stored.metadata["log_beta"]


def load_gates(path: str | Path) -> RetentionGate:
    """Return the gates in the authors' trimkv_weights.pth, which is read without torch. `path` is this file, or its
    folder. config.json in the same folder names the form.

    Raises UserError naming the faulty file.
    """
    file = Path(path) / TRIMKV if Path(path).is_dir() else Path(path)
    with TorchFile(file) as opened:
        sizes, layers = _layers(opened, _form(file.parent / DESCRIPTION))
        names = FORMS[sizes.form]
        opened.check(layers, {names[name]: shape for name, shape in sizes.shapes.items()})
        arrays = opened.stack(layers, names.values())
        return filled(lambda: RetentionGate(sizes), {name: arrays[names[name]] for name in names}, file)


def check_made_for(sizes: Sizes, model: Any) -> None:
    """Raise UserError if the gates are for another configuration."""
    width = 2 * model.head_dim * model.num_kv_heads if sizes.form in KEY_VALUE_FORMS else model.width
    expected = model.num_full_layers, model.num_kv_heads, width
    if sizes[1:4] != expected:
        raise UserError(
            f"trimkv: these gates are for (layers, kv heads, width of the input) = {sizes[1:4]}, the model has "
            f"{expected}"
        )


def _form(file: Path) -> str:
    """Return the form that the authors' config.json names. Raises UserError for an unknown form or activation."""
    config = read_description(file)
    form, activation = config.get("retention_gate"), config.get("hidden_act", "silu")
    if not isinstance(form, str) or form not in FORMS:
        raise UserError(f"{file}: retention_gate is one of {', '.join(FORMS)}, got {shown(form)}")
    if activation != "silu":
        raise UserError(f"{file}: hidden_act should be 'silu', got {shown(activation)}")
    return form


def _layers(opened: TorchFile, form: str) -> tuple[Sizes, list[dict[str, Any]]]:
    """Return the sizes that the first layer has, and the arrays of each layer by name."""
    layers = opened.layers(PREFIX, "gates of TrimKV")
    first, last = FORMS[form]["w_gate" if form == "rg3" else "w_in"], FORMS[form]["w_out"]
    shapes = [shape_of(layers[0], name) for name in (first, last)] if layers else []
    match shapes:
        case [(int(hidden), int(width)), (int(kv_heads), int())] if min(hidden, width, kv_heads) > 0:
            return Sizes(form, len(layers), kv_heads, width, hidden), layers
    raise UserError(
        f"{opened.file}: these are no gates of the form {form}: layer 0 has no {first} and {last} of any size"
    )
