"""`python -m pallas_kernels.bench.static_tpu FOLDER CHIP [OP ...]`: bundles of the kernels' inner tiles, a row a line.

In a process of its own, with `ahead.ENVIRONMENT` and `bundles.flags(FOLDER)` in its environment. Every op has a rival:
splash attention's kernels at the block size at which they take the least bundles, a tile of them as 512 × 512 logits;
the cycles that keys take from HBM; XLA's own program. "Whole" is all that is issued for the same, with waits, branches
and copies, as the difference of two runs of the program.
"""

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from pallas_kernels.ahead import compile_for_tpu, tpu_mesh
from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.bench import ragged
from pallas_kernels.bench.bundles import Kernel, Tile, read
from pallas_kernels.bench.cycles import estimated_cycles, issued_cycles
from pallas_kernels.bench.running_topk import SHARE
from pallas_kernels.mlstm import mlstm, tpu
from pallas_kernels.mlstm.tpu_chunk import CHUNK
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_decode.tpu import EIGHTHS
from pallas_kernels.running_topk import running_topk
from pallas_kernels.vertical_slash import vertical_slash
from pallas_kernels.vertical_slash.key_lists import FOREVER
from pallas_kernels.vertical_slash.tpu_backward import blocks_of_gradient
from pallas_kernels.vertical_slash.tpu_gather import rows_at_once
from pallas_kernels.vertical_slash.tpu_walk import Blocks, blocks_of

H, N, HEADS = 128, 32, 8
T, S = 2048, 1 << 16
"""Queries and keys: of so many that they stand in HBM, where nobody would look for them in vector memory."""
SQUARE = 1 << 14
"""Of both, for the gradient of keys."""
WINDOW = 256
TILE = 512
"""Rows and keys of a tile of logits, which others are measured in."""
SPLASH = 512, 1024, 2048
"""Its block sizes that are tried."""
DENSE, PARTIAL = 2, 1
"""What splash attention calls a block without a mask, and one with."""
PAGED_KEYS = 1024
"""Keys of a block of `paged_decode`."""
SHORT = 300
"""Entries of a short row."""
BATCH, LONG = 8, 1 << 14
"""Of `paged_decode`, and entries of a long row."""
RIVAL_GROUP = 4
"""Query heads of a kv head where vLLM's kernel is beside ours."""
BYTES_A_SECOND = {"v5e": 819e9, "v6e": 1638e9}
CYCLES_A_SECOND = {"v5e": 1.5e9, "v6e": 1.75e9}
TOPK = 8192
COUNTED = 1 << 13, 1 << 17, 1 << 20
"""Keys of a row of `running_topk`."""
XLA_CHUNK = 512
"""Of `mlstm` in XLA: of 64 to 512 the one of least cycles."""

Shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
Q, K = Shape((1, N, T, H)), Shape((1, HEADS, S, H))


class Counted(NamedTuple):
    """What something takes."""

    tile: Tile
    """Its arithmetic."""
    whole: float | None
    """All that is issued for it; None: the same, or not counted."""
    program: Any
    """The compiled program."""


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

    def row(self, op: str, rival: str, ours: Counted, theirs: Counted) -> dict[str, Any]:
        return {
            "op": op,
            "chip": self.chip,
            "bundles": ours.tile.bundles,
            "whole": None if ours.whole is None else round(ours.whole),
            "rival": rival,
            "rival_bundles": theirs.tile.bundles,
            "rival_whole": None if theirs.whole is None else round(theirs.whole),
            "temp_bytes": ours.program.memory_analysis().temp_size_in_bytes,
            "spills": ours.tile.spills,
            "rival_spills": theirs.tile.spills,
        }


def from_memory(chip: str, keys: int = TILE) -> Counted:
    """The cycles in which keys and their values come from HBM."""
    return Counted(
        Tile(round(keys * 2 * H * 2 / BYTES_A_SECOND[chip] * CYCLES_A_SECOND[chip]), 0), None, None
    )


def for_scalars(table: np.ndarray) -> np.ndarray:
    """A kernel's operand `[r m n]`, m at most 4 and n at most 128, as it lies in tiles of memory."""
    return np.pad(table, ((0, 0), (0, 4 - table.shape[1]), (0, 128 - table.shape[2])))


