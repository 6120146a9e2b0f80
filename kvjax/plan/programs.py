"""The programs of `kvjax.train` and `kvjax.inference`, with shapes in place of arrays."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from kvjax.checkpoints.orbax import abstract
from kvjax.cli.launch import MeshShape, parse_command
from kvjax.errors import UserError, whole_number
from kvjax.inference.allocation import laid_out, layout_for, sizes_of, token_bytes
from kvjax.inference.decode import decode_block
from kvjax.inference.forward import last_logits, pieces
from kvjax.inference.generate import BLOCK
from kvjax.inference.prefill import CHUNK
from kvjax.inference.sampler import make_sampler
from kvjax.inference.triggers import recurring
from kvjax.mesh import BATCH, P, batch_shards, use_mesh
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.models.loading import parameter_dtype
from kvjax.models.shapes import find_shape, fit_mesh
from kvjax.plan.ahead import Job
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.kvzap import files as kvzap
from kvjax.policies.admission.wgkv import WriteGate
from kvjax.policies.admission.wgkv.files import usual_expand
from kvjax.policies.compiled import View, compile_policy
from kvjax.policies.eviction.fast_kvzip.files import Sizes, gate_sizes
from kvjax.policies.eviction.kvzip import KVzip
from kvjax.policies.guidance import text
from kvjax.policies.make import Described, parse_policy
from kvjax.policies.registry import find_method
from kvjax.sampling_params import SamplingParams
from kvjax.struct import changed
from kvjax.train.config import parse
from kvjax.train.memory import batch_of
from kvjax.train.recipe import Recipe
from kvjax.train.update import initial_state, make_update, param_dtypes

WEIGHTS = "weights"
POOL = "KV pool"
TABLES = "page tables and states"
MAX_SIZE = 1 << 30
"""The largest number of tokens or sequences, since programs count in int32."""
TEXT = (0,) * 16
"""Token ids that stand for each of KVzip's texts. Usual tokenizers need fewer tokens."""
CHARACTERS_PER_TOKEN = 3
"""Characters of guidance in a token. Usual tokenizers have more."""
WINDOW = 256
"""WG-KV's local window, as published."""
Make = Callable[[Callable[[], Any]], Any]
"""Calls a function that makes gates, or returns the shapes of its result (`jax.eval_shape`)."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to compile."""

    function: Callable[..., Any]
    """The jitted function. It is jitted again so that it keeps unused arguments, which take memory, too."""
    arguments: tuple[Any, ...]
    """Trees of `jax.ShapeDtypeStruct` with shardings."""
    parts: dict[str, Any]
    """Trees of the arguments by the part of memory that they belong to."""
    donated: int
    """Index of the donated argument."""
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Static arguments."""
    named: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments: trees as in `arguments`."""


def mesh_of(job: Job) -> MeshShape:
    """Return the mesh of a job's command line, adapted to the model. Raises UserError if it cannot divide the model."""
    config = _parse(job)
    return fit_mesh(config.mesh, find_shape(config.model).config)


def program_of(job: Job, mesh: Mesh) -> Program:
    """Return a job's program on the current mesh."""
    config = _parse(job)
    longest = job.length + (config.new if isinstance(config, ServeConfig) else 0)
    entries = config.kv_cache_dtype if isinstance(config, ServeConfig) else None
    model = find_shape(config.model, longest, config.weights, entries)
    dtype = config.dtype or model.dtype
    if isinstance(config, Recipe):
        return update(config, model.config, dtype, mesh, job.length)
    serving = Serving(dataclasses.replace(config, context=job.length), model.config, dtype, mesh)
    return serving.prefill() if job.stage == "prefill" else serving.decode()


def _parse(job: Job) -> "Recipe | ServeConfig":
    """Return the configuration of a job's command line."""
    return parse(job.arguments) if job.stage == "train" else parse_command(ServeConfig, job.arguments)


def model_of(mesh: Mesh, config: ModelConfig, dtype: str) -> Decoder:
    """Return the shapes of a model's weights on a mesh."""
    return abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=parameter_dtype(dtype)), mesh)


