"""KVPOP: a whole model that is trained for a cache of constant size, and scorers that choose the cache's entries (paper
§3, §4, App. A to D)."""

import dataclasses
import shlex
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.errors import UserError
from kvjax.mesh import AXES, gather
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.kvpop import KVPOP, Scorer, Sizes, save_scorers
from kvjax.policies.admission.streaming_llm import StreamingLLM
from kvjax.policies.base import Trainable
from kvjax.policies.compiled import on_mesh
from kvjax.train.data import Data, DataRequest
from kvjax.train.future_attention import KVPOPTraining
from kvjax.train.objective import Deployed, Part, distilled_token_loss, likeliest, next_token_loss, student
from kvjax.train.packing import open_stream
from kvjax.train.recipe import Recipe, Rule, Validation
from kvjax.train.teacher import TeacherStore, fill_store, shapes

STEPS = {"uptrain": 5000, "sparsify": 2000}
"""The paper's number of updates in each phase (App. A)."""
FALL = 8e-5
"""The final learning rate of the scorers: the paper's base rate."""


@dataclasses.dataclass(frozen=True)
class ConstantCache(Recipe):
    """Train a whole model and its scorers for a cache of constant size (KVPOP), in two runs. --phase uptrain trains the
    dense model on the data. --phase sparsify continues from that model under the cache's mask: it trains model and
    scorers, and distils the uptrained model. Each `--max-entries` needs its own model.

    The defaults are the paper's numbers for Qwen3-4B.
    """

    method: str = "kvpop"
    """The method to train."""
    phase: Literal["uptrain", "sparsify"] = "uptrain"
    """The phase. uptrain: the dense model learns next tokens; sparsify: model and scorers learn under the cache's
    mask."""
    uptrained: str | None = None
    """For sparsify: the folder of an uptrain run or of a model. This model is the initial student and the teacher."""
    mask: Literal["scored", "streaming"] = "scored"
    """The tokens before the window that a kv head sees. scored: the sinks and the tokens with the best scores;
    streaming: only the sinks, and all other entries are the window (StreamLLM+, for comparison)."""
    max_entries: int = 512
    """The maximum number of entries of a kv head: sinks, chosen tokens and window."""
    sink: int = 4
    """The number of first tokens that always stay."""
    window: int = 64
    """The number of last tokens that are always visible."""
    delayed: bool = True
    """Score a token when it is about to leave the window, given the tokens after it; otherwise score it at once."""
    decay: bool = True
    """Let scores fall with position, at a rate that each head learns."""
    age: int = 1
    """The number of positions that count as one for the decay. The distance of a token at u from a query at q is
    floor(q/age) - floor(u/age). (The paper's floor((q - u)/age) would bring back evicted tokens, which no cache can
    do.)"""
    features: Literal["hedgehog", "none"] = "hedgehog"
    """The feature map of the scorers' queries and keys. hedgehog: two softmaxes; none: no map, with matrices twice as
    wide, which needs --normaliser xlstm."""
    normaliser: Literal["plain", "xlstm"] = "plain"
    """The divisor of the scorers' weighted sums. plain: the sum of the weights; xlstm: xLSTM's, which is at least 1."""
    capped: bool = True
    """Keep the logits of the scorers' gates within ±15."""
    target: Literal["kept", "all"] = "kept"
    """The target of a token's score: the attention that the token gets later. kept: by a softmax over the tokens that
    the cache holds then; all: by a softmax over all tokens."""
    falling_target: bool = True
    """Let targets fall with position as scores do."""
    temperature: float = 1.0
    """The temperature of the score loss."""
    distilled: float = 0.1
    """The weight of the divergence from the teacher in the model's loss. The rest is the weight of the cross-entropy of
    next tokens."""
    teacher: str = "model"
    """The place of the teacher. `model`: the uptrained model stays in memory with the student. `store`: its likeliest
    tokens for every sequence are computed before the first update and stored in the run's folder. A folder: they are
    stored there, and runs with other --max-entries can share them."""
    teacher_tokens: int = 256
    """The number of the teacher's likeliest tokens over which the divergence is taken."""
    lr: float = 8e-5
    """The constant learning rate of the model (AdamW)."""
    streaming_lr: float | None = None
    """The learning rate of the model with --mask streaming; by default --lr."""
    scorer_lr: float = 1e-3
    """The peak learning rate of the scorers. It warms up over --scorer-warmup updates, and falls to 8e-5 by a cosine.
    """
    scorer_warmup: int = 100
    """The number of updates in which the scorers' learning rate warms up."""
    weight_decay: float = 1e-4
    """The weight decay of AdamW, for model and scorers."""
    clip: float = 1.0
    """The largest norm of the gradient. The model's and the scorers' gradients are clipped separately."""
    lengths: tuple[int, ...] = (8192,)
    """The lengths of sequences in tokens."""
    shares: tuple[float, ...] = (1.0,)
    """The relative frequency of each length."""
    batch: int = 128
    """The number of sequences of an update, rounded up to a multiple of the mesh's data × fsdp (times --accumulate)."""
    sequences: int = 0
    """The total number of sequences to train on, on any mesh. 0: as many as the paper's updates take, 5,000 for uptrain
    and 2,000 for sparsify."""
    master_weights: bool = True
    """Keep 16-bit parameters in float32 between updates. The loss sees them rounded."""

    builtin: ClassVar[str | None] = "kvpop-builtin"
    shown: ClassVar[Mapping[str, str]] = {"cross_entropy": ".4f", "divergence": ".4f", "agreement": ".3f"}

    @property
    def takes_model(self) -> bool:
        """True unless the loaded model is the teacher, which must stay as it is."""
        return self.teacher_store is not None or self.phase == "uptrain"

    @property
    def trains_model(self) -> bool:
        return True

    @property
    def teacher_store(self) -> TeacherStore | None:
        """The folder of the teacher's likeliest tokens; None: the teacher is in memory, or there is none."""
        if self.teacher == "model":
            return None
        return TeacherStore(self.kept or (self.out or Path()) / "teacher", self.teacher_tokens)

    @property
    def kept(self) -> Path | None:
        return None if self.teacher in ("model", "store") else Path(self.teacher).expanduser()

    @property
    def has_scorers(self) -> bool:
        """True if the run trains scorers in addition to the model."""
        return self.phase == "sparsify" and self.mask == "scored"

    def with_derived_defaults(self, given: Container[str]) -> Recipe:
        recipe = super().with_derived_defaults(given)
        assert isinstance(recipe, ConstantCache)
        if "lr" in given and "streaming_lr" not in given:
            recipe = dataclasses.replace(recipe, streaming_lr=None)
        if recipe.phase == "sparsify" and recipe.uptrained is not None:
            recipe = dataclasses.replace(recipe, model=_model_of(recipe.uptrained))
        return recipe

    @property
    def steps(self) -> int:
        return super().steps or STEPS[self.phase]

    def rules(self) -> Iterator[Rule]:
        yield from (rule for rule in super().rules() if rule[1] != "--sequences")
        yield self.sequences >= 0, "--sequences", "at least 1, or 0 for the paper's updates", self.sequences
        yield self.sink >= 0, "--sink", "at least 0", self.sink
        yield self.window >= 1, "--window", "at least 1", self.window
        minimum = self.sink + self.window + 1
        enough = self.max_entries >= minimum
        yield enough, "--max-entries", f"at least sinks + window + 1 = {minimum}", self.max_entries
        yield self.age >= 1, "--age", "at least 1", self.age
        yield self.temperature > 0, "--temperature", "above 0", self.temperature
        yield 0 <= self.distilled <= 1, "--distilled", "from 0 to 1", self.distilled
        yield self.teacher_tokens >= 1, "--teacher-tokens", "at least 1", self.teacher_tokens
        yield self.lr > 0, "--lr", "above 0", self.lr
        rate = self.streaming_lr
        yield rate is None or rate > 0, "--streaming-lr", "above 0", rate
        yield self.scorer_lr > 0, "--scorer-lr", "above 0", self.scorer_lr
        yield self.scorer_warmup >= 0, "--scorer-warmup", "at least 0", self.scorer_warmup
        yield self.weight_decay >= 0, "--weight-decay", "at least 0", self.weight_decay
        yield self.clip > 0, "--clip", "above 0", self.clip

    def check(self) -> None:
        super().check()
        if self.phase == "sparsify" and self.uptrained is None:
            raise UserError(
                "--phase sparsify needs --uptrained, the folder of a run of --phase uptrain (or of a model that needs "
                "none): it is the first student, and the teacher"
            )
        if self.phase == "uptrain" and self.uptrained is not None:
            raise UserError(f"--uptrained {self.uptrained} is for --phase sparsify: --phase uptrain makes it")
        if self.phase == "uptrain" and self.teacher != "model":
            raise UserError(
                f"--teacher {self.teacher} is for --phase sparsify: --phase uptrain has no teacher"
            )
        if self.features == "none" and self.normaliser == "plain":
            raise UserError("--features none may be negative, so --normaliser must be xlstm, got plain")
        if self.phase == "sparsify" and self.lengths[0] <= self.max_entries:
            raise UserError(
                f"--lengths {self.lengths[0]} is not above --max-entries {self.max_entries}: nothing would be evicted"
            )

    def check_model(self, model: ModelConfig) -> None:
        if self.has_scorers and model.head_dim % 2:
            raise UserError(f"kvpop: scorers need an even head_dim, the model has {model.head_dim}")
        if self.teacher_store is not None and self.teacher_tokens > model.vocab_size:
            raise UserError(
                f"--teacher-tokens must be at most the model's {model.vocab_size} where they are kept, got "
                f"{self.teacher_tokens}"
            )

    def _sizes(self, model: ModelConfig) -> Sizes:
        shape = model.num_full_layers, model.num_kv_heads, model.head_dim
        return Sizes(*shape, self.features, self.normaliser, self.capped)

    def init(self, model: Decoder) -> dict[str, Any]:
        scorers = {"scorers": self._sizes(model.config).make(self.seed)} if self.has_scorers else {}
        # the loaded model may be the teacher, so the student is a copy
        return scorers | {"model": model if self.takes_model else jax.tree.map(jnp.copy, model)}

    def row(self, model: Decoder, length: int) -> dict[str, jax.ShapeDtypeStruct] | None:
        return None if self.teacher_store is None else shapes(length, self.teacher_tokens)

    def open_data(self, request: DataRequest) -> Data:
        return open_stream(request)

    def prepare(
        self,
        model: Decoder,
        sequences: Iterator[Any],
        held_out: Sequence[Int[np.ndarray, " _"]],
        mesh: Mesh,
        tokens: int,
        say: Callable[[str], None],
    ) -> None:
        if (store := self.teacher_store) is None:
            return
        store.begin(model, self.model)
        say(f"teacher: the {store.count} likeliest tokens after each of {tokens:,}, in {store.folder}")
        names = "data", "lengths", "shares", "seed", "validation", "instruction"
        settings = {name: getattr(self, name) for name in names} | {"rows": self.rows, "tokens": tokens}
        fill_store(
            store, model, sequences, held_out, mesh=mesh, tokens=tokens, settings=settings, share=self.share
        )

    def batches(self, sequences: Iterator[Any], model: Decoder | None) -> Iterator[Any]:
        return sequences if self.teacher_store is None else map(self.teacher_store.read, sequences)

    def split(self, params: dict[str, Any]) -> tuple[Scorer | None, Decoder]:
        return params.get("scorers"), params["model"]

    def admission(self, scorers: Scorer) -> KVPOP:
        """Return the admission that uses the scorers at inference."""
        return KVPOP(
            scorers,
            max_entries=self.max_entries,
            sink=self.sink,
            window=self.window,
            delayed=self.delayed,
            decay=self.decay,
            age=self.age,
        )

    def student(self, params: dict[str, Any]) -> tuple[Trainable, int]:
        """Return the method that masks the student's attention, and its window."""
        model = params["model"].config
        has_scorers, window = (
            self.has_scorers,
            self.window if self.has_scorers else self.max_entries - self.sink,
        )
        admission = self.admission(params["scorers"]) if has_scorers else StreamingLLM(sink=self.sink)
        placed = on_mesh(admission, model.num_full_layers, model.num_kv_heads)
        if not isinstance(placed, KVPOP):
            return Deployed(placed, window), window
        options = {"over": self.target, "falls": self.falling_target, "temperature": self.temperature}
        return KVPOPTraining(placed, **options), window

    def loss(
        self,
        params: dict[str, Any],
        frozen: Decoder | None,
        batch: Any,
        key: jax.Array,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Return the loss of the phase. For uptrain it is the cross-entropy of next tokens. For sparsify it is the
        model's loss plus the scorers' loss. The model's loss is (1 − `distilled`) · cross-entropy + `distilled` ·
        divergence from the teacher. Neither loss has a gradient in the other's parameters."""
        model, tokens = params["model"], batch if self.teacher_store is None else batch["tokens"]
        if self.phase == "uptrain":
            error = next_token_loss(model, model.hidden(tokens, remat=True), tokens)
            return error, {"cross_entropy": error}
        method, window = self.student(params)
        hidden, figures = student(method, model, tokens, window=window)
        error, divergence = distilled_token_loss(model, hidden, tokens, self._teacher(frozen, batch))
        model_loss = (1 - self.distilled) * error + self.distilled * divergence
        scalars = {"cross_entropy": error, "divergence": divergence}
        if not self.has_scorers:
            return model_loss, scalars
        means = {name: x.mean((1, 2)).mean() for name, x in figures.items()}
        return model_loss + means["score_loss"], scalars | {x: means[x] for x in ("score_loss", "agreement")}

    def _teacher(self, frozen: Decoder | None, batch: Any) -> Callable[[Part], tuple[Array, Array]]:
        """Return a function that returns the teacher's likeliest tokens for a part of the sequences."""
        if frozen is None:
            return lambda cut: (cut(batch["logits"]), cut(batch["which"]))
        hidden = jax.lax.stop_gradient(frozen.hidden(batch))
        to_logits = frozen.to_logits(hidden)
        return lambda cut: likeliest(to_logits(cut(hidden)), self.teacher_tokens)

    def optimizer(self) -> optax.GradientTransformation:
        """Return AdamW for model and scorers, each with its own learning rate and its own clipping."""

        def adamw(rate):
            adam = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=self.weight_decay)
            return optax.chain(optax.clip_by_global_norm(self.clip), adam)

        if not self.has_scorers:
            has_own_rate = self.phase == "sparsify" and self.streaming_lr is not None
            return adamw(self.streaming_lr if has_own_rate else self.lr)
        warmup, end = min(self.scorer_warmup, self.steps - 1), min(FALL, self.scorer_lr)
        rate = optax.warmup_cosine_decay_schedule(0.0, self.scorer_lr, warmup, self.steps, end)
        groups: dict[Hashable, Any] = {"scorers": adamw(rate), "model": adamw(self.lr)}
        return optax.partition(groups, {name: name for name in groups})

    def export(self, folder: Path, params: Scorer | None, model: Decoder, validation: Validation) -> None:
        """Write `gates.safetensors` and `config.json`, which `kvjax.make_policy("kvpop", gates=folder)` reads. A run
        without scorers writes neither. The loop adds `model`."""
        if params is None:
            return
        used = ("max_entries", "sink", "window", "delayed", "decay", "age")
        trained_with = (
            "target",
            "falling_target",
            "temperature",
            "distilled",
            "teacher_tokens",
            "uptrained",
            "data",
        )
        description = {name: getattr(self, name) for name in (*used, *trained_with, "lengths", "seed")}
        description |= {"updates": self.steps, "batch": self.rows}
        description |= {"validation": validation.numbers | {"sequences": validation.sequences}}
        gathered = gather(params, *AXES)
        if jax.process_index() == 0:
            save_scorers(folder, gathered, description)

    def remark(self, validation: Validation) -> str:
        return "--phase sparsify --uptrained FOLDER goes on from this run" if self.phase == "uptrain" else ""

    @property
    def used_as(self) -> str:
        if self.has_scorers:
            return self.method
        return "full" if self.phase == "uptrain" else "streaming_llm"

    @property
    def _streaming_options(self) -> dict[str, Any]:
        """The sinks and the window of a mask without scorers, as arguments of its policy."""
        return {} if self.phase == "uptrain" else {"sink": self.sink, "window": self.max_entries - self.sink}

    def use_options(self, folder: Path) -> Sequence[str]:
        if self.has_scorers:
            return super().use_options(folder)
        arguments = ",".join(f"{name}={size}" for name, size in self._streaming_options.items())
        return "--policy", f"{self.used_as}:{arguments}" if arguments else self.used_as

    def evaluate_options(self, folder: Path) -> Sequence[str]:
        if self.has_scorers:
            return super().evaluate_options(folder)
        trained_policy = [] if self.used_as == "full" else [f"{self.used_as}:calibrated"]
        return "--policies", "full", *self.rivals.values(), *trained_policy

    def deploy(self, params: Scorer | None, model: Decoder) -> Policy:
        if params is not None:
            return Policy(self.admission(params))
        return make_policy({self.used_as: self._streaming_options}, model=model)


def _model_of(folder: str) -> str:
    """Return the exported model if `folder` is a run's, else the folder itself. Raises UserError if a run has not
    exported a model."""
    run = Path(folder).expanduser()
    model = run / Recipe.exports / "model"
    if not model.is_dir() and (run / "checkpoints").is_dir():
        raise UserError(
            f"--uptrained {folder}: this run is not finished, or trained no model: it has no {Recipe.exports}/model; "
            f"python -m kvjax.export {shlex.quote(folder)} exports its last checkpoint"
        )
    return str(model) if model.is_dir() else folder
