"""`python -m tests.ahead.ledger v5e|v6e|h100 [wide]`: count the kernels and writes of a decoded token in one layer.

It compiles `decode_block` for one chip that is not here, with a full cache, with WG-KV, and with SnapKV after its
compaction, for 1 and 8 sequences. The model has small widths; with `wide` it has those of Llama-3.1-8B, and an H100
also gets 32 sequences. It prints a line of JSON for each program: the kernels (operations on a TPU) that a layer
launches per token, the bytes that they write, the bytes among these that are only sliced out of a stack, the program's
temporaries, and the seconds that compiling took. The process must have the environment
`pallas_kernels.ahead.ENVIRONMENT`.
"""

import functools
import json
import sys
import time

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

from kvjax.cache import Layout
from kvjax.checkpoints.orbax import abstract
from kvjax.inference.allocation import laid_out
from kvjax.inference.decode import decode_block
from kvjax.inference.sampler import make_sampler
from kvjax.mesh import BATCH, P, make_mesh
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from pallas_kernels.ahead import H100, TPUS
from tests.ahead.compile_programs import wgkv_policy
from tests.ahead.hlo import launched

CHIPS = {
    **{name: ("tpu", {"platform": "tpu", "topology_name": TPUS[name]}) for name in ("v5e", "v6e")},
    "h100": ("cuda", {"platform": "cuda", "target_config": H100, "topology": "1x1x1"}),
}
SMALL = {"width": 1024, "mlp_width": 2048, "num_heads": 8, "num_kv_heads": 2, "num_layers": 3}
WIDE = {"width": 4096, "mlp_width": 14336, "num_heads": 32, "num_kv_heads": 8, "num_layers": 4}
PAGE, KEPT, TOKENS = 64, 0.25, 8
POLICIES = "full", "wgkv", "snapkv"
DTYPE = jnp.dtype(jnp.bfloat16)


def policy_of(name, config):
    if name == "wgkv":
        return wgkv_policy(config, expand=1.5)
    return make_policy({"full": "full", "snapkv": "snapkv:ratio=0.25"}[name])


def decoding(mesh, sizes, policy, batch):
    """Return the arguments of `decode_block` as shapes."""
    config = ModelConfig(
        vocab_size=512,
        head_dim=128,
        qk_norm=True,
        tied=True,
        model_type="qwen3",
        max_position=1 << 17,
        **sizes,
    )
    model = abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=DTYPE), mesh)
    view = abstract(lambda: policy_of(policy, config).compile(model).decode, mesh)
    context = 1 << 17 if batch == 1 else 1 << 15
    heads = batch * config.num_layers * config.num_kv_heads
    kept = context if policy == "full" else int(context * KEPT)
    layout = Layout(
        batch=batch, layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        window=view.window, tokens=context, page_size=PAGE, pages=heads * (kept // PAGE + -(-view.window // PAGE) + 1),
        dtype=DTYPE, stored=DTYPE, bounds=None, metadata=(),
    )  # fmt: skip
    cache = abstract(lambda view: laid_out(view, layout, config.num_heads // config.num_kv_heads), mesh, view)
    sampler = abstract(
        lambda: make_sampler([SamplingParams()] * batch, [0] * batch, (), config.vocab_size), mesh
    )
    row = functools.partial(jax.ShapeDtypeStruct, (batch,), sharding=jax.NamedSharding(mesh, P(BATCH)))
    drawn = jax.ShapeDtypeStruct((), jnp.int32, sharding=jax.NamedSharding(mesh, P()))
    return model, view, cache, row(jnp.int32), row(jnp.bool_), sampler, drawn


def main(chip, wide=""):
    platform, topology = CHIPS[chip]
    mesh = make_mesh(devices=topologies.get_topology_desc(**topology).devices[:1])
    sizes = WIDE if wide else SMALL
    with jax.set_mesh(mesh):
        for policy in POLICIES:
            for batch in (1, 8, 32) if wide and chip == "h100" else (1, 8):
                arguments, start = decoding(mesh, sizes, policy, batch), time.perf_counter()
                traced = decode_block.trace(*arguments, count=TOKENS)
                compiled = traced.lower(lowering_platforms=(platform,)).compile()
                seconds = time.perf_counter() - start
                inside = [
                    x for x in launched(compiled.as_text()) if x.loops[-2:] == (TOKENS, sizes["num_layers"])
                ]
                line = {
                    "policy": policy,
                    "batch": batch,
                    "kernels": len(inside),
                    "written": sum(x.written for x in inside),
                    "sliced": sum(x.written for x in inside if x.sliced and x.written > 1 << 16),
                    "temporaries": compiled.memory_analysis().temp_size_in_bytes,
                    "seconds": round(seconds, 1),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
