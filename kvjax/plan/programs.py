"""Training's update, prefill and decoding as programs of shapes, as `kvjax.train` and `kvjax.inference` run them."""

import dataclasses
import functools
import itertools
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
from kvjax.inference.eviction import recurring
from kvjax.inference.forward import last_logits, pieces
from kvjax.inference.generate import BLOCK
from kvjax.inference.prefill import CHUNK
from kvjax.inference.sampler import make_sampler
from kvjax.mesh import BATCH, P, batch_shards, use_mesh
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.models.loading import parameter_dtype
from kvjax.models.shapes import find_shape, fit_mesh
from kvjax.plan.ahead import Job
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.kvzap import files as kvzap
from kvjax.policies.admission.wgkv import WriteGate
from kvjax.policies.compiled import View, compile_policy
from kvjax.policies.eviction.fast_kvzip.files import Sizes, gate_sizes
from kvjax.policies.guidance import text
from kvjax.policies.make import Described, parse_policy
from kvjax.policies.registry import find_method
from kvjax.sampling_params import SamplingParams
from kvjax.struct import changed
from kvjax.train.config import parse
from kvjax.train.memory import batch_of
from kvjax.train.recipe import Recipe
from kvjax.train.update import first_state, make_update, param_dtypes

WEIGHTS = "weights"
POOL = "KV pool"
TABLES = "page tables and states"
MOST = 1 << 30
"""The largest size: programs count in int32."""
TEXT = (0,) * 16
"""Token ids in place of each of KVzip's texts, which usual tokenizers write in fewer tokens."""
LETTERS = 3
"""Letters in a token of guidance: fewer than in usual tokenizers'."""
WINDOW = 256
"""WG-KV's local window, as published."""
Make = Callable[[Callable[[], Any]], Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to compile."""

    function: Callable[..., Any]
    """The function, already jitted. It is jitted anew, with arguments that it does not read, since they take memory,
    too."""
    arguments: tuple[Any, ...]
    """Trees of `jax.ShapeDtypeStruct` with shardings."""
    parts: dict[str, Any]
    """The arguments' trees, by the part of memory that they belong to."""
    donated: int
    """Index of the argument whose memory is taken over."""
    static: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments that are compiled in."""
    named: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments by name, of the same kind as `arguments`."""


def mesh_of(job: Job) -> MeshShape:
    """Return the mesh that a job's command line names, as its model uses it. Raises UserError if it does not divide the
    model."""
    told = _told(job)
    return fit_mesh(told.mesh, find_shape(told.model).config)


def program_of(job: Job, mesh: Mesh) -> Program:
    """Return a job's program on the current mesh."""
    told = _told(job)
    longest = job.length + (told.new if isinstance(told, ServeConfig) else 0)
    entries = told.kv_cache_dtype if isinstance(told, ServeConfig) else None
    model = find_shape(told.model, longest, told.weights, entries)
    dtype = told.dtype or model.dtype
    if isinstance(told, Recipe):
        return update(told, model.config, dtype, mesh, job.length, job.phase)
    serving = Serving(dataclasses.replace(told, context=job.length), model.config, dtype, mesh)
    return serving.prefill() if job.stage == "prefill" else serving.decode()


def _told(job: Job) -> "Recipe | ServeConfig":
    return parse(job.arguments) if job.stage == "train" else parse_command(ServeConfig, job.arguments)


def model_of(mesh: Mesh, config: ModelConfig, dtype: str) -> Decoder:
    """Return the shapes of a model's weights on a mesh."""
    return abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=parameter_dtype(dtype)), mesh)


