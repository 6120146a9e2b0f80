"""The slots: answers that are decoded together, a block of tokens at a time.

The host looks at a block's tokens while the next block runs. If an answer has a constraint, it looks first, since the
constraint depends on the last token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.engine.pages import PageCounts
from kvjax.engine.pool import HostSequence, Pool, SlotSizes
from kvjax.engine.request import FinishReason, Request
from kvjax.engine.rows import Row
from kvjax.engine.samplers import InSlots, constrained, logprobs_of, sampler_of
from kvjax.inference.decode import decode_block, first_tokens
from kvjax.inference.sampler import Counts, Logprobs, Sampler
from kvjax.inference.triggers import recurring
from kvjax.mesh import BATCH, on_host, put
from kvjax.models.decoder import Decoder
from kvjax.policies.compiled import CompiledPolicy


class Paused(NamedTuple):
    """An answer whose sequence is in host memory."""

    request: Request
    sequence: HostSequence


class _Block(NamedTuple):
    """A block that was sent to the devices and that the host has not looked at yet."""

    requests: InSlots
    """The requests that ran, with their slots."""
    drawn: tuple[Array, Logprobs | None]
    tokens: int
    """The number of the block's first tokens that were decoded."""
    sizes: SlotSizes


class Slots:
    """The answers that are being decoded, in the slots of a pool."""

    def __init__(self, model: Decoder, policy: CompiledPolicy, pool: Pool, block: int):
        self._model, self._policy, self._pool, self._block_tokens = model, policy, pool, block
        self._recurring = recurring(policy.host, pool.slots())
        layout = pool.layout
        self._count = layout.batch
        self._requests: list[Request | None] = [None] * self._count
        self._token: Int[Array, " b"] = put(np.zeros(self._count, np.int32), BATCH)
        self._running: Bool[Array, " b"] = put(np.zeros(self._count, bool), BATCH)
        self._sampler: Sampler | None = None
        self._token_counts: Counts | None = None
        self._block: _Block | None = None
        # lengths as of the last block that was looked at
        self.length = np.zeros((layout.layers, self._count, layout.kv_heads), np.int64)
        """Retained entries of each head cache."""
        self.seen = np.zeros(self._count, np.int64)
        """Tokens of each sequence."""
        self._origin = np.zeros(self._count, np.int64)
        self._made = np.zeros(self._count, np.int32)

    @property
    def running(self) -> InSlots:
        """The answers, with their slots."""
        return [(slot, request) for slot, request in enumerate(self._requests) if request is not None]

    @property
    def busy(self) -> bool:
        """True while there is an answer, or a block that the host has not looked at."""
        return self._block is not None or any(self._requests)

    @property
    def constrained(self) -> bool:
        """True if an answer has a constraint."""
        return any(request.constraint is not None for _, request in self.running)

    @property
    def vacant(self) -> list[int]:
        """The slots without an answer."""
        return [slot for slot, request in enumerate(self._requests) if request is None]

    @property
    def counted(self) -> Int[np.ndarray, " b"]:
        """Tokens of each sequence that its window counts (`Cache.counted`)."""
        return self.seen - self._origin

    def tokens_to_come(self, tokens: int) -> Int[np.ndarray, " b"]:
        """Return how many tokens beyond `seen` each slot may have once the block that is on its way is done and each
        running slot has decoded `tokens` more."""
        to_come = np.zeros(self._count, np.int64)
        for slot, _ in self.running:
            to_come[slot] = tokens
        for slot, request in () if self._block is None else self._block.requests:
            if self._requests[slot] is request:
                to_come[slot] += self._block.tokens  # pyright: ignore[reportOptionalMemberAccess]
        return to_come

    def held(self, page_counts: PageCounts, slot: int) -> int:
        """Return the most pages that a slot's sequence may have after the block that is on its way."""
        length, counted = self.length[:, [slot]], self.counted[[slot]]
        growth = page_counts.growth(length, counted, self.tokens_to_come(0)[[slot]])
        return page_counts.held(length, counted) + growth

    # ---- coming and going

    def begin(self, request: Request, row: Row, logits: Array) -> None:
        """Draw the first token after the prompt that a sequence has read, and put the sequence into a slot."""
        vocabulary = self._model.config.vocab_size
        sampler, counts = sampler_of(self._model.config, [(0, request)], 1)
        sampler = constrained(sampler, [(0, request)], vocabulary)
        token, logprobs, _, _ = first_tokens(sampler, logits, put(np.ones(1, bool), BATCH), counts)
        request.extend([int(token[0])], logprobs_of(request, jax.tree.map(lambda x: x[None], logprobs), 0, 1))
        if request.finish_reason is None:
            self.join(request, row)
            return
        # a stop text may have ended it, and the answer then has no last token to continue from
        length, seen, counted = map(on_host, (row.layers.length, row.seen, row.counted))
        local = min(int(counted[0]), self._pool.layout.window - 1)
        request.end(request.finish_reason, length, local, int(seen[0]))
        self._pool.release(row)

    def join(self, request: Request, row: Row) -> None:
        """Put a sequence into a vacant slot, where its answer continues after its last token."""
        self.look_at_block()
        slot = self.vacant[0]
        self._pool.put(slot, row)
        self._token = self._with(self._token, slot, request.tokens[-1])
        self._running = self._with(self._running, slot, True)
        self._requests[slot], self._made[slot] = request, len(request.tokens)
        self.length[:, slot] = on_host(row.layers.length)[:, 0]
        self.seen[slot], self._origin[slot] = int(on_host(row.seen)[0]), int(on_host(row.origin)[0])
        self._sampler, self._token_counts = sampler_of(self._model.config, self.running, self._count)

    def end(self, slot: int, reason: FinishReason) -> None:
        """End the answer of a slot, and free its pages."""
        request = self._requests[slot]
        assert request is not None
        local = min(int(self.counted[slot]), self._pool.layout.window - 1)
        request.end(reason, self.length[:, slot], local, int(self.seen[slot]))
        self._clear(slot)

    def pause(self, slot: int) -> Paused:
        """Copy the sequence of a slot to host memory, and free its pages."""
        request = self._requests[slot]
        assert request is not None
        paused = Paused(request, self._pool.copy_out(slot))
        self._clear(slot)
        return paused

    def _clear(self, slot: int) -> None:
        self._pool.clear(slot)
        self._running = self._with(self._running, slot, False)
        self._requests[slot] = None
        self.length[:, slot], self.seen[slot], self._origin[slot], self._made[slot] = 0, 0, 0, 0

    def _with(self, x: Array, slot: int, value: int) -> Array:
        """Return the slots' numbers `x` [b] with `value` for this slot."""
        return jnp.where(put(np.arange(self._count) == slot, BATCH), np.asarray(value, x.dtype), x)

    # ---- blocks

    def decode(self, count: int) -> None:
        """Decode `count` more tokens of all answers, and look at those of the previous block."""
        if self.constrained:
            self.look_at_block()
            count = min(count, 1)
        previous, self._block = self._block, None
        if self.running:
            self._block = self._send(count)
        if previous is not None:
            self._look_at(previous)

    def _send(self, count: int) -> _Block:
        """Send a block to the devices, of which the first `count` tokens are decoded."""
        assert self._sampler is not None
        running = self.running
        cache, drawn, (self._token, self._running, self._token_counts), _ = decode_block(
            self._model, self._policy.decode, self._pool.slots(), self._token, self._running,
            constrained(self._sampler, running, self._model.config.vocab_size), put(self._made, BATCH),
            self._token_counts,
            count=1 if self.constrained else self._block_tokens, limit=np.int32(count), recurring=self._recurring,
        )  # fmt: skip
        self._made = self._made + np.int32(count)
        return _Block(running, drawn, count, self._pool.decoded(cache))

    def look_at_block(self) -> None:
        """Wait for the block that is on its way, and look at its tokens."""
        block, self._block = self._block, None
        if block is not None:
            self._look_at(block)

    def _look_at(self, block: _Block) -> None:
        """Give a block's tokens to their requests, and end those that are done."""
        self._pool.looked_at(block.sizes)
        tokens, length, seen, *_ = map(on_host, (block.drawn[0], *block.sizes))
        for slot, request in block.requests:
            if self._requests[slot] is not request:
                continue
            self.length[:, slot], self.seen[slot] = length[:, slot], seen[slot]
            logprobs = logprobs_of(request, block.drawn[1], slot, block.tokens)
            request.extend(tokens[: block.tokens, slot].tolist(), logprobs)
            if request.finish_reason is not None:
                self.end(slot, request.finish_reason)
