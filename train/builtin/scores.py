"""The scores of the built-in model, with full attention and with one full kv head, and its model card."""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

import kvjax
from kvjax.models.decoder import SPLIT, Decoder, positions_of, scan_layers
from kvjax.tasks import Copy, Needle, Recall, Text, Tokens, Vocabulary, pack

BuiltInTask = Recall | Needle | Copy | Text
Judged = tuple[jax.Array, jax.Array]
"""The cross-entropy in nats of each token but the first, and True if it is the likeliest. Both are [b, t - 1]."""


def cross_entropy(model: Decoder, tokens: jax.Array) -> Judged:
    return judged(model, model.hidden(tokens), tokens)


def judged(model: Decoder, hidden: jax.Array, tokens: jax.Array) -> Judged:
    logits, targets = model.logits(hidden)[:, :-1], tokens[:, 1:]
    chosen = jnp.sum(logits * jax.nn.one_hot(targets, logits.shape[-1]), -1)
    return jax.nn.logsumexp(logits, -1) - chosen, jnp.argmax(logits, -1) == targets


def score(
    model: Decoder,
    task: BuiltInTask,
    length: int,
    samples: int,
    judge: Callable[..., Judged] | None = None,
) -> dict[str, float]:
    """Return the share of answer tokens that are the likeliest, by kind of question and in all. For text return bits
    per byte.

    A sample is a context of `length` tokens, followed by its questions one after another.
    """
    judge = judge or jax.jit(cross_entropy)
    right: dict[str, list[bool]] = {}
    nats, n_bytes = 0.0, 0
    for first in range(10_000, 10_000 + samples, 4):
        group = [task.sample(seed, length) for seed in range(first, first + 4)]
        question_tokens = sum(len(question) for question in group[0].questions[1:])
        rows = [pack(sample, length + question_tokens, task.vocabulary.end) for sample in group]
        tokens, weights = np.stack([row for row, _ in rows]), np.stack([row for _, row in rows])
        loss, likeliest = map(np.asarray, judge(model, tokens))
        nats += float(loss.sum())
        n_bytes += task.vocabulary.bytes_of(tokens)
        for row, sample in enumerate(group):
            kinds = [question.kind for question in sample.questions for _ in question.answer]
            for kind, is_right in zip(kinds, likeliest[row][weights[row, 1:] > 0], strict=True):
                right.setdefault(kind, []).append(bool(is_right))
    if isinstance(task, Text):
        return {"bits per byte": nats / math.log(2) / n_bytes}
    by_kind = (
        {kind: float(np.mean(answers)) for kind, answers in sorted(right.items())} if len(right) > 1 else {}
    )
    return by_kind | {"all": float(np.mean([is_right for answers in right.values() for is_right in answers]))}


def one_full_head(
    model: Decoder, tokens: jax.Array, full: jax.Array, sink: int = 4, window: int = 16
) -> Judged:
    """Return the `cross_entropy` if only the kv heads that are True in `full` [l k] see more than sink and window."""

    def local(q, k, v, full):
        position = jnp.arange(q.shape[2])
        distance = position[:, None] - position
        near = (distance < window) | (position < sink)
        seen = (distance >= 0) & (near | full[:, None, None])
        grouped = rearrange(q, "b (k g) t h -> b k g t h", k=k.shape[1])
        logits = jnp.einsum("bkgth,bksh->bkgts", grouped, k) / math.sqrt(q.shape[-1])
        probabilities = jax.nn.softmax(jnp.where(seen[:, None], logits, -1e30), -1)
        return rearrange(jnp.einsum("bkgts,bksh->bkgth", probabilities, v), "b k g t h -> b (k g) t h")

    def attend(step, carry, full):
        return jax.shard_map(local, out_specs=SPLIT)(step.q, step.k, step.v, full), carry, None

    x, full = model.embed_tokens(tokens), reshard(full, P(None, "tensor"))
    x, *_ = scan_layers(model, x, positions_of(tokens), attend, xs=full)
    return judged(model, model.norm(x), tokens)


