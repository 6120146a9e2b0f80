"""`python -m pallas_kernels.bench.static_tpu FOLDER CHIP [OP ...]`: bundles of the kernels' inner tiles, a row a line.

In a process of its own, with `ahead.ENVIRONMENT` and `bundles.flags(FOLDER)` in its environment. Every op has a rival:
splash attention's kernels on tiles of the same 512 × 512 logits; the cycles that 512 keys take from HBM; XLA's own
program.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from pallas_kernels.ahead import compile_for_tpu
from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.bench.bundles import Kernel, Tile, read
from pallas_kernels.bench.cycles import estimated_cycles
from pallas_kernels.mlstm import mlstm, tpu
from pallas_kernels.mlstm.tpu_chunk import CHUNK
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.running_topk import running_topk
from pallas_kernels.vertical_slash import vertical_slash

S, H, N, HEADS = 4096, 128, 8, 2
WINDOW = 256
TILE = 512
"""Rows and keys of a tile of logits: `vertical_slash`'s four heads of 128 queries."""
PAGED_KEYS = 1024
"""Keys of a block of `paged_decode`, whose arithmetic is one run of bundles."""
BYTES_A_SECOND = {"v5e": 819e9, "v6e": 1640e9}
CYCLES_A_SECOND = {"v5e": 1.5e9, "v6e": 1.75e9}
TOPK = 8192
XLA_CHUNK = 512
"""Of `mlstm` in XLA: of 64 to 512 the one of least cycles."""

Shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
Q, K = Shape((1, N, S, H)), Shape((1, HEADS, S, H))


class Compiler:
    """Compiles for a chip and finds what was dumped meanwhile."""

    def __init__(self, chip: str, folder: Path):
        self.chip, self.folder = chip, folder

    def __call__(self, function: Callable, *args: Any) -> tuple[Callable[[str], Kernel], Any]:
        """The kernels by name, until the next is compiled, and the compiled program."""
        for path in self.folder.iterdir():
            path.unlink()
        compiled = compile_for_tpu(self.chip, function, *args)
        return functools.partial(read, self.folder), compiled

    def row(self, op: str, tile: Tile, rival: str, of_rival: Tile, compiled: Any) -> dict[str, Any]:
        return {
            "op": op,
            "chip": self.chip,
            "bundles": tile.bundles,
            "rival": rival,
            "rival_bundles": of_rival.bundles,
            "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
            "spills": tile.spills,
            "rival_spills": of_rival.spills,
        }


def from_memory(chip: str) -> Tile:
    """The cycles in which 512 keys and their values come from HBM."""
    return Tile(round(TILE * 2 * H * 2 / BYTES_A_SECOND[chip] * CYCLES_A_SECOND[chip]), 0)


def attend(q, k, v, end):
    return vertical_slash(q, k, v, end, window=WINDOW, implementation="tpu")


def gradient(attention, *args, of=range(3)):
    def loss(*args):
        return jnp.sum(attention(*args)[0].astype(jnp.float32))

    return jax.grad(loss, tuple(of))(*args)


def splash_attention(kind: Callable, q, k, v):
    sizes = splash.BlockSizes(
        **dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), TILE),
        **dict.fromkeys(("block_kv", "block_kv_dkv", "block_kv_dq"), TILE),
        **dict.fromkeys(("block_kv_compute", "block_kv_dkv_compute"), TILE),
    )
    mask = splash_mask.MultiHeadMask([kind((S, S))] * N)
    return splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)(q, k, v)


def vertical_slash_rows(compile: Compiler) -> Iterator[dict]:
    end = jax.ShapeDtypeStruct((1, HEADS, S), jnp.int32)
    forward, program = compile(attend, Q, K, K, end)
    ours = {"forward": (forward("vertical_slash"), program)}
    # with what a turn takes that fills a block, which only as many do as keys are kept
    turn = Tile(forward("far_list").loop(depth=1, turns=1), 0)
    yield compile.row(
        f"vertical_slash, far list, {TILE} keys", turn, "HBM", from_memory(compile.chip), program
    )
    backward, program = compile(functools.partial(gradient, attend), Q, K, K, end)
    ours |= {kind: (backward(f"vertical_slash_{kind}"), program) for kind in ("dq", "dkv")}
    one = Shape((N, S, H))
    for tile, mask, pick in (("full", splash_mask.FullMask, min), ("masked", splash_mask.CausalMask, max)):
        rival = functools.partial(splash_attention, mask)
        kernels, _ = compile(
            lambda *args, rival=rival: gradient(lambda *x: (rival(*x),), *args), one, one, one
        )
        for kind, (kernel, program) in ours.items():
            name = "fwd" if kind == "forward" else kind
            (of_splash,) = kernels(f"splash_mha_{name}").tiles()
            op = f"vertical_slash {kind}, {tile} tile"
            yield compile.row(op, pick(kernel.tiles()), "splash attention", of_splash, program)


