"""`python -m tests.ahead.compile_programs tpu|gpu [all]`: compile kvjax's own programs for four v5e chips or four
H100s that are not here, with fsdp 2 × tensor 2. The programs are training, prefill, decode, forks and compaction at
head_dim 128. `all` adds decoding with counts and selection, decoding with compactions, training with fsdp 2 × sequence
2, and, at head_dim 64, all programs except training and decoding with compactions.

It prints a line of JSON for each program: its name, its kernels, the bytes of its temporaries, and the bytes of each
copy of more than 8 MiB. One device's pool is 2 GiB, which is more than any vector memory, because XLA does not count
copies in vector memory as temporaries. The process must have the environment `pallas_kernels.ahead.ENVIRONMENT`.
"""

import dataclasses
import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax.cache import Layout, Quota, entry_bytes
from kvjax.checkpoints.orbax import abstract
from kvjax.inference.allocation import copy_shared_pages, laid_out, page_size_of
from kvjax.inference.compaction import compact
from kvjax.inference.decode import Recurring, decode_block
from kvjax.inference.forward import last_logits
from kvjax.inference.sampler import make_sampler
from kvjax.mesh import BATCH, HEADS, SHARDS, make_mesh
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.wgkv import WGKV, WriteGate
from kvjax.policies.compiled import compile_policy
from kvjax.policies.eviction.fast_kvzip import SinkGate
from kvjax.sampling_params import SamplingParams
from kvjax.train.recipes.wgkv import WriteGates
from kvjax.train.update import initial_state, make_update
from pallas_kernels.ahead import H100, TPUS
from tests.ahead.hlo import exchanged
from tests.pallas_kernels.compile_cases import copies

POOL = 2 << 30
HEAD_DIMS = 64, 128
TRAINED = 128
"""The only head_dim at which training and decoding with compactions are compiled, since training compiles slowly."""
SPLIT = "training, tokens split"
"""The name of training on a mesh that splits tokens in place of heads."""
BATCH_SIZE = 8
WAITING = 1024
"""Number of tokens whose hidden states wait for their scores. A device's share is 16 MiB, so a copy would be
noticed."""
DTYPE = jnp.dtype(jnp.bfloat16)
"""The dtype of the entries, of the arrays that hold them, and of bounds."""


def config(head_dim):
    return ModelConfig(
        vocab_size=512, num_layers=4, width=512, mlp_width=1024, num_heads=16, num_kv_heads=4, head_dim=head_dim,
        qk_norm=True, tied=True, model_type="qwen3",
    )  # fmt: skip


def shape(mesh, dtype, size, *spec):
    return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, P(*spec)))


def wgkv_policy(config, **sizes):
    gates = WriteGate(config.num_layers, config.num_kv_heads, config.head_dim, rngs=nnx.Rngs(0), **sizes)
    heads = jnp.zeros((config.num_layers, config.num_kv_heads), out_sharding=P(None, HEADS))
    return Policy(WGKV(gates, jnp.zeros(config.num_layers), heads), window=256)


def wgkv(config):
    return compile_policy(wgkv_policy(config), config.num_layers, config.num_kv_heads).read


def fast_kvzip(config):
    group = config.num_heads // config.num_kv_heads
    sizes = config.num_layers, config.num_kv_heads, group, config.width
    gates = SinkGate(*sizes, rngs=nnx.Rngs(0))
    policy = make_policy(
        {"fast_kvzip": {"buffer": WAITING, "entries": 2048, "when": "position"}}, gates=gates
    )
    return compile_policy(policy, config.num_layers, config.num_kv_heads).decode


