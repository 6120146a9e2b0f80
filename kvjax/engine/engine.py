"""The turns of the engine.

A turn ends what was cancelled, goes on with what was paused or reads a piece of one waiting prompt, and has all running
slots decode a block of tokens. The host looks at a block's tokens while the next one runs.

All shapes are fixed when the engine is made: slots, and a pool of pages that they share. A prompt is read as a cache of
one sequence over that pool, and put into its slot when it was read. A request is let in when the pages that it is
expected to take are free. Where pages run short all the same, a prompt that is being read is put back, the youngest
answer is copied to host memory and goes on later, and an answer that is alone ends.
"""

import collections
import contextlib
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.cache import CapacityError, device_bytes
from kvjax.engine.drawing import InSlots, logprobs_of, sampler_of
from kvjax.engine.pages import PageCounts
from kvjax.engine.pool import After, Outside, Pool
from kvjax.engine.request import FinishReason, Request
from kvjax.engine.rows import Row
from kvjax.errors import UserError, named_arguments, whole_number
from kvjax.inference.allocation import layout_for
from kvjax.inference.answers import stop_tokens_of
from kvjax.inference.checks import check_arguments
from kvjax.inference.decode import decode_block, first_tokens
from kvjax.inference.eviction import recurring
from kvjax.inference.forward import SIZES, bucket
from kvjax.inference.prefill import Steps, next_step, reading
from kvjax.inference.sampler import Counts, Logprobs, Sampler
from kvjax.mesh import BATCH, axis_size, put, use_mesh
from kvjax.models.chat import token_rows
from kvjax.models.decoder import Decoder
from kvjax.policies.policy import Policy
from kvjax.sampling_params import SamplingParams

CHUNK, BLOCK = 2048, 8


@dataclasses.dataclass
class _Reading:
    """The prompt that is being read."""

    request: Request
    slot: int
    steps: Steps
    row: Row
    left: int
    """Tokens that are not read yet."""


class _Fork(NamedTuple):
    """A sequence at the end of a prompt, which nobody runs."""

    tokens: Int[np.ndarray, " t"]
    row: Row
    logits: Array
    """Logits after the last token, [1 v]."""


class _Paused(NamedTuple):
    """An answer whose sequence is in host memory."""

    request: Request
    outside: Outside


class EngineStats(NamedTuple):
    """Sizes of what the engine holds."""

    running: int
    """Answers in slots."""
    waiting: int
    """Requests that are not begun, or whose prompt is being read."""
    paused: int
    """Answers in host memory."""
    forks: int
    """Ends of prompts that later prompts may go on from."""
    pages: int
    """Pages in use, on the device that has most of them in use."""
    pool_pages: int


class _Block(NamedTuple):
    """A block that was sent to the devices, whose tokens nobody has looked at yet."""

    requests: InSlots
    """Who ran."""
    drawn: tuple[Array, Logprobs | None]
    tokens: int
    """The number of tokens that count: the block's first ones."""
    after: After