def update(recipe: Recipe, config: ModelConfig, dtype: str, mesh: Mesh, length: int) -> Program:
    """Return the update of a run on sequences of `length` tokens, on the current mesh."""
    model = model_of(mesh, config, dtype)
    state = abstract(lambda model: initial_state(recipe, model), mesh, model)
    weights = None if recipe.takes_model else model
    batch = batch_of(recipe, mesh, length, model)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    parts = {
        WEIGHTS: weights,
        "trained parameters": state.params,
        "optimizer": state.opt,
        "batch": (batch, step),
    }
    function = make_update(recipe, param_dtypes(recipe, model))
    return Program(function, (state, weights, batch, step), parts, donated=0)


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """Estimate whether prefill and decoding fit a device's memory, by compiling their programs without weights."""

    topology: str | None = None
    """The chips: v5e:2x4, v6e:2x4, v5p:2x2x1 or h100:8; by default this machine's."""
    model: str = "llama-3.1-8b"
    """A folder with a config.json, a GGUF file, a hub id or a name that `kvjax.plan --help` lists."""
    mesh: MeshShape = MeshShape()
    """Devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2."""
    policy: str = "full"
    """The policy, as in kvjax.generate. Gates have their usual sizes unless the policy names a folder. wgkv admits all
    tokens unless the policy states the share, as in wgkv:rate=0.2."""
    context: int = 32768
    """Tokens of each prompt."""
    batch: int = 1
    """Sequences at a time, rounded up to a multiple of the mesh's data × fsdp."""
    new: int = 128
    """Tokens of each answer."""
    chunk: int = CHUNK
    """Prompt tokens in one call of prefill, as in `LLM`. Fewer tokens take less memory."""
    dtype: str | None = None
    """float32, bfloat16 or float16; by default the weights' dtype in config.json."""
    weights: str | None = None
    """int8 or fp8: store the layers' matrices in 8 bits; by default as in config.json."""
    kv_cache_dtype: str | None = None
    """int8: store entries in 8 bits; by default in the model's dtype."""
    search: bool = True
    """Search for the longest context that fits, by at most three more compiles of both programs; --no-search compiles
    each once."""

    def check(self) -> None:
        """Raise UserError for options out of range."""
        for name in ("context", "batch", "new", "chunk"):
            whole_number("plan", f"--{name}", getattr(self, name), most=MAX_SIZE)
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise UserError(f"--dtype must be float32, bfloat16 or float16, got {self.dtype}")


@dataclasses.dataclass(frozen=True)
class Serving:
    """Prefill and decoding of a model on the current mesh."""

    options: ServeConfig
    config: ModelConfig
    dtype: str
    mesh: Mesh

    @functools.cached_property
    def model(self) -> Decoder:
        """Shapes of the weights."""
        return model_of(self.mesh, self.config, self.dtype)

    def policy(self, make: Make = jax.eval_shape) -> Policy:
        """Return the policy. `make` makes its gates, by default as shapes."""
        return make_policy(complete_policy(self.options.policy, self.config, make))

    def view(self, name: str) -> View:
        """Return the shapes of a view of the compiled policy."""

        def make() -> View:
            policy = self.policy(lambda gates: gates())
            return getattr(
                compile_policy(policy, self.config.num_full_layers, self.config.num_kv_heads), name
            )

        return abstract(make, self.mesh)

    @property
    def batch(self) -> int:
        """Number of sequences: the option's batch, rounded up to a multiple of the mesh's batch shards."""
        shards = batch_shards()
        return -(-self.options.batch // shards) * shards

    def cache(self, policy: Policy, view: View, tokens: int, tables: int = 0) -> Any:
        """Return the shapes of a cache for sequences of `tokens` tokens.

        Args:
            policy: the policy, which determines the size of the pool.
            view: the view of the compiled policy that reads the cache.
            tokens: expected tokens of each sequence.
            tables: the most tokens of one head cache, if that is more than `tokens`.
        """
        config = self.config
        layout = layout_for(
            policy, **sizes_of(config), batch=self.batch, tokens=tokens, longest=tables, dtype=self.model.dtype,
        )  # fmt: skip
        group = config.num_heads // config.num_kv_heads
        return abstract(lambda view: laid_out(view, layout, group), self.mesh, view)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token's key and value in all layers and kv heads."""
        return token_bytes(self.config, self.model.dtype)

    def tokens_after_prompt(self, policy: Policy) -> int:
        """Return the tokens that a cache holds after the prompt: those that an eviction keeps, else the context."""
        schedule, context = policy.schedule, self.options.context
        if schedule is None:
            return context
        kept = int(schedule.allowance([context], self.entry_bytes)[0]) + 1 + schedule.needs.longest_prefix
        return min(context, kept) + (max(schedule.trigger.every, 1) if policy.compacts_answers else 0)

    def prefill(self) -> Program:
        """Return the program that reads the largest chunk of the prompts."""
        policy, options = self.policy(), self.options
        schedule = policy.schedule
        after_context = 0 if schedule is None else schedule.temporary_tokens
        view = self.view("read")
        cache = self.cache(policy, view, options.context + after_context + self._answer_tokens(policy))
        chunk = min(options.chunk, options.context)
        if schedule is not None and schedule.trigger.in_chunks:
            chunk = min(chunk, schedule.trigger.chunk)
        sizes = [size for _, size in pieces(chunk, options.chunk)]
        tokens = self._array(jnp.int32, (self.batch, max(sizes)), BATCH, None)
        valid = self._array(jnp.int32, (self.batch,), BATCH)
        arguments = self.model, view, cache, tokens, valid
        return Program(last_logits, arguments, _parts(*arguments), donated=2)

    def decode(self) -> Program:
        """Return the program that decodes a block of tokens."""
        policy, options = self.policy(), self.options
        view = self.view("decode")
        decode_policy = changed(
            policy, schedule=None, **({} if policy.compacts_answers else {"eviction": None})
        )
        # The eviction may have kept all tokens of one head.
        cache = self.cache(
            decode_policy,
            view,
            self.tokens_after_prompt(policy) + self._answer_tokens(policy),
            tables=options.context + options.new,
        )
        valid = self._array(jnp.int32, (self.batch,), BATCH)
        running = self._array(jnp.bool_, (self.batch,), BATCH)
        eos, vocabulary = self.config.eos_ids, self.config.vocab_size
        greedy = [SamplingParams()] * self.batch
        sampler = abstract(lambda: make_sampler(greedy, [0] * self.batch, eos, vocabulary), self.mesh)
        # Nothing is penalised, so no tokens are counted.
        arguments = self.model, view, cache, valid, running, sampler, self._array(jnp.int32, ()), None
        compaction = abstract(lambda cache: recurring(policy, cache), self.mesh, cache)
        return Program(
            decode_block,
            arguments,
            _parts(*arguments, compaction),
            donated=2,
            static={"count": min(BLOCK, max(1, options.new - 1))},
            named={"recurring": compaction},
        )

    def _answer_tokens(self, policy: Policy) -> int:
        """Return the answer tokens for which a cache has space in addition to the prompt.

        It is 0 if answers are compacted, since the space is then allocated when it is needed.
        """
        return 0 if policy.compacts_answers else self.options.new

    def _array(self, dtype: Any, shape: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, P(*spec)))


