"""What a run reads before its first update, as programs of shapes alone: its longest context piece by piece, and the
passes of KVzip over it (`kvjax.train.reconstruction`)."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from kvjax.exported.orbax import abstract
from kvjax.inference.forward import bucket
from kvjax.inference.reread import Spans, one_pass
from kvjax.inference.room import laid_out, layout_for, narrowed
from kvjax.mesh import BATCH, P, batch_shards
from kvjax.models.config import ModelConfig
from kvjax.plan.program import Program
from kvjax.plan.serving import POOL, TABLES
from kvjax.plan.training import WEIGHTS, model_of
from kvjax.policies import Policy, Ratio
from kvjax.policies.eviction.kvzip import KVzip
from kvjax.train.reconstruction import PIECE, read_piece

ASKING = 64
"""Tokens before a context, and as many that ask for a part of it: more than the published texts have."""
STAGES = {"read": "a piece of each", "repeat": "a pass over each"}
"""Of what a step is."""


def targets(which: str, config: ModelConfig, dtype: str, mesh: Mesh, length: int, stage: str) -> Program:
    """One of `STAGES` of contexts of `length` tokens, one for each batch shard of the current mesh, of which `which` is
    captured."""
    model, rows, tokens = model_of(mesh, config, dtype), batch_shards(), length + ASKING
    # of their tokens only the number matters, and of that what it is padded to
    method = KVzip(instruction=(0,), resumption=(0,), prefix=ASKING)
    policy = narrowed(Policy(eviction=method, budget=Ratio(1.0)), tokens)
    layout = layout_for(
        policy, batch=rows, layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        tokens=tokens, dtype=model.embed.dtype,
    )  # fmt: skip
    group = config.num_heads // config.num_kv_heads

    def made():
        placed = policy.placed(config.num_layers, config.num_kv_heads)
        return placed.reading, placed.traced.eviction, laid_out(placed.traced, layout, group)

    reading, eviction, cache = abstract(made, mesh)

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        spec = P(BATCH, *[None] * (len(shape) - 1))
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, spec))

    tokens = PIECE if stage == "read" else bucket(method.repeated + ASKING)
    spans = abstract(lambda: Spans(*[jnp.zeros(rows, jnp.int32, out_sharding=P(BATCH))] * 3), mesh)
    batch = array(rows, tokens), array(rows), *(() if stage == "read" else (spans,))
    methods = (reading,) if stage == "read" else (reading, eviction)
    parts = [
        (WEIGHTS, model),
        ("policy", methods),
        (POOL, cache.pages),
        (TABLES, (cache.layers, cache.seen)),
        ("batch", batch),
    ]
    arguments = model, *methods, cache, *batch
    if stage == "read":
        return Program(read_piece, arguments, parts, donated=2, static={"which": which})
    static = {"first": bucket(ASKING), "implementation": None}
    return Program(one_pass, arguments, parts, donated=3, static=static)