def update(
    recipe: Recipe, config: ModelConfig, dtype: str, mesh: Mesh, length: int, phase: int = 0
) -> Program:
    """Return the update of one of the run's phases on sequences of `length` tokens, on the current mesh."""
    phases = tuple(recipe.phases())
    model = model_of(mesh, config, dtype)
    dtypes = param_dtypes(phases, model)
    state = abstract(lambda model: first_state(phases, dtypes, model, phase), mesh, model)
    own = phases[phase]
    ends = [0, *itertools.accumulate(each.steps for each in phases)]
    read = None if recipe.takes_model else model
    batch = batch_of(own, mesh, length, model)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    parts = {
        WEIGHTS: read,
        "trained parameters": state.params,
        "optimizer": state.opt,
        "held": state.constants,
        "batch": (batch, step),
    }
    function = make_update(own, dtypes[phase], before=ends[phase])
    return Program(function, (state, read, batch, step), parts, donated=0)


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """Say whether prefill and decoding fit a device's memory, from the programs compiled without weights."""

    topology: str | None = None
    """The chips: v5e:2x4, v6e:2x4, v5p:2x2x1 or h100:8; by default this machine's."""
    model: str = "llama-3.1-8b"
    """A folder with a config.json, a GGUF file, a hub id or a name that `kvjax.plan --help` lists."""
    mesh: MeshShape = MeshShape()
    """Devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2."""
    policy: str = "full"
    """The policy, as in kvjax.generate. Gates have their usual sizes unless the policy names a folder, and token ids
    stand in place of texts. wgkv admits every token unless the policy states the share, wgkv:rate=0.2."""
    context: int = 32768
    """Tokens of each prompt."""
    batch: int = 1
    """Sequences at a time, rounded up to a multiple of the mesh's data × fsdp."""
    new: int = 128
    """Tokens of each answer."""
    chunk: int = CHUNK
    """Prompt tokens in one call of prefill, as in `LLM`: fewer take less memory."""
    dtype: str | None = None
    """float32, bfloat16 or float16; by default the weights' dtype in config.json."""
    weights: str | None = None
    """int8 or fp8: the layers' matrices in 8 bits; by default as config.json has them."""
    kv_cache_dtype: str | None = None
    """int8: entries in 8 bits; by default in the model's dtype."""
    search: bool = True
    """Search for the longest context that fits, by at most three more compiles of both programs; --no-search compiles
    each once."""

    def check(self) -> None:
        """Refuse numbers that mean nothing. Raises UserError."""
        for name in ("context", "batch", "new", "chunk"):
            whole_number("plan", f"--{name}", getattr(self, name), most=MOST)
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise UserError(f"--dtype must be float32, bfloat16 or float16, got {self.dtype}")