def _parts(model: Any, policy: Any, cache: Any, *rest: Any) -> dict[str, Any]:
    windows = {} if cache.sliding is None else {"windows of sliding layers": cache.sliding}
    return windows | {
        WEIGHTS: model,
        "policy": policy,
        POOL: cache.pages,
        TABLES: (cache.layers, cache.seen, cache.origin),
        "batch": rest,
    }


def check_serving(options: ServeConfig, config: ModelConfig) -> None:
    """Raise UserError if the options are out of range, or if the policy or the mesh do not fit the model."""
    options.check()
    fit_mesh(options.mesh, config)
    with use_mesh():
        make_policy(complete_policy(options.policy, config, jax.eval_shape)).check(config)


def complete_policy(policy: str, config: ModelConfig, make: Make) -> Described:
    """Return the policy with token ids and gates filled in where its methods need them.

    Token ids stand for the texts of kvzip, refit and guidance. Gates of wgkv, fast_kvzip and kvzap have their published
    sizes unless the policy names a folder or a file.

    Args:
        policy: the policy as on the command line.
        config: the model's config.
        make: makes the gates.

    Raises:
        UserError: the named file or folder holds no gates.
    """
    described = parse_policy(policy)
    for name, arguments in described.items():
        guidance = arguments.get("guidance", getattr(find_method(name), "guidance", ""))
        if isinstance(guidance, str) and guidance.strip():
            arguments["guidance"] = (0,) * -(-len(text(guidance)) // CHARACTERS_PER_TOKEN)
        if name in FILL_IN:
            arguments |= FILL_IN[name](arguments, config, make)
        if name != "kvzip" and "refit" in arguments:
            arguments["refit"]["reader"] = KVzip(**_kvzip_texts({}, config, make))
    return described


def _kvzip_texts(arguments: dict[str, Any], config: ModelConfig, make: Make) -> dict[str, Any]:
    return {name: TEXT for name in ("instruction", "resumption", "tail") if name not in arguments}


def _fast_kvzip_gates(arguments: dict[str, Any], config: ModelConfig, make: Make) -> dict[str, Any]:
    inputs, width = arguments.get("inputs", "hidden"), config.width
    heads = config.num_full_layers, config.num_kv_heads, config.num_heads // config.num_kv_heads
    sizes = Sizes(*heads, width if inputs == "hidden" else config.head_dim, 16, 16, "sink", inputs)
    if "gates" in arguments:
        sizes = gate_sizes(arguments["gates"])
    return {"gates": make(sizes.make), "inputs": arguments.get("inputs", sizes.inputs)}


def _wgkv_gates(arguments: dict[str, Any], config: ModelConfig, make: Make) -> dict[str, Any]:
    if "gates" in arguments:
        return {}
    heads = config.num_full_layers, config.num_kv_heads
    expand = usual_expand(config)
    gates = make(lambda: WriteGate(*heads, config.head_dim, expand=expand, rngs=nnx.Rngs(0)))
    rate = {"rate": np.full(heads, arguments["rate"])} if "rate" in arguments else {}
    return {"gates": gates, "window": arguments.get("window", WINDOW)} | rate


def _kvzap_gates(arguments: dict[str, Any], config: ModelConfig, make: Make) -> dict[str, Any]:
    if "gates" in arguments:
        return {}
    return {"gates": make(kvzap.Sizes(config.num_full_layers, config.num_kv_heads, config.width, 512).make)}


FILL_IN = {
    "kvzip": _kvzip_texts,
    "fast_kvzip": _fast_kvzip_gates,
    "wgkv": _wgkv_gates,
    "kvzap": _kvzap_gates,
    "kvzap_eviction": _kvzap_gates,
}
"""Functions that return the missing arguments of methods that need texts or gates."""
