"""Features of contexts and the scores of their tokens, by forward passes of the frozen model.

Contexts of similar length are read together, one for each batch shard of the mesh, or more if they are short. KVzip's
teacher is in `kvjax.train.reconstruction`. This module has two teachers with which Fast KVzip compares it. They take
the maximum attention that a key gets from later queries of the context, or from questions with their answers.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Float, Shaped

from kvjax.cli.shards import WHOLE, Shard
from kvjax.inference.capture import captured_layers
from kvjax.inference.prefill import prefill
from kvjax.mesh import BATCH, HEADS, P, batch_shards, on_host, put
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy
from kvjax.train.contexts import Context
from kvjax.train.features import FolderStore, MemoryStore, PositionLayout
from kvjax.train.pace import Pace
from pallas_kernels.attention_mass import attention_mass

Outputs = Sequence[dict[str, Shaped[np.ndarray, "_ _ ..."]]]
"""The arrays to fill, by context. A context without arrays is not stored."""
Teacher = Callable[[Decoder, Sequence[Context], str, Outputs], None]
"""A function that fills `input`, a gate's input (a named field of `Step`), and `score` for every token of the contexts
except their prefixes. Every batch shard has the same number of contexts."""
TOKENS_TOGETHER = 4096
"""The maximum number of context tokens that a batch shard reads at a time, unless it reads a single context."""


def position_layout(model: Decoder, which: str) -> PositionLayout:
    """Return the arrays of a position: the gates' input in the model's dtype, and the targets in float32."""
    config = model.config
    input_shape = (config.width,) if which == "hidden" else (config.num_kv_heads, config.head_dim)
    layers = config.num_full_layers
    return PositionLayout(
        {
            "input": ((layers, *input_shape), model.dtype),
            "score": ((layers, config.num_kv_heads), jnp.float32),
        }
    )


def collect(
    model: Decoder,
    contexts: Sequence[Context],
    store: MemoryStore | FolderStore,
    teacher: Teacher,
    which: str,
    share: Shard = WHOLE,
) -> None:
    """Compute the contexts of a share that the store lacks.

    Raises:
        UserError: the disk fills up. Finished contexts stay.
    """
    is_finished = np.isin(np.arange(len(contexts)), list(store.finished))
    # one process decides, since others may see the folder a moment later
    finished = set(np.flatnonzero(multihost_utils.broadcast_one_to_all(is_finished)).tolist())
    order = sorted(range(len(contexts)), key=lambda index: len(contexts[index].row))
    shards = batch_shards()
    per_shard = max(1, min(TOKENS_TOGETHER // len(contexts[order[-1]].row), -(-len(order) // shards)))
    together = shards * per_shard
    groups = list(share.of(order[start : start + together] for start in range(0, len(order), together)))
    sizes = {index: len(contexts[index].tokens) for group in groups for index in group}
    before = sum(size for index, size in sizes.items() if index in finished)
    with Pace("targets", "positions", sum(sizes.values()), before) as pace:
        for group in groups:
            missing = [index for index in group if index not in finished]
            if not missing:
                continue
            # a group that is too small repeats its last context; after a resume the groups are the same
            padded = [group[min(row, len(group) - 1)] for row in range(together)]
            with contextlib.ExitStack() as stack:
                outputs = {index: stack.enter_context(store.writing(index)) for index in missing}
                unused = [{} for _ in padded]
                arrays = [outputs.pop(index, unused[row]) for row, index in enumerate(padded)]
                teacher(model, [contexts[index] for index in padded], which, arrays)
            pace.advance(sum(sizes[index] for index in missing))
    multihost_utils.sync_global_devices("all targets are there")


def next_token(model: Decoder, contexts: Sequence[Context], which: str, outputs: Outputs) -> None:
    """Fill in the maximum attention that each key gets from later queries of the context and all heads of its group."""
    rows = [context.row for context in contexts]
    for layer, captured in enumerate(_layers(model, rows, (which, "q", "k", "lse"))):
        score = _max_attention(captured["q"], captured["k"], _mask_padding(captured["lse"], rows), offset=1)
        fill_input(contexts, outputs, captured[which][None], which, layer=layer)
        fill_score(contexts, outputs, layer, score)


def answer(model: Decoder, contexts: Sequence[Context], which: str, outputs: Outputs) -> None:
    """Fill in the maximum attention that each key of the context gets from questions with their answers. Each question
    is read by itself after the context."""
    rows = [context.row for context in contexts]
    keys: list[np.ndarray] = []
    for layer, captured in enumerate(_layers(model, rows, dict.fromkeys((which, "k")))):
        keys.append(captured["k"])
        fill_input(contexts, outputs, captured[which][None], which, layer=layer)
    cache, best = prefill(model, rows, policy=Policy()), [np.zeros(x.shape[:3], np.float32) for x in keys]
    for turn in range(max(len(context.questions) for context in contexts)):
        # a context without further questions gets its last one again, which changes no maximum
        questions = [context.questions[min(turn, len(context.questions) - 1)] for context in contexts]
        for layer, captured in enumerate(_layers(model, questions, ("q", "lse"), cache)):
            score = _max_attention(
                captured["q"], keys[layer], _mask_padding(captured["lse"], questions), offset=None
            )
            best[layer] = np.maximum(best[layer], score)
    for layer, score in enumerate(best):
        fill_score(contexts, outputs, layer, score)


def larger(first: Teacher, second: Teacher) -> Teacher:
    """Return a teacher that fills in the larger score of two teachers."""

    def teach(model: Decoder, contexts: Sequence[Context], which: str, outputs: Outputs) -> None:
        first(model, contexts, which, outputs)
        others = [{name: np.zeros_like(x) for name, x in arrays.items()} for arrays in outputs]
        second(model, contexts, which, others)
        for arrays, other in zip(outputs, others, strict=True):
            if arrays:
                np.maximum(arrays["score"], other["score"], out=arrays["score"])

    return teach


def _layers(
    model: Decoder, rows: Sequence[Any], names: Any, cache: Any = None
) -> Iterator[dict[str, Shaped[np.ndarray, "b ..."]]]:
    return captured_layers(model, Policy(), cache, rows, tuple(names))


def _mask_padding(lse: Float[np.ndarray, "b n t"], rows: Sequence[Any]) -> Float[np.ndarray, "b n t"]:
    """Return log-sum-exps with −inf for the queries of padding, so that their attention does not count."""
    real = np.arange(lse.shape[-1]) < np.array([len(row) for row in rows])[:, None, None]
    return np.where(real, lse, -np.inf)


def _max_attention(
    q: Float[np.ndarray, "b n t h"],
    k: Float[np.ndarray, "b k s h"],
    lse: Float[np.ndarray, "b n t"],
    *,
    offset: int | None,
) -> Float[np.ndarray, "b k s"]:
    """Return the maximum attention that each key gets from any query. Rows are split over the batch shards, and heads
    over the head shards."""
    placed = [put(x, BATCH, HEADS) for x in (q, k, lse)]
    return on_host(_local_max_attention(*placed, offset=offset))


@functools.partial(jax.jit, static_argnames="offset")
def _local_max_attention(
    q: Float[Array, "b n t h"], k: Float[Array, "b k s h"], lse: Float[Array, "b n t"], *, offset: int | None
) -> Float[Array, "b k s"]:
    heads = P(BATCH, HEADS)
    local = functools.partial(attention_mass, over="max", group="max", offset=offset)
    call = jax.shard_map(
        lambda q, k, lse: local(q, k, lse=lse), in_specs=(heads, heads, heads), out_specs=heads
    )
    return call(q, k, lse)


def fill_input(
    contexts: Sequence[Context],
    outputs: Outputs,
    captured: Shaped[np.ndarray, "l b ..."],
    which: str,
    *,
    layer: int = 0,
    start: int = 0,
) -> None:
    """Fill in captured inputs: those of consecutive layers from `layer` on, and of consecutive tokens of the rows from
    `start` on."""
    captured = captured if which == "hidden" else captured.swapaxes(2, 3)
    layers = slice(layer, layer + len(captured))
    for row, (context, arrays) in enumerate(zip(contexts, outputs, strict=True)):
        first = start - len(context.prefix)  # index among the context's own tokens
        stop = min(first + captured.shape[2], len(context.tokens))
        if arrays and stop > max(first, 0):
            values = captured[:, row, max(-first, 0) : stop - first]
            arrays["input"][max(first, 0) : stop, layers] = values.swapaxes(0, 1)


def fill_score(
    contexts: Sequence[Context], outputs: Outputs, layer: int, score: Float[np.ndarray, "b k t"]
) -> None:
    """Fill in one layer's scores of whole rows."""
    for row, (context, arrays) in enumerate(zip(contexts, outputs, strict=True)):
        first = len(context.prefix)
        if arrays:
            arrays["score"][:, layer] = score[row, :, first : first + len(context.tokens)].T
