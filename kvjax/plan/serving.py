"""Reading prompts and decoding, as programs of shapes alone."""

import dataclasses
import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from kvjax.cache import table_tokens
from kvjax.command.launch import MeshShape
from kvjax.errors import UserError, real_number, whole_number
from kvjax.exported.orbax import abstract
from kvjax.inference.forward import bucket, last_logits, pieces
from kvjax.inference.reread import longest_of, one_pass, spans
from kvjax.inference.room import laid_out, layout_for
from kvjax.inference.sampling import BLOCK, CHUNK, Draw, decode_block
from kvjax.inference.schedule import recurring
from kvjax.mesh import BATCH, P, batch_shards, use_mesh
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.plan.program import Program
from kvjax.plan.stand_ins import Make, completed
from kvjax.plan.training import WEIGHTS, check_mesh, model_of
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.wgkv import WriteGate
from kvjax.policies.assignments import assignments

POOL = "KV pool"
TABLES = "page tables and states"
STAGES = {"prefill": "a chunk", "passes": "a part that is read again", "decode": "a token"}
"""Programs, and what a step of each is."""
MOST = 1 << 30
"""What a size may be: programs count in int32."""


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """Does reading prompts and decoding fit? Compiled for chips that are not here, without weights."""

    topology: str
    """The chips: v5e:2x4, v6e:2x4, v5p:2x2x1 or h100:8."""
    model: str = "llama-3.1-8b"
    """A folder with a config.json, a GGUF file, or a name: llama-3.2-1b, llama-3.2-3b, llama-3.1-8b,
    llama-3.1-70b, qwen2.5-7b, qwen2.5-7b-instruct-1m, qwen3-4b, qwen3-8b, qwen3-14b."""
    mesh: MeshShape = MeshShape()
    """Devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2."""
    policy: Annotated[str, tyro.conf.arg(aliases=["--method"])] = "full"
    """What to keep, as in kvjax.generate; wgkv and fast_kvzip have gates of their usual sizes, kvzip and
    guidance texts of theirs."""
    eviction: str | None = None
    """As in kvjax.generate."""
    selection: str | None = None
    """As in kvjax.generate."""
    window: int | None = None
    """Last tokens that are always visible; by default the policy's, for wgkv 256."""
    ratio: float | None = None
    """The share of entries that stay; for wgkv the share of tokens that gates let in (by default all of them)."""
    entries: int | None = None
    """With an eviction, instead of a ratio: entries of each kv head that stay, on average."""
    tokens: int | None = None
    """quest, as the policy: entries of each kv head that it reads."""
    set: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = ()
    """Any other arguments of the policy, as NAME=VALUE."""
    context: int = 32768
    """Tokens of each prompt."""
    batch: int = 1
    """Sequences at a time, rounded up to a multiple of the mesh's data × fsdp."""
    new: int = 128
    """Tokens that are decoded behind each."""
    chunk: int = CHUNK
    """Prompt tokens in one call of prefill, as of kvjax.prefill: fewer take less memory."""
    dtype: str | None = None
    """float32, bfloat16 or float16; by default what config.json says of the weights."""
    page_size: int | None = None
    """Tokens per page; by default 64 on TPUs and 16 elsewhere and with a selection, as in kvjax.prefill."""
    search: bool = True
    """Also look for a context and a batch that just fit, by at most three compiles of both programs each, and for a
    mesh that would, by one each; --no-search compiles the two programs only."""

    def check(self) -> None:
        """Refuse numbers that mean nothing. Raises UserError."""
        for name in ("context", "batch", "new", "chunk", "page_size"):
            if (value := getattr(self, name)) is not None:
                whole_number("plan", f"--{name.replace('_', '-')}", value, most=MOST)
        if self.policy == "wgkv":
            if self.entries is not None:
                raise UserError(
                    "plan: --entries is for an eviction; of wgkv state --ratio, what its gates let in"
                )
            if self.ratio is not None:
                real_number("plan", "--ratio", self.ratio, 0.0, 1.0)
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise UserError(f"--dtype must be float32, bfloat16 or float16, got {self.dtype}")

    def arguments(self) -> dict[str, Any]:
        """Of `make_policy`. Raises UserError for a --set that is not NAME=VALUE."""
        names = "eviction", "selection", "window", "ratio", "entries", "tokens"
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        given |= assignments([text for texts in self.set for text in texts], "--set")
        if self.policy == "wgkv":
            given |= {"window": given.get("window", 256)}
            given.pop("ratio", None)
        return given