def attend(q, k, v, end):
    return vertical_slash(q, k, v, end, window=WINDOW, implementation="tpu")


def gradient(attention, *args, of=range(3)):
    def loss(*args):
        return jnp.sum(attention(*args)[0].astype(jnp.float32))

    return jax.grad(loss, tuple(of))(*args)


def splash_attention(kind: Callable, size: int):
    """With blocks of `size`, of one query head for each of `HEADS`."""
    sizes = splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_kv_compute=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_kv_dkv_compute=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    mask = splash_mask.MultiHeadMask([kind((SQUARE, SQUARE))] * HEADS)
    return splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)


def best_splash(compile: Compiler, mask: Callable, block: int) -> dict[str, Counted]:
    """By kernel what 512 × 512 logits take at the block size at which that is least."""
    found: dict[str, Counted] = {}
    least: dict[str, float] = {}
    one = Shape((HEADS, SQUARE, H))
    for size in SPLASH:

        def attention(*x, size=size):
            return (splash_attention(mask, size)(*x),)

        try:
            kernels, program = compile(functools.partial(gradient, attention), one, one, one)
        except jax.errors.JaxRuntimeError:
            continue  # its blocks are too large for vector memory
        # a byte for each block: which to bring next, which may always be the first, and what it is
        blocks = {0: np.zeros(SQUARE, np.int32), 1: np.full(SQUARE, block * 0x01010101, np.int32)}
        for name in ("fwd", "dq", "dkv"):
            kernel = kernels(f"splash_mha_{name}")
            whole = kernel.issued(blocks) / (HEADS * (SQUARE // TILE) ** 2)
            if whole >= least.get(name, math.inf):
                continue
            least[name] = whole
            found[name] = Counted(_share(max(kernel.tiles()), TILE**2 / size**2), whole, program)
    return found


def _share(tile: Tile, share: float) -> Tile:
    return Tile(round(tile.bundles * share), round(tile.spills * share))


def rows_of(chip: str) -> int:
    """How many kv heads a kernel walks at a time."""
    with jax.set_mesh(tpu_mesh(chip)):
        return rows_at_once(jax.ShapeDtypeStruct((HEADS, S, H), K.dtype))


def walked(kernel: Kernel, program: Any, blocks: Blocks, rows: int) -> dict[str, Counted]:
    """Of a kernel that walks far tiles of as many rows, what 512 × 512 logits take without and with a mask."""
    n = T // blocks.queries

    def issued(full: int, begun: int) -> int:
        table = np.tile(np.array([[0], [full], [begun], [0]], np.int32), (rows, 1, n))
        return kernel.issued({0: np.zeros(128, np.int32), 1: for_scalars(table)})

    share = TILE**2 / (N // HEADS * blocks.queries * blocks.keys)
    found = {}
    for kind, pick, full in (("full", min, FOREVER), ("masked", max, 0)):
        whole = (issued(full, 9) - issued(full, 1)) / (8 * rows * n)
        found[kind] = Counted(_share(pick(kernel.tiles()), share), whole * share, program)
    return found


def gone_over(kernel: Kernel, program: Any, blocks: Blocks) -> dict[str, Counted]:
    """Of the kernel that goes over the queries of each tile of keys, the same."""
    first = np.arange(SQUARE // blocks.keys // 2) * blocks.keys

    def issued(ready: int, turns: int) -> int:
        table = np.zeros((HEADS, 3, SQUARE // blocks.keys), np.int32)
        table[:, 0], table[:, 1] = ready, FOREVER
        table[:, 2, : len(first)] = first + turns * blocks.queries
        return kernel.issued({0: for_scalars(table)})

    share = TILE**2 / (N // HEADS * blocks.queries * blocks.keys)
    found = {}
    for kind, pick, ready in (("full", min, 0), ("masked", max, FOREVER)):
        whole = (issued(ready, 9) - issued(ready, 1)) / (8 * HEADS * len(first))
        found[kind] = Counted(_share(pick(kernel.tiles()), share), whole * share, program)
    return found


@functools.cache
def forward_pass(compile: Compiler) -> tuple[dict[str, Counted], Counted]:
    """Its tiles, and a turn of the far list's loop. Compiled once: what is compiled again is not dumped again."""
    end = jax.ShapeDtypeStruct((1, HEADS, S), jnp.int32)
    kernels, program = compile(attend, Q, K, K, end)
    blocks = blocks_of(N // HEADS, T, S, Q.dtype)
    tiles = walked(kernels("vertical_slash"), program, blocks, rows_of(compile.chip))
    # with what a turn takes that fills a block, which only as many do as keys are kept
    turn = Tile(kernels("far_list").loop(depth=1, turns=1), 0)
    return tiles, Counted(turn, None, program)


def vertical_slash_rows(compile: Compiler) -> Iterator[dict]:
    group, square = N // HEADS, Shape((1, HEADS, SQUARE, H))
    end, square_end = (jax.ShapeDtypeStruct((1, HEADS, x), jnp.int32) for x in (S, SQUARE))
    rows = rows_of(compile.chip)
    tiles, turn = forward_pass(compile)
    ours = {"forward": tiles}
    yield compile.row(f"vertical_slash, far list, {TILE} keys", "HBM", turn, from_memory(compile.chip))
    kernels, program = compile(functools.partial(gradient, attend), Q, K, K, end)
    with jax.set_mesh(tpu_mesh(compile.chip)):
        blocks = blocks_of_gradient(group, T, S, Q.dtype)
    ours["dq"] = walked(kernels("vertical_slash_dq"), program, blocks, rows)
    q = Shape((1, N, SQUARE, H))
    kernels, program = compile(functools.partial(gradient, attend), q, square, square, square_end)
    ours["dkv"] = gone_over(kernels("vertical_slash_dkv"), program, blocks)
    for kind, mask, block in (
        ("full", splash_mask.FullMask, DENSE),
        ("masked", splash_mask.CausalMask, PARTIAL),
    ):
        rivals = best_splash(compile, mask, block)
        for name, counted in ours.items():
            rival = rivals["fwd" if name == "forward" else name]
            yield compile.row(f"vertical_slash {name}, {kind} tile", "splash attention", counted[kind], rival)


def in_all(issued: Callable[[int], int]) -> tuple[float, float]:
    """What is issued of decoding for 512 keys in the middle of a long row, and for a row of 300."""
    half, whole, short = (issued(x) / (BATCH * HEADS) for x in (LONG // 2, LONG, SHORT))
    return (whole - half) / (LONG // 2 // TILE), short


def paged_decode_rows(compile: Compiler) -> Iterator[dict]:
    """What 512 keys take in the middle of a long row, and a row of 300."""
    rows = BATCH * HEADS

    def lengths(length: int) -> dict[int, np.ndarray]:
        return {0: np.zeros(128, np.int32), 1: np.where(np.arange(128) < rows, length, 0).astype(np.int32)}

    for group in (4, 8):
        for page in (16, 64, 128):
            kernels, program = compile(
                functools.partial(paged_decode, implementation="tpu"),
                Shape((BATCH, HEADS * group, 1, H)),
                Shape((rows * LONG // page, page, 2 * H)),
                jax.ShapeDtypeStruct((BATCH, HEADS, LONG // page), jnp.int32),
                jax.ShapeDtypeStruct((BATCH, HEADS), jnp.int32),
            )
            kernel = kernels("paged_decode")
            middle, short = in_all(lambda x, kernel=kernel: kernel.issued(lengths(x)))
            # a full block's run of bundles, which starts the copies of another, comes first
            spills = sum(tile.spills for tile in kernel.tiles())
            run = Tile(round(kernel.tiles()[0].bundles * TILE / PAGED_KEYS), spills)
            # the others are for parts of a block, of which a short row takes the second
            part = Tile(sorted(kernel.tiles()[1:])[-len(EIGHTHS) + 1].bundles, spills)
            ours = Counted(run, middle, program), Counted(part, short, program)
            rivals = {"HBM": tuple(from_memory(compile.chip, x) for x in (TILE, SHORT))}
            if group == RIVAL_GROUP and ragged.installed():
                for name, heads in (("apart", 1), ("together", HEADS)):
                    rivals[f"vLLM, heads {name}"] = vllm(compile, heads, page, ragged.BLOCKS[name])
            names = tuple(f"paged_decode, {x}" for x in (f"{TILE} keys", f"a row of {SHORT}"))
            for rival, theirs in rivals.items():
                for name, mine, other in zip(names, ours, theirs, strict=True):
                    yield compile.row(f"{name}, {group} query heads, page {page}", rival, mine, other)


def vllm(compile: Compiler, heads: int, page: int, blocks: tuple[int, ...]) -> tuple[Counted, ...]:
    """The same of vLLM's kernel, `heads` of a sequence together, each at the best of the block sizes."""
    sequences, pages = BATCH * HEADS // heads, LONG // page
    found = []
    for block in blocks:
        call, args = ragged.decoding(compile.chip, sequences, heads, RIVAL_GROUP, H, page, LONG, block)
        kernels, program = compile(call, *args)
        kernel = kernels(ragged.NAME)
        (tile,) = kernel.tiles()  # a block of all heads
        middle, short = in_all(lambda x, kernel=kernel: kernel.issued(ragged.operands(sequences, pages, x)))
        long = Counted(_share(tile, TILE / block / heads), middle, program)
        found.append((long, Counted(_share(tile, 1 / heads), short, program)))
    return tuple(min(x, key=lambda counted: counted.whole or math.inf) for x in zip(*found, strict=True))


def attention_mass_rows(compile: Compiler) -> Iterator[dict]:
    def ours(q, k, lse):
        return attention_mass(
            q, k, over="logsumexp", group="max", offset=WINDOW, lse=lse, implementation="tpu"
        )

    def dense(q, k, lse):
        x = jnp.einsum("sh,th->st", k, q, preferred_element_type=jnp.float32) * H**-0.5 - lse
        return jax.nn.logsumexp(x, 1)

    s, group = 4096, N // HEADS
    lse = jax.ShapeDtypeStruct((1, group, s), jnp.float32)
    kernels, program = compile(ours, Shape((1, group, s, H)), Shape((1, 1, s, H)), lse)
    tiles = sorted(kernels("attention_mass").tiles())
    one = Shape((s, H))
    _, rival = compile(dense, one, one, jax.ShapeDtypeStruct((s,), jnp.float32))
    cycles = Tile(estimated_cycles(rival.as_text()) * TILE**2 // s**2, 0)
    for name, tile in zip(("full", "masked"), tiles, strict=True):
        counted = Counted(tile, None, program)
        yield compile.row(f"attention_mass, {name} tile", "XLA, dense", counted, Counted(cycles, None, None))


def running_topk_rows(compile: Compiler) -> Iterator[dict]:
    """What a key takes: one that enters the tree, which passes every level twice; of counts all are treated alike."""

    def op(implementation, k, rank):
        return running_topk(rank, k=k, window=WINDOW, implementation=implementation)

    rank = jax.ShapeDtypeStruct((1, HEADS, TOPK), jnp.int32)
    kernels, program = compile(functools.partial(op, "tpu", TOPK // 4), rank)
    bundles = kernels("running_topk").loop(depth=2, turns=TOPK.bit_length())
    _, rival = compile(functools.partial(op, "xla", TOPK // 4), rank)
    cycles = estimated_cycles(rival.as_text()) // rank.size
    ours, theirs = Counted(Tile(bundles, 0), None, program), Counted(Tile(cycles, 0), None, None)
    yield compile.row(f"running_topk, a key of {TOPK}", "XLA", ours, theirs)

    tile = forward_pass(compile)[0]["full"].whole
    assert tile is not None
    for s in COUNTED:
        rank = jax.ShapeDtypeStruct((1, HEADS, s), jnp.int32)
        _, program = compile(functools.partial(op, "counts", s // 4), rank)
        issued = Tile(round(issued_cycles(program.as_text(), compile.folder) / rank.size), 0)
        # every query head's logits, half of which are seen
        may = Tile(round(tile * N / HEADS * s / 2 / TILE**2 / SHARE), 0)
        rival = f"1/{SHARE} of dense attention"
        yield compile.row(
            f"running_topk in counts, a key of {s}",
            rival,
            Counted(issued, None, program),
            Counted(may, None, None),
        )


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
        ours = Counted(Tile(bundles + estimated_cycles(program.as_text()), spills), None, program)
        theirs = Counted(Tile(estimated_cycles(rival.as_text()), 0), None, None)
        name = f"mlstm {op}, {heads} heads of {s} tokens"
        yield compile.row(name, f"XLA, chunks of {XLA_CHUNK}", ours, theirs)


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