@dataclasses.dataclass(frozen=True)
class Serving:
    """Prefill and decoding of a model on the current mesh."""

    told: ServeConfig
    config: ModelConfig
    dtype: str
    mesh: Mesh

    @functools.cached_property
    def model(self) -> Decoder:
        """Shapes of the weights."""
        return model_of(self.mesh, self.config, self.dtype)

    def policy(self, make: Make = jax.eval_shape) -> Policy:
        """Return the policy as the host knows it. `make` makes its gates, by default as shapes."""
        return make_policy(completed(self.told.policy, self.config, make))

    def view(self, name: str) -> View:
        """Return the shapes of a view of the compiled policy."""

        def make() -> View:
            policy = self.policy(lambda gates: gates())
            return getattr(
                compile_policy(policy, self.config.num_full_layers, self.config.num_kv_heads), name
            )

        return abstract(make, self.mesh)

    @property
    def rows(self) -> int:
        """Number of sequences of the batch on this mesh."""
        shards = batch_shards()
        return -(-self.told.batch // shards) * shards

    def cache(self, policy: Policy, view: View, tokens: int, tables: int = 0) -> Any:
        """Return the shapes of a cache for sequences of `tokens` tokens, with a pool for what the host's `policy`
        expects. tables: tokens that one head cache may have, if these are more."""
        config = self.config
        layout = layout_for(
            policy, **sizes_of(config), batch=self.rows, tokens=tokens, longest=tables, dtype=self.model.dtype,
        )  # fmt: skip
        group = config.num_heads // config.num_kv_heads
        return abstract(lambda view: laid_out(view, layout, group), self.mesh, view)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token's key and value in all layers and kv heads."""
        return token_bytes(self.config, self.model.dtype)

    def kept(self, policy: Policy) -> int:
        """Return the tokens that a cache after the prompt has places for: what an eviction leaves, else the context."""
        schedule, context = policy.schedule, self.told.context
        if schedule is None:
            return context
        left = int(schedule.allowance([context], self.entry_bytes)[0]) + 1 + schedule.needs.longest_prefix
        return min(context, left) + (max(schedule.trigger.every, 1) if policy.compacts_answers else 0)

    def prefill(self) -> Program:
        """Return the call that reads the largest chunk of the prompts."""
        policy, told = self.policy(), self.told
        schedule = policy.schedule
        behind = 0 if schedule is None else schedule.temporary_tokens
        view = self.view("read")
        cache = self.cache(policy, view, told.context + behind + self._room(policy))
        chunk = min(told.chunk, told.context)
        if schedule is not None and schedule.trigger.in_chunks:
            chunk = min(chunk, schedule.trigger.chunk)
        sizes = [size for _, size in pieces(chunk, told.chunk)]
        tokens = self._array(jnp.int32, (self.rows, max(sizes)), BATCH, None)
        valid = self._array(jnp.int32, (self.rows,), BATCH)
        arguments = self.model, view, cache, tokens, valid
        return Program(last_logits, arguments, _parts(*arguments), donated=2)

    def decode(self) -> Program:
        """Return a block of decoded tokens."""
        policy, told = self.policy(), self.told
        view = self.view("decode")
        later = changed(policy, schedule=None, **({} if policy.compacts_answers else {"eviction": None}))
        # the eviction may have kept one head cache whole
        cache = self.cache(
            later,
            view,
            self.kept(policy) + self._room(policy),
            tables=told.context + told.new,
        )
        valid = self._array(jnp.int32, (self.rows,), BATCH)
        running = self._array(jnp.bool_, (self.rows,), BATCH)
        eos, vocabulary = self.config.eos_ids, self.config.vocab_size
        greedy = [SamplingParams()] * self.rows
        sampler = abstract(lambda: make_sampler(greedy, [0] * self.rows, eos, vocabulary), self.mesh)
        # no tokens are counted: nothing is penalised
        arguments = self.model, view, cache, valid, running, sampler, self._array(jnp.int32, ()), None
        again = abstract(lambda cache: recurring(policy, cache), self.mesh, cache)
        return Program(
            decode_block,
            arguments,
            _parts(*arguments, again),
            donated=2,
            static={"count": min(BLOCK, max(1, told.new - 1))},
            named={"recurring": again},
        )

    def _room(self, policy: Policy) -> int:
        """Return the tokens of an answer that a cache has places for beside the prompt, or what is left of it: none
        where answers are compacted, since the places are then made when they are needed."""
        return 0 if policy.compacts_answers else self.told.new

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


def check_serving(told: ServeConfig, config: ModelConfig) -> None:
    """Refuse a policy and a mesh that do not go with the model, before anything compiles. Raises UserError."""
    told.check()
    fit_mesh(told.mesh, config)
    with use_mesh():
        make_policy(completed(told.policy, config, jax.eval_shape)).check(config)


def completed(policy: str, config: ModelConfig, make: Make) -> Described:
    """Return the policy with everything that its methods need in addition to numbers: token ids for the texts of kvzip
    and of guidance, and gates for wgkv, fast_kvzip and kvzap, of the published sizes unless a folder or a file of
    gates is named.

    Args:
        make: makes gates by a function without arguments.

    Raises:
        UserError: files that hold no gates.
    """
    found = parse_policy(policy)
    for name, arguments in found.items():
        guidance = arguments.get("guidance", getattr(find_method(name), "guidance", ""))
        if isinstance(guidance, str) and guidance.strip():
            arguments["guidance"] = (0,) * -(-len(text(guidance)) // LETTERS)
        if name in BESIDE:
            arguments |= BESIDE[name](arguments, config, make)
    return found


def _texts(given: dict[str, Any], config: ModelConfig, make: Make) -> dict[str, Any]:
    return {name: TEXT for name in ("instruction", "resumption", "tail") if name not in given}


def _sink_gates(given: dict[str, Any], config: ModelConfig, make: Make) -> dict[str, Any]:
    inputs, width = given.get("inputs", "hidden"), config.width
    heads = config.num_full_layers, config.num_kv_heads, config.num_heads // config.num_kv_heads
    sizes = Sizes(*heads, width if inputs == "hidden" else config.head_dim, 16, 16, "sink", inputs)
    if "gates" in given:
        sizes = gate_sizes(given["gates"])
    return {"gates": make(sizes.make), "inputs": given.get("inputs", sizes.inputs)}


def _write_gates(given: dict[str, Any], config: ModelConfig, make: Make) -> dict[str, Any]:
    if "gates" in given:
        return {}
    heads, expand = (
        (config.num_full_layers, config.num_kv_heads),
        1.5 if config.model_type == "qwen3" else 4.0,
    )
    gates = make(lambda: WriteGate(*heads, config.head_dim, expand=expand, rngs=nnx.Rngs(0)))
    rate = {"rate": np.full(heads, given["rate"])} if "rate" in given else {}
    return {"gates": gates, "window": given.get("window", WINDOW)} | rate


def _surrogates(given: dict[str, Any], config: ModelConfig, make: Make) -> dict[str, Any]:
    if "gates" in given:
        return {}
    return {"gates": make(kvzap.Sizes(config.num_full_layers, config.num_kv_heads, config.width, 512).make)}


BESIDE = {
    "kvzip": _texts,
    "fast_kvzip": _sink_gates,
    "wgkv": _write_gates,
    "kvzap": _surrogates,
    "kvzap_eviction": _surrogates,
}
"""Methods that need more than numbers, and the functions that make it from the arguments that are given."""