@dataclasses.dataclass(frozen=True)
class Serving:
    """A configuration for a model on the current mesh."""

    told: ServeConfig
    """The options."""
    config: ModelConfig
    """The model's."""
    dtype: str
    """Of the weights."""
    mesh: Mesh
    """The current one."""

    @functools.cached_property
    def model(self) -> Decoder:
        """Shapes of the weights."""
        return model_of(self.mesh, self.config, self.dtype)

    def policy(self, make: Make = jax.eval_shape) -> Policy:
        """As the host knows it, with gates of shapes; `make` makes them."""
        given = self.told.arguments()
        if self.told.policy == "wgkv":
            heads = self.config.num_layers, self.config.num_kv_heads
            share = 1.0 if self.told.ratio is None else self.told.ratio
            given |= {"rate": np.full(heads, share), "gates": make(self._gates)}
        else:
            given = completed(self.told.policy, given, self.config, make)
        return make_policy(self.told.policy, **given)

    def _gates(self) -> WriteGate:
        config = self.config
        expand = 1.5 if config.model_type == "qwen3" else 4.0
        sizes = config.num_layers, config.num_kv_heads, config.head_dim
        return WriteGate(*sizes, expand=expand, rngs=nnx.Rngs(0))

    def placed(self, which: Any) -> Policy:
        """Shapes of what compiled programs see of the policy; `which` makes it of the one for the model."""

        def make() -> Policy:
            policy = self.policy(lambda gates: gates())
            return which(policy.placed(self.config.num_layers, self.config.num_kv_heads))

        return abstract(make, self.mesh)

    @property
    def rows(self) -> int:
        """Sequences of the batch on this mesh."""
        shards = batch_shards()
        return -(-self.told.batch // shards) * shards

    def cache(self, policy: Policy, traced: Policy, tokens: int, tables: int = 0) -> Any:
        """Shapes of a cache for sequences of `tokens` tokens, with a pool for what the host's `policy` expects. tables:
        tokens that one row may have, if these are more."""
        config = self.config
        layout = layout_for(
            policy, batch=self.rows, layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            tokens=tokens, dtype=self.model.embed.dtype, page_size=self.told.page_size,
        )  # fmt: skip
        if policy.most_stored is None:
            layout = dataclasses.replace(layout, tokens=max(layout.tokens, table_tokens(max(1, tables))))
        group = config.num_heads // config.num_kv_heads
        return abstract(lambda traced: laid_out(traced, layout, group), self.mesh, traced)

    @property
    def entry_bytes(self) -> int:
        """Of one token's key and value in all layers and kv heads."""
        config = self.config
        width = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return width * self.model.embed.dtype.itemsize

    def kept(self, policy: Policy) -> int:
        """Tokens that a cache after the prompt must have places for: what an eviction leaves, else the context."""
        plan, context = policy.plan, self.told.context
        if plan is None:
            return context
        left = min(context, int(plan.allowance([context], self.entry_bytes)[0]) + 1 + plan.prefix)
        return left + (max(plan.moment.every, 1) if plan.moment.while_decoding else 0)

    def prefill(self) -> Program:
        """The call that reads the largest chunk of the prompts."""
        policy, cache = self.policy(), self._whole()
        plan, told = policy.plan, self.told
        chunk = min(told.chunk, told.context)
        if plan is not None and plan.moment.in_chunks:
            chunk = min(chunk, plan.moment.chunk)
        sizes = [size for _, size in pieces(chunk, told.chunk)]
        tokens = self._array(jnp.int32, (self.rows, max(sizes)), BATCH, None)
        valid = self._array(jnp.int32, (self.rows,), BATCH)
        traced = self.placed(lambda placed: placed.reading)
        arguments = self.model, traced, cache, tokens, valid
        return Program(last_logits, arguments, _parts(*arguments), donated=2)

    def _whole(self) -> Any:
        """Shapes of the cache that prompts are read into."""
        policy, told = self.policy(), self.told
        behind = 0 if policy.plan is None else policy.plan.read_behind
        tokens = told.context + behind + self._room(policy)
        return self.cache(
            policy,
            self.placed(lambda placed: placed.traced),
            tokens,
        )

    def _room(self, policy: Policy) -> int:
        """Tokens of an answer that a cache has places for beside the prompt, or what is left of it. Where answers are
        compacted they are made when they are needed."""
        return 0 if policy.plan is not None and policy.plan.moment.while_decoding else self.told.new

    def passes(self) -> Program:
        """One pass of every prompt: what asks for a part of it, and the part once more."""
        eviction = self.policy().eviction
        assert eviction is not None
        size = bucket(longest_of(eviction, self.told.context))
        tokens = self._array(jnp.int32, (self.rows, size), BATCH, None)
        valid = self._array(jnp.int32, (self.rows,), BATCH)
        parts = abstract(lambda: spans([], self.rows), self.mesh)
        reading = self.placed(lambda placed: placed.reading)
        traced = self.placed(lambda placed: placed.traced).eviction
        cache = self._whole()
        return Program(
            one_pass,
            (self.model, reading, traced, cache, tokens, valid, parts),
            _parts(self.model, (reading, traced), cache, tokens, valid, parts),
            donated=3,
            static={
                "first": bucket(max(eviction.needs.prefix, eviction.needs.first)),
                "implementation": None,
            },
        )

    def decode(self) -> Program:
        """A block of decoded tokens. Figures are of one."""
        policy, told = self.policy(), self.told
        tokens = self.kept(policy) + self._room(policy)
        # one row may have been left all of its own
        cache = self.cache(
            policy.continuing.uncompacted,
            self.placed(lambda placed: placed.continuing.traced),
            tokens,
            tables=told.context + told.new,
        )
        traced = self.placed(lambda placed: placed.continuing.traced)
        number = self._array(jnp.int32, ())
        valid, running = (
            self._array(jnp.int32, (self.rows,), BATCH),
            self._array(jnp.bool_, (self.rows,), BATCH),
        )
        draw = jax.tree.map(lambda x: self._array(x.dtype, np.shape(x)), Draw())
        key = abstract(lambda: jax.random.key(0), self.mesh)
        arguments = self.model, traced, cache, valid, running, draw, key, number
        count = min(BLOCK, max(1, told.new - 1))
        again = abstract(lambda cache: recurring(policy, cache), self.mesh, cache)
        return Program(
            decode_block,
            arguments,
            _parts(*arguments, again),
            donated=2,
            static={"count": count, "greedy": True},
            named={"recurring": again},
            steps=count,
        )

    def _array(self, dtype: Any, shape: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, P(*spec)))


def _parts(model: Any, policy: Any, cache: Any, *rest: Any) -> list[tuple[str, Any]]:
    return [
        (WEIGHTS, model),
        ("policy", policy),
        (POOL, cache.pages),
        (TABLES, (cache.layers, cache.seen)),
        ("batch", rest),
    ]


def stages_of(told: ServeConfig, config: ModelConfig) -> list[str]:
    """Those of `STAGES` that there are. Raises UserError for a policy and a mesh that do not go with the model, before
    anything compiles."""
    check_mesh(told.mesh, config)
    given = told.arguments()
    if told.policy == "wgkv":
        if wrong := sorted(set(given) - {"window", "tau"}):
            raise UserError(
                f"plan: wgkv has no {wrong[0]} to plan with; it has --ratio, --window and --set tau=…"
            )
        return ["prefill", "decode"]
    with use_mesh():
        policy = make_policy(told.policy, **completed(told.policy, given, config, jax.eval_shape))
    policy.check(config)
    again = policy.eviction is not None and policy.eviction.rereads
    return [stage for stage in STAGES if again or stage != "passes"]