def paged_decode_rows(compile: Compiler) -> Iterator[dict]:
    """What 512 keys take: the arithmetic of half a block, and beginning the copies of their pages."""
    keys, b, heads = 8192, 8, 8
    for group in (4, 8):
        for page in (16, 64, 128):
            kernels, program = compile(
                functools.partial(paged_decode, implementation="tpu"),
                Shape((b, heads * group, 1, H)),
                Shape((b * heads * keys // page, page, 2 * H)),
                jax.ShapeDtypeStruct((b, heads, keys // page), jnp.int32),
                jax.ShapeDtypeStruct((b, heads), jnp.int32),
            )
            kernel = kernels("paged_decode")
            bundles, spills = map(sum, zip(*kernel.tiles(), strict=True))
            bundles = bundles * TILE / PAGED_KEYS + kernel.copying() * TILE / page
            op = f"paged_decode, {TILE} keys, {group} query heads, page {page}"
            yield compile.row(op, Tile(round(bundles), spills), "HBM", from_memory(compile.chip), program)


def attention_mass_rows(compile: Compiler) -> Iterator[dict]:
    def ours(q, k, lse):
        return attention_mass(
            q, k, over="logsumexp", group="max", offset=WINDOW, lse=lse, implementation="tpu"
        )

    def dense(q, k, lse):
        x = jnp.einsum("sh,th->st", k, q, preferred_element_type=jnp.float32) * H**-0.5 - lse
        return jax.nn.logsumexp(x, 1)

    lse = jax.ShapeDtypeStruct((1, N, S), jnp.float32)
    kernels, program = compile(ours, Q, K, lse)
    tiles = sorted(kernels("attention_mass").tiles())
    one = Shape((S, H))
    _, rival = compile(dense, one, one, jax.ShapeDtypeStruct((S,), jnp.float32))
    cycles = Tile(estimated_cycles(rival.as_text()) * TILE**2 // S**2, 0)
    for name, tile in zip(("full", "masked"), tiles, strict=True):
        yield compile.row(f"attention_mass, {name} tile", tile, "XLA, dense", cycles, program)


def running_topk_rows(compile: Compiler) -> Iterator[dict]:
    """A key that enters the tree, which passes every level twice; XLA's form treats all keys alike."""

    def op(implementation, rank):
        return running_topk(rank, k=TOPK // 4, window=WINDOW, implementation=implementation)

    rank = jax.ShapeDtypeStruct((1, HEADS, TOPK), jnp.int32)
    kernels, program = compile(functools.partial(op, "tpu"), rank)
    bundles = kernels("running_topk").loop(depth=2, turns=TOPK.bit_length())
    _, rival = compile(functools.partial(op, "xla"), rank)
    cycles = estimated_cycles(rival.as_text()) // rank.size
    yield compile.row(f"running_topk, a key of {TOPK}", Tile(bundles, 0), "XLA", Tile(cycles, 0), program)


def mlstm_rows(compile: Compiler) -> Iterator[dict]:
    """Cycles of the whole program, as KVPOP trains: XLA's by its own estimate, and the kernels' bundles."""
    heads, s = 8, 8192
    wide, flat = (1, heads, s), jax.ShapeDtypeStruct((1, heads, s), jnp.float32)
    args = *(jax.ShapeDtypeStruct((*wide, x), jnp.float32) for x in (H, H, H // 2)), flat, flat

    def forward(*args, **options):
        return mlstm(*args, **options)[0]

    def backward(*args, **options):
        return gradient(lambda *args: (forward(*args, **options),), *args, of=range(5))

    blocks = heads * s // (CHUNK * tpu.BLOCK)
    for op, call, passes in (("forward", forward, 1), ("forward and backward", backward, 2)):
        _, rival = compile(functools.partial(call, implementation="xla", chunk=XLA_CHUNK), *args)
        kernels, program = compile(functools.partial(call, implementation="tpu"), *args)
        kernels = [kernels(f"mlstm_{x}") for x in ("forward", "backward")[:passes]]
        bundles = blocks * sum(x.loop(depth=1, turns=1) for x in kernels)
        spills = sum(x.spills for kernel in kernels for x in kernel.bundles)
        ours = Tile(bundles + estimated_cycles(program.as_text()), spills)
        of_rival = Tile(estimated_cycles(rival.as_text()), 0)
        name = f"mlstm {op}, {heads} heads of {s} tokens"
        yield compile.row(name, ours, f"XLA, chunks of {XLA_CHUNK}", of_rival, program)


OPS = {
    "vertical_slash": vertical_slash_rows,
    "paged_decode": paged_decode_rows,
    "attention_mass": attention_mass_rows,
    "running_topk": running_topk_rows,
    "mlstm": mlstm_rows,
}


def main(folder: str, chip: str, *ops: str) -> None:
    compile = Compiler(chip, Path(folder))
    for op in ops or OPS:
        for row in OPS[op](compile):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
