"""WG-KV: write gates for a frozen model, distilled from its own hidden states (paper §3, App. C)."""

import dataclasses
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jaxtyping import Array, Float, Float32, Int

from kvjax.errors import LARGEST_INT, UserError
from kvjax.inference.capture import captured_layers
from kvjax.mesh import AXES, batch_shards, gather, use_mesh
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.wgkv import WriteGate, WriteGateTraining, load_gates, save_gates
from kvjax.policies.admission.wgkv.files import Sizes, gate_sizes, usual_expand
from kvjax.train.objective import student_errors
from kvjax.train.recipe import Recipe, Rule, Validation, read_init
from kvjax.train.thresholds import thresholds
from kvjax.train.validation import by_length


@dataclasses.dataclass(frozen=True)
class WriteGates(Recipe):
    """Train WG-KV write gates for a frozen model.

    With only --mesh a run trains gates for the built-in small model (configs/builtin.yaml) and makes checkpoints, plots
    and a report of accuracy against measured cache size. With another --model and no --config the options have the
    paper's values.
    """

    method: str = "wgkv"
    """The method to train."""
    lambda_: Annotated[float, tyro.conf.arg(name="lambda")] = 0.04
    """The weight of the sparsity term. A larger one keeps less."""
    window: int = 256
    """The number of last tokens that are always visible. If --lengths is given without --window and the shortest length
    is at most the default window, the window is a quarter of this length."""
    tau: float = 0.1
    """The threshold: a token is retained if and only if its gate is at least this."""
    sparsity: Literal["lifetime", "paper"] = "lifetime"
    """The sparsity term. lifetime: the mean gate, weighted by the share of a token's life outside the window (the
    paper's code); paper: the plain mean (the paper's text)."""
    expand: float | None = None
    """The hidden width of the gates over head_dim; by default that of --init, else 1.5 for Qwen3 and 4 for other
    models."""
    init_: Annotated[str | None, tyro.conf.arg(name="init")] = None
    """The gates to begin with instead of random ones: a folder that a run exported, `builtin`, or a .pt file of the
    authors. They may come from another model of the same shape."""
    lr: float = 1e-3
    """The peak learning rate of AdamW. It warms up over the first tenth of the sequences and falls to 0 by a cosine."""
    weight_decay: float = 0.01
    """The weight decay of AdamW, on every gate parameter."""

    exports: ClassVar[str] = "gates"
    soft: ClassVar[str | None] = "distillation"
    builtin: ClassVar[str | None] = "builtin"
    shown: ClassVar[Mapping[str, str]] = {
        "loss": ".4f",
        "distillation": ".4f",
        "sparsity": ".3f",
        "kv_size": ".3f",
    }

    def rules(self) -> Iterator[Rule]:
        yield from super().rules()
        yield self.lambda_ >= 0, "--lambda", "at least 0", self.lambda_
        yield self.window >= 1, "--window", "at least 1", self.window
        yield 0 <= self.tau <= 1, "--tau", "between 0 and 1", self.tau
        yield self.expand is None or self.expand > 0, "--expand", "a finite number above 0", self.expand
        yield self.lr > 0, "--lr", "above 0", self.lr
        yield self.weight_decay >= 0, "--weight-decay", "at least 0", self.weight_decay

    def with_derived_defaults(self, given: Container[str]) -> Recipe:
        recipe = super().with_derived_defaults(given)
        if self.init_ is not None and "expand" not in given and (self.expand is None or "init_" in given):
            recipe = dataclasses.replace(recipe, expand=read_init(gate_sizes, self.init_).expand)
        if "lengths" not in given or "window" in given or not 1 < min(self.lengths, default=0) <= self.window:
            return recipe
        return dataclasses.replace(recipe, window=max(1, self.lengths[0] // 4))

    def check(self) -> None:
        if self.lengths and self.lengths[0] <= self.window:
            raise UserError(
                f"--lengths {self.lengths[0]} is not above --window {self.window}: no token would leave the window"
            )
        super().check()

    def check_model(self, model: ModelConfig) -> None:
        # a width of at most 0.5 is rounded to 0
        if self.expand is not None and not 0.5 < (width := model.head_dim * self.expand) <= LARGEST_INT:
            raise UserError(
                f"--expand {self.expand:g} makes gates {width:g} wide for the model's head_dim of {model.head_dim}, "
                "expected at least 1"
            )
        if self.init_ is not None and not self.resume:
            sizes, expected = read_init(gate_sizes, self.init_), self._sizes(model)
            if sizes.shape != expected.shape:
                raise UserError(
                    f"--init {self.init_}: has gates of (layers, kv heads, head_dim, hidden width) = {sizes.shape}, "
                    f"this run trains {expected.shape}"
                )

    def _sizes(self, model: ModelConfig) -> Sizes:
        heads = model.num_full_layers, model.num_kv_heads
        return Sizes(*heads, model.head_dim, self.expand or usual_expand(model))

    def init(self, model: Decoder) -> WriteGate:
        return self._sizes(model.config).make(self.seed)

    def begin(self, params: WriteGate) -> WriteGate:
        return params if self.init_ is None else read_init(load_gates, self.init_)[0]

    def masks(self, gates: WriteGate, *, hard: bool = False) -> WriteGateTraining:
        """Return the gates as a method for training. `hard`: binarised at τ, as at inference."""
        tau = jnp.full(gates.b2.shape[0], self.tau, jnp.float32)
        return WriteGateTraining(gates, tau, window=self.window, sparsity=self.sparsity, hard=hard)

    def loss(
        self, params: WriteGate, frozen: Decoder, batch: Int[Array, "b t"], key: jax.Array, step: Any
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Return the mean squared error between the final hidden states of student and teacher, plus λ times the
        sparsity term. The error is a mean over sequences, tokens and width. The sparsity term is a mean over layers,
        sequences and kv heads."""
        teacher = jax.lax.stop_gradient(frozen.hidden(batch))
        squares, scalars = student_errors(self.masks(params), frozen, batch, teacher, window=self.window)
        error = jnp.mean(squares)
        means = jax.tree.map(lambda scalar: scalar.mean((1, 2)).mean(), scalars)
        return error + jnp.float32(self.lambda_) * means["sparsity"], {"distillation": error} | means

    def optimizer(self) -> optax.GradientTransformation:
        """Return AdamW with weight decay on every gate parameter and no clipping (App. C)."""
        rate = warmup_cosine(self.sequences, self.rows, self.lr)
        return optax.adamw(rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=self.weight_decay)

    def measure(self, params: WriteGate, frozen: Decoder, batch: Int[Array, "b t"]) -> dict[str, Any]:
        """Return figures of each sequence: the distillation loss of soft gates, as in training, and of hard gates, as
        at inference (the authors' code logs both); the mean gate; the share of entries left at the end, local window
        included (`kv_size`); and the share of tokens with gates of at least τ, as a mean (`admitted`) and by layer and
        kv head (`rates`)."""
        teacher = frozen.hidden(batch)

        def error(hard: bool):
            squares, scalars = student_errors(
                self.masks(params, hard=hard), frozen, batch, teacher, window=self.window
            )
            return jnp.mean(squares, (1, 2)), scalars

        soft, gated = error(False)
        hard, used = error(True)
        return {
            "distillation": soft,
            "hard_distillation": hard,
            "gate": gated["gate"].mean((0, 2)),
            "kv_size": used["kv_size"].mean((0, 2)),
            "admitted": used["admitted"].mean((0, 2)),
            "rates": used["admitted"].transpose(1, 0, 2),
        }

    def remark(self, validation: Validation) -> str:
        return f"at τ {self.tau:g} they admit {100 * validation.numbers['admitted']:.1f}% of the tokens"

    def export(self, folder: Path, params: WriteGate, model: Decoder, validation: Validation) -> None:
        """Write `gates.safetensors` and `config.json`, which `kvjax.make_policy("wgkv", gates=folder)` reads. The
        policy's pool is sized by the rates on held-out sequences."""
        rates = validation.by_sequence["rates"]
        description = {
            "tau": self.tau,
            "window": self.window,
            "rate": _rounded(rates.mean(0)),
            "peak_rate": _rounded(rates.max(0)),
            "validation": validation.numbers | {"sequences": validation.sequences},
            "model": self.model,
            "data": self.data,
            "lambda": self.lambda_,
            "sparsity": self.sparsity,
            "sequences": self.sequences,
            "batch": self.rows,
            "lengths": list(self.lengths),
            "seed": self.seed,
            "init": self.init_,
        }
        gathered = gather(params, *AXES)
        if jax.process_index() == 0:
            save_gates(folder, gathered, description)

    def evaluate_options(self, folder: Path) -> Sequence[str]:
        return "--gates", str(folder)

    def deploy(self, params: WriteGate, model: Decoder) -> Policy:
        # without rates the pool has space for all tokens, since the measured size is not known yet
        return make_policy({"wgkv": {"tau": self.tau, "window": self.window}}, model=model, gates=params)

    def sweep(
        self, params: WriteGate, model: Decoder, held_out: Sequence[Int[np.ndarray, " _"]]
    ) -> Mapping[str, Policy]:
        taus = dict.fromkeys([self.tau, *thresholds(held_out_gates(params, model, held_out))])
        return {f"tau={tau:.9g}": dataclasses.replace(self, tau=tau).deploy(params, model) for tau in taus}


def held_out_gates(
    params: WriteGate, model: Decoder, held_out: Sequence[Int[np.ndarray, " _"]]
) -> Float32[np.ndarray, " n"]:
    """Return the gates of all layers, kv heads and tokens of sequences, under full attention."""
    with use_mesh(model):
        whole_gates, at_once = gather(params, *AXES), batch_shards()
    gates_by_layer = []
    for rows in by_length(held_out, at_once):
        layers = captured_layers(model, Policy(), None, rows, ("k_pre", "k"))
        gates_by_layer += [
            np.ravel(_gates(whole_gates, index, x["k_pre"], x["k"])) for index, x in enumerate(layers)
        ]
    return np.concatenate(gates_by_layer)


@jax.jit
def _gates(gates: WriteGate, layer: Any, k_pre: Any, k: Any) -> Float[Array, "b k t"]:
    return jax.tree.map(lambda x: x[layer], gates)(k_pre, k)


def warmup_cosine(sequences: int, rows: int, peak: float) -> optax.Schedule:
    """Return the learning rate schedule. Update i begins with sequence s = i · rows of the run. Its rate is peak · s/w
    in the first tenth of the run (w = sequences/10), then falls from peak to 0 by a cosine. A run of one update has no
    warmup.

    WG-KV, App. C, has 7,500 sequences, one per update, and w = 750. Its code also steps the schedule once per sequence.
    """
    warmup = max(1, math.floor(sequences / 10)) if sequences > rows else 0

    def rate(update: Any) -> Float[Array, ""]:
        sequence = update * rows
        after = (sequence - warmup) / max(1, sequences - warmup)
        return peak * jnp.where(
            sequence < warmup, sequence / max(1, warmup), (1 + jnp.cos(jnp.pi * after)) / 2
        )

    return rate


def _rounded(rates: np.ndarray) -> list[list[float]]:
    return np.round(rates.astype(np.float64), 4).tolist()