def best_single_head(model: Decoder, task: BuiltInTask, length: int, samples: int) -> tuple[str, float]:
    """Return the kv head that answers most of a task if only this head has full attention, and its share of answers."""
    judge = jax.jit(one_full_head)
    shape = model.config.num_layers, model.config.num_kv_heads
    shares = {}
    for layer, head in np.ndindex(shape):
        only_this_head = np.zeros(shape, bool)
        only_this_head[layer, head] = True
        only = partial(judge, full=only_this_head)
        shares[f"layer {layer} head {head}"] = score(model, task, length, samples, only)["all"]
    return max(shares.items(), key=lambda item: item[1])


def model_card(
    model: Decoder, vocabulary: Vocabulary, text: Tokens, training: str, length: int = 1024
) -> str:
    """Return the model card: the model's size, training, structured initial weights and scores on `text`."""
    c = model.config
    tasks = {kind.name: kind(vocabulary, text) for kind in (Recall, Needle, Copy, Text)}
    scores = []
    for name, task in tasks.items():
        parts = [f"{part} {value:.3f}" for part, value in score(model, task, length, 48).items()]
        scores.append(f"| {name} | {', '.join(parts)} |")
    alone = []
    for name in ("recall", "needle", "copy"):
        head, share = best_single_head(model, tasks[name], length, 16)
        alone.append(f"| {name} | {share:.3f} | {head} |")
    n_weights = sum(leaf.size for leaf in jax.tree.leaves(model)) / 1e6
    sizes = f"{c.num_layers} layers, width {c.width}, MLP {c.mlp_width}, {c.num_heads} query and"
    heads = f"{c.num_kv_heads} kv heads of {c.head_dim}"
    return CARD.format(
        kind=f"A plain Qwen3 of {n_weights:.2f} million parameters ({model.dtype.name}): {sizes}\n{heads}",
        vocabulary=c.vocab_size,
        training=training,
        length=length,
        version=kvjax.__version__,
        scores="\n".join(scores),
        alone="\n".join(alone),
    )


CARD = """\
# The built-in model

{kind}, RoPE base 1e7, QK-norm, tied embeddings, a vocabulary of {vocabulary}.
It exists so that methods for the KV cache can be trained and compared anywhere in minutes. It is not an assistant:
it knows Python source and a few tasks.

## How it was made

`python -m train.builtin`, from nothing but the standard library's source text and seeded tasks
(`kvjax/tasks`): {training}
The tokenizer is a byte-level BPE trained on the same text.

**Structured initial weights.** The architecture is a plain Qwen3, but some heads do not start from random weights
(`train/builtin/weights.py`). In layer 0 the kv heads start as copies of the tokens 0 to 3 places back, in parts of the
residual stream to which nothing else writes. Later kv heads start as matchers. One matcher serves each type of question
about a record; for other tokens it attends to the current token. In the full-size model two more matchers continue
passages; at questions about records they attend to the current token. The queries and keys of the record matchers
are fixed, except for the margin by which the right key wins, which is set after training (`settle_margins` in that
file). Their values and outputs, and all other weights, are trained. Without this start, lookup does not form at this
size. How retrieval is spread over the heads is therefore a choice and not a finding: no single head answers a task.

## What it scores

The table has the share of answer tokens that are right, by type of question (recall) or depth (needle), and bits per
byte of plain text. Contexts are {length} tokens of held-out files of the standard library, read with full attention.
The figures of this card were recorded by kvjax {version}.

| task | score |
|---|---|
{scores}

If only one kv head has full attention and all others have 4 sinks and a window of 16, the best single head answers:

| task | share right | which |
|---|---|---|
{alone}

## Text

`heldout.txt` in the folder above holds files of the Python standard library, © Python Software Foundation, under the
PSF License Agreement. Neither the model nor the tokenizer was trained on them.
"""