def programs(mesh, config, which="all"):
    """Yield each program as its name and the `(jitted, arguments, options)` to lower."""
    model = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    row = functools.partial(shape, mesh)
    if config.head_dim == TRAINED:
        train = WriteGates(window=256, sequences=10)
        state = jax.eval_shape(functools.partial(initial_state, train), model)
        tokens = row(jnp.int32, (2, 2048), BATCH, None)
        yield "training", make_update(train), (state, model, tokens, row(jnp.int32, ())), {}

    view = jax.eval_shape(functools.partial(wgkv, config))

    def empty(view, tokens, int8=False):
        page = page_size_of(view, None, int8=int8)
        pages = POOL // (page * entry_bytes(config.head_dim, DTYPE, int8=int8))
        layout = Layout(
            batch=BATCH_SIZE, layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            window=view.window, tokens=tokens, page_size=page, pages=pages, dtype=DTYPE, stored=DTYPE,
            bounds=None if view.selection is None else DTYPE,
            metadata=tuple((name, jnp.dtype(dtype)) for name, dtype in view.metadata.items()), int8=int8,
        )  # fmt: skip
        return jax.eval_shape(
            lambda view: laid_out(view, layout, config.num_heads // config.num_kv_heads), view
        )

    cache = empty(view, 65536)
    chunk, valid = row(jnp.int32, (BATCH_SIZE, 1024), BATCH, None), row(jnp.int32, (BATCH_SIZE,), BATCH)
    yield "prefill", last_logits, (model, view, cache, chunk, valid), {}

    greedy, eos = [SamplingParams()] * BATCH_SIZE, config.eos_ids
    sampler = abstract(lambda: make_sampler(greedy, [0] * BATCH_SIZE, eos, config.vocab_size), mesh)
    running = row(jnp.bool_, (BATCH_SIZE,), BATCH)
    arguments = model, view, cache, valid, running, sampler, row(jnp.int32, ())
    yield "decode", decode_block, arguments, {"count": 8}
    int8 = model, view, empty(view, 65536, int8=True), *arguments[3:]
    yield "decode, int8 entries", decode_block, int8, {"count": 8}

    page_counts = shape(mesh, jnp.int32, cache.pages.pool.shape[:1], SHARDS)
    shared = dataclasses.replace(cache, pages=dataclasses.replace(cache.pages, others=page_counts))
    yield "forks", copy_shared_pages, (shared, False), {}

    per_layer = row(jnp.int32, (config.num_layers, BATCH_SIZE, 1), None, BATCH, None)
    quota = Quota(
        due=running, count=per_layer, pinned=per_layer,
        since=row(jnp.int32, cache.layers.length.shape, None, BATCH, HEADS),
        dropped=valid, undecided=valid, last=valid, first=valid, floor=row(jnp.float32, ()),
    )  # fmt: skip
    evicting = make_policy("snapkv:ratio=0.25,adakv").compile(model)
    yield (
        "compaction",
        compact,
        (model, evicting.compact, empty(evicting.read, 4096), quota),
        {"entries": 4096, "over": "layer", "ties": "first", "causal": True},
    )
    if which == "few":
        return

    h2o = "h2o:entries=1024,when=every,every=64+quest:tokens=256"
    busy = jax.eval_shape(lambda: make_policy(h2o).compile(model).decode)
    cache = empty(busy, 4096)
    arguments = model, busy, cache, *arguments[3:]
    yield "decode, counts and selection", decode_block, arguments, {"count": 8}

    if config.head_dim == TRAINED:
        gated = jax.eval_shape(functools.partial(fast_kvzip, config))
        options = {"recurring": Recurring(quota, row(jnp.int32, ()), over="model", ties="in")}
        arguments = model, gated, empty(gated, 4096), *arguments[3:]
        yield "decode, compactions", decode_block, arguments, {"count": 8} | options


def kernels(program: str) -> set[str]:
    """Return the names of the Pallas kernels in an optimised program."""
    calls = re.findall(r'custom_call_target="(?:tpu_custom_call|__gpu\$xla.gpu.triton)".*', program)
    named = {re.findall(r'op_name="[^"]*?/(\w+)/pallas_call"', call)[0] for call in calls}
    # Calls of Mosaic GPU have no name. Prefill's kernel is the only one that is chosen by default.
    return named | ({"vertical_slash_hopper"} if 'custom_call_target="mosaic_gpu' in program else set())


CHIPS = {
    "tpu": {"platform": "tpu", "topology_name": TPUS["v5e"]},
    "gpu": {"platform": "cuda", "target_config": H100, "topology": "1x1x4"},
}


def main(platform, which="few"):
    devices = topologies.get_topology_desc(**CHIPS[platform]).devices

    def report(name, program, arguments, options):
        traced = program.trace(*arguments, **options)
        compiled = traced.lower(lowering_platforms=(CHIPS[platform]["platform"],)).compile()
        text = compiled.as_text()
        line = {
            "program": name,
            "kernels": sorted(kernels(text)),
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
            "large_copies": [size for size in copies(text) if size > 8 << 20],
            "exchanges": {kind: count for (kind, unit), count in exchanged(text).items() if unit == "count"},
        }
        print(json.dumps(line), flush=True)

    if which == "all":
        mesh = make_mesh(fsdp=2, sequence=2, devices=devices)
        with jax.set_mesh(mesh):
            _, *training = next(programs(mesh, config(TRAINED)))
            report(SPLIT, *training)
    mesh = make_mesh(fsdp=2, tensor=2, devices=devices)
    with jax.set_mesh(mesh):
        for head_dim in HEAD_DIMS if which == "all" else (TRAINED,):
            for name, *others in programs(mesh, config(head_dim), which):
                report(f"{name}, head_dim {head_dim}", *others)


if __name__ == "__main__":
    main(*sys.argv[1:])