class Engine:
    """Answers requests that come and go at any time.

        engine = Engine(model, policy, tokenizer=tokenizer)
        (request,) = engine.submit("Why is the sky blue?")
        while request.finish_reason is None:
            engine.step()
        print(request.text)

    Args:
        model: from `kvjax.load_model`. Its mesh may split heads (`tensor`) and nothing else.
        policy: from `make_policy`; None is the full cache. One that compacts while it decodes does so with
            `when=position`.
        tokenizer: for texts and chats.
        slots: answers that are decoded at once.
        max_length: tokens of the longest prompt with its answer; by default what the model declares.
        capacity: size of the pool, as of `LLM`; by default what the slots are expected to need.
        page_size: as of `LLM`.
        chunk: prompt tokens that are read in a turn.
        block: tokens that are decoded in a turn.

    Raises:
        UserError: another mesh, a policy that does not fit, or less memory than one sequence needs.
    """

    @named_arguments(where="Engine")
    def __init__(
        self,
        model: Decoder,
        policy: Policy | None = None,
        *,
        tokenizer: Any = None,
        slots: int = 16,
        max_length: int | None = None,
        capacity: int | str | None = None,
        page_size: int | None = None,
        chunk: int = CHUNK,
        block: int = BLOCK,
    ):
        check_arguments("Engine", model, policy)
        self.slots, self.chunk, self.block = (
            whole_number("Engine", name, x)
            for name, x in (("slots", slots), ("chunk", chunk), ("block", block))
        )
        config = model.config
        longest = config.longest if max_length is None else max_length
        self.max_length = whole_number("Engine", "max_length", longest)
        self._model, self._tokenizer = model, tokenizer
        with use_mesh(model):
            if axis_size("data", "fsdp", "sequence") > 1:
                raise UserError("Engine: the mesh may split heads alone (tensor), not data, fsdp or sequence")
            self._policy = (policy or Policy()).compile(model)
            host = self._policy.host
            trigger = None if host.schedule is None else host.schedule.trigger
            if trigger is not None and trigger.while_decoding and trigger.when != "position":
                raise UserError(
                    f"Engine: policy {host.name} compacts while it decodes: sequences that come at any time do so with "
                    "when=position"
                )
            layout = layout_for(
                host, batch=self.slots, layers=config.num_layers, kv_heads=config.num_kv_heads,
                head_dim=config.head_dim, tokens=self.max_length, dtype=model.embed.dtype, page_size=page_size,
                capacity=capacity, free=device_bytes(free=True),
            )  # fmt: skip
            # what is decided at a prompt's end, or by a question, cannot be gone on from by another one
            self._reuses = host.schedule is None
            group = config.num_heads // config.num_kv_heads
            self._pool = Pool(self._policy, layout, group, shares=self._reuses)
            self._recurring = recurring(host, self._pool.slots())
            self._token, self._running = (
                put(np.zeros(self.slots, dtype), BATCH) for dtype in (np.int32, bool)
            )
        self._counted = PageCounts(host, layout)
        # as of the last block that was looked at
        self._length = np.zeros((layout.layers, self.slots, layout.kv_heads), np.int64)
        self._seen = np.zeros(self.slots, np.int64)
        self._made = np.zeros(self.slots, np.int32)
        self._requests: list[Request | None] = [None] * self.slots
        self._waiting: collections.deque[Request] = collections.deque()
        self._paused: list[_Paused] = []
        # those that were used last come last
        self._forks: list[_Fork] = []
        self._reading: _Reading | None = None
        self._block: _Block | None = None
        self._sampler: Sampler | None = None
        self._token_counts: Counts | None = None
        self._arrivals, self._crowded = 0, False

    # ---- requests

    def submit(self, prompt: Any, sampling: SamplingParams | None = None) -> list[Request]:
        """Queue a prompt: a text, token ids or a chat. Returns a request for each of its n answers.

        Raises:
            UserError: a prompt that is empty or no prompt, or longer with its answer than `max_length`.
            CapacityError: it is expected not to fit into the pool, even alone.
        """
        sampling = sampling or SamplingParams()
        (row,) = token_rows([prompt], self._model.config.vocab_size, self._tokenizer)
        if row.size + sampling.max_new_tokens > self.max_length:
            raise UserError(
                f"a prompt of {row.size} tokens and an answer of {sampling.max_new_tokens} are longer than max_length="
                f"{self.max_length}"
            )
        tokens = row.size + sampling.max_new_tokens
        with use_mesh(self._model):
            need = max(self._counted.while_read(row.size), self._counted.at_end(tokens))
        if need > (pages := self._pool.layout.pages):
            raise CapacityError(
                f"a prompt of {row.size} tokens is expected to take {need} pages of the pool's {pages}: give a larger "
                "capacity"
            )
        _, own = stop_tokens_of(sampling.stop, self._tokenizer)
        eos = () if sampling.ignore_eos else self._model.config.eos_ids
        ends = (*eos, *sampling.stop_token_ids, *own)
        sampling = dataclasses.replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *own))
        found = []
        for number in range(sampling.n):
            found.append(Request(row, sampling, number, self._arrivals, ends, self._tokenizer))
            self._arrivals += 1
        self._waiting.extend(found)
        return found

    @property
    def busy(self) -> bool:
        """True while there is a request that has not ended."""
        return bool(self._waiting or self._paused or self._reading or self._block or any(self._requests))

    @property
    def stats(self) -> EngineStats:
        """Its requests and pages now."""
        pages, waiting = self._pool.layout.pages, len(self._waiting) + (self._reading is not None)
        used = pages - self._pool.free
        return EngineStats(len(self._running_now), waiting, len(self._paused), len(self._forks), used, pages)

    def warm_up(self) -> None:
        """Compile what requests will run, before the first one comes: prompts of every size that is compiled for, drawn
        greedily and otherwise. A pause compiles for the size of what is paused, later."""
        most = self.max_length - 2 * self.block
        sizes = {min(size, most) for size in (*SIZES, self.chunk) if size <= self.chunk}
        if self._policy.host.schedule is not None:
            # compactions are compiled for the longest head cache
            size = 1
            while size < most:
                sizes.add(size := min(bucket(size + 1), most))
        drawn = SamplingParams(max_new_tokens=self.block + 2, temperature=1.0, logprobs=1, ignore_eos=True)
        plain = SamplingParams(max_new_tokens=self.block + 2, ignore_eos=True)
        for index, size in enumerate(sorted(sizes)):
            for sampling in (plain, drawn) if index == 0 else (plain,):
                with contextlib.suppress(CapacityError):
                    self.submit(np.zeros(size, np.int32), sampling)
                while self.busy:
                    self.step()
        self.forget()

    def forget(self) -> None:
        """Free the pages of prompts that later ones could go on from."""
        with use_mesh(self._model):
            for fork in self._forks:
                self._pool.drop(fork.row)
            self._forks = []

    def step(self) -> None:
        """Take a turn."""
        with use_mesh(self._model):
            self._end_cancelled()
            self._go_on()
            self._read()
            count = self._affordable()
            if count == 0:
                self._look_at_block()
                count = self._affordable()
            before, self._block = self._block, None
            if count:
                self._block = self._decode(count)
            elif self._running_now:
                self._relieve()
            if before is not None:
                self._look_at(before)

    # ---- slots

    def _end_cancelled(self) -> None:
        for request in [one for one in self._waiting if one.cancelled]:
            request.finish_reason = "abort"
            self._waiting.remove(request)
        for paused in [one for one in self._paused if one.request.cancelled]:
            paused.request.finish_reason = "abort"
            self._paused.remove(paused)
        if self._reading is not None and self._reading.request.cancelled:
            self._reading.request.finish_reason = "abort"
            self._put_back()
        for slot, request in enumerate(self._requests):
            if request is not None and request.cancelled:
                self._end(slot, request, "abort")

    def _end(self, slot: int, request: Request, reason: FinishReason) -> None:
        """End the answer of a slot, and free its pages."""
        request.finish_reason = reason
        held = self._length[:, slot].mean() + min(self._seen[slot], self._pool.layout.window - 1)
        request.kv_ratio = float(held / max(1, self._seen[slot]))
        self._clear(slot)

    def _clear(self, slot: int) -> None:
        """Free the pages of a slot."""
        self._pool.clear(slot)
        self._running = self._with(self._running, slot, False)
        self._requests[slot] = None
        self._length[:, slot], self._seen[slot], self._made[slot] = 0, 0, 0

    def _join(self, slot: int, request: Request, row: Row, token: int) -> None:
        """Put a sequence into a slot, whose answer goes on after `token`."""
        self._pool.put(slot, row)
        self._token = self._with(self._token, slot, token)
        self._running = self._with(self._running, slot, True)
        self._requests[slot], self._made[slot] = request, len(request.tokens)
        self._length[:, slot] = np.asarray(row.layers.length)[:, 0]
        self._seen[slot] = int(row.seen[0])
        drawing = sampler_of(self._model.config, self._running_now, self.slots)
        self._sampler, self._token_counts = drawing

    def _with(self, x: Array, slot: int, value: int) -> Array:
        """Return the numbers of all slots with another one for this slot."""
        return jnp.where(put(np.arange(self.slots) == slot, BATCH), np.asarray(value, x.dtype), x)

    @property
    def _running_now(self) -> InSlots:
        return [(slot, one) for slot, one in enumerate(self._requests) if one is not None]

    def _fits(self, tokens: int = 0, read: int = 0, other: Outside | None = None, pages: int = 0) -> bool:
        """Return True if the pool has pages for so many more tokens of each running slot, after those of the block that
        is on its way, for `read` tokens of the prompt that is being read, for another sequence with as many tokens as
        the slots, and for so many `pages` more. Forks make room."""
        more = np.zeros(self.slots, np.int64)
        for slot, _ in self._running_now:
            more[slot] = tokens
        for slot, request in () if self._block is None else self._block.requests:
            if self._requests[slot] is request:
                more[slot] += self._block.tokens  # pyright: ignore[reportOptionalMemberAccess]
        parts = [(self._length, self._seen, more)]
        if self._reading is not None:
            row = self._reading.row
            parts.append((np.asarray(row.layers.length), np.asarray(row.seen), np.array([read])))
        if other is not None:
            parts.append((*other.sizes, np.array([tokens])))
            pages += self._counted.held(*other.sizes)
        length, seen, more = zip(*parts, strict=True)
        length, seen, more = np.concatenate(length, 1), np.concatenate(seen), np.concatenate(more)
        need = self._counted.more(length, seen, more) + pages
        while need > self._pool.free and self._forks:
            self._pool.drop(self._forks.pop(0).row)
        return need <= self._pool.free

    # ---- prompts

    def _go_on(self) -> None:
        """Put the oldest paused answer into a slot again, if there is one and a place for it."""
        if not self._paused or (slot := self._vacant) is None:
            return
        request, outside = self._paused[0]
        if not self._fits(self.block, other=outside):
            return
        self._paused.pop(0)
        self._look_at_block()
        self._join(slot, request, self._pool.copy_in(outside), request.tokens[-1])

    @property
    def _vacant(self) -> int | None:
        """A slot that nobody has."""
        taken = None if self._reading is None else self._reading.slot
        return next((i for i, one in enumerate(self._requests) if one is None and i != taken), None)

    def _read(self) -> None:
        """Read a piece of a prompt: of the one that is being read, or of the next that fits."""
        if self._reading is None and not self._begin():
            return
        now, schedule = self._reading, self._policy.host.schedule
        assert now is not None
        size, behind = self.chunk, 0
        if schedule is not None:
            size = schedule.trigger.chunk if schedule.trigger.in_chunks else size
            behind = schedule.read_behind
        if not self._fits(read=min(size, now.left) + behind):
            if not self._running_now and not self._paused:
                now.request.finish_reason = "capacity"
                self._put_back()
            return
        now.left = max(0, now.left - size)
        cache, after = next_step(now.steps, self._pool.alone(now.row))
        now.row = self._pool.keep(cache)
        if after is not None:
            self._counted.measure(np.asarray(cache.layers.length), now.request.prompt.size)
            if self._reuses and (fork := self._forked(now.row)) is not None:
                self._forks.append(_Fork(now.request.prompt, fork, after))
            self._begin_answer(self._pool.decoding(cache), after)

    def _begin(self) -> bool:
        """Begin with the next prompt, if there is a slot and its pages are expected to be free."""
        running = self._running_now
        if not self._waiting or self._paused or (slot := self._vacant) is None or (self._crowded and running):
            return False
        request, counted = self._waiting[0], self._counted
        growth = sum(
            max(0, counted.at_end(one.most) - counted.held(self._length[:, [i]], self._seen[[i]]))
            for i, one in running
        )
        need = max(counted.while_read(request.prompt.size), counted.at_end(request.most))
        if running and not self._fits(pages=growth + need):
            return False
        self._waiting.popleft()
        self._crowded = False
        row, request.cached, logits = self._beginning(request)
        left = request.prompt[request.cached :]
        steps = reading(self._model, self._policy, [left], self.chunk, grows=False)
        self._reading = _Reading(request, slot, steps, row, left.size)
        if logits is not None:
            self._begin_answer(row, logits)
        return logits is None

    def _beginning(self, request: Request) -> tuple[Row, int, Array | None]:
        """Return the sequence that a prompt goes on from, how many of its tokens that has read, and the logits after
        them if these are all: the longest prompt so far with which it begins, or nothing."""
        prompt = request.prompt
        best = max(
            (x for x in self._forks if np.array_equal(x.tokens, prompt[: x.tokens.size])),
            key=lambda fork: fork.tokens.size, default=None,
        )  # fmt: skip
        if best is not None:
            # used last, so that it is the last to make room
            self._forks = [*(x for x in self._forks if x is not best), best]
            if (row := self._forked(best.row)) is not None:
                count = best.tokens.size
                return row, count, best.logits if count == prompt.size else None
        return self._pool.begin(), 0, None

    def _forked(self, row: Row) -> Row | None:
        """Return a fork of a sequence; None where the pool has no pages for it."""
        need = self._counted.copied(np.asarray(row.layers.length), np.asarray(row.seen))
        return self._pool.fork(row) if need <= self._pool.free else None

    def _put_back(self) -> None:
        """Stop reading, and wait again unless the request has ended."""
        assert self._reading is not None
        request = self._reading.request
        self._pool.drop(self._reading.row)
        self._reading = None
        if request.finish_reason is None:
            self._waiting.appendleft(request)

    def _begin_answer(self, row: Row, logits: Array) -> None:
        """Draw the first token after the prompt that was read, and put the sequence into its slot."""
        assert self._reading is not None
        request, slot, self._reading = self._reading.request, self._reading.slot, None
        sampler, counts = sampler_of(self._model.config, [(0, request)], 1)
        token, logprobs, _, _ = first_tokens(sampler, logits, put(np.ones(1, bool), BATCH), counts)
        request.extend([int(token[0])], logprobs_of(request, jax.tree.map(lambda x: x[None], logprobs), 0, 1))
        self._look_at_block()
        self._join(slot, request, row, int(token[0]))
        if request.finish_reason is not None:
            self._end(slot, request, request.finish_reason)

    # ---- blocks

    def _affordable(self) -> int:
        """Return how many tokens all running slots can decode at once; 0: there is no page for one of each, or none
        runs."""
        count = self.block if self._running_now else 0
        while count and not self._fits(count):
            count //= 2
        return count

    def _decode(self, count: int) -> _Block:
        """Send a block, of which the first `count` tokens are decoded, to the devices."""
        assert self._sampler is not None
        cache, drawn, (self._token, self._running, self._token_counts), _ = decode_block(
            self._model, self._policy.decode, self._pool.slots(), self._token, self._running, self._sampler,
            put(self._made, BATCH), self._token_counts,
            count=self.block, limit=np.int32(count), recurring=self._recurring,
        )  # fmt: skip
        self._made = self._made + np.int32(count)
        return _Block(self._running_now, drawn, count, self._pool.decoded(cache))

    def _look_at_block(self) -> None:
        """Wait for the block that is on its way, and look at its tokens."""
        block, self._block = self._block, None
        if block is not None:
            self._look_at(block)

    def _look_at(self, block: _Block) -> None:
        """Give a block's tokens to their requests, and end those that are done."""
        self._pool.looked_at(block.after)
        tokens, length, seen, *_ = map(np.asarray, (block.drawn[0], *block.after))
        for slot, request in block.requests:
            if self._requests[slot] is not request:
                continue
            self._length[:, slot], self._seen[slot] = length[:, slot], seen[slot]
            found = logprobs_of(request, block.drawn[1], slot, block.tokens)
            request.extend(tokens[: block.tokens, slot].tolist(), found)
            if request.finish_reason is not None:
                self._end(slot, request, request.finish_reason)

    def _relieve(self) -> None:
        """Make room where running answers have no page for one more token."""
        if self._reading is not None:
            self._crowded = True
            self._put_back()
            return
        slot, youngest = max(self._running_now, key=lambda one: one[1].arrival)
        if len(self._running_now) == 1:
            self._end(slot, youngest, "capacity")
            return
        pages = bucket(self._counted.held(self._length[:, [slot]], self._seen[[slot]]))
        self._paused.append(_Paused(youngest, self._pool.copy_out(slot, pages)))
        self._paused.sort(key=lambda one: one.request.arrival)
        self._clear(slot)
