"""The turns of the engine.

A turn ends what was cancelled, resumes a paused answer if it fits, reads a piece of one waiting prompt, and decodes a
block of tokens in all running slots. The host looks at a block's tokens while the next one runs.

All shapes are fixed when the engine is made: slots, and a pool of pages that they share. A prompt is read as a cache of
one sequence over that pool, and then put into a slot. A request begins when the pages that it is expected to take are
free. If pages run short nevertheless, a prompt that is being read goes back into the queue. Otherwise the youngest
answer is copied to host memory and resumed later, and an answer that runs alone ends.
"""

import bisect
import collections
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvjax.cache import CapacityError, device_bytes
from kvjax.engine.drawing import check_space
from kvjax.engine.forks import Fork, Forks
from kvjax.engine.pages import PageCounts
from kvjax.engine.pool import Outside, Pool
from kvjax.engine.reader import Reader
from kvjax.engine.request import Anything, Constraint, Request, merged_spans, refusal
from kvjax.engine.slots import Paused, Slots
from kvjax.errors import UserError, named_arguments, shown, whole_number
from kvjax.inference.allocation import layout_for, sizes_of
from kvjax.inference.answers import stop_tokens_of
from kvjax.inference.checks import check_arguments
from kvjax.inference.forward import SIZES, bucket
from kvjax.inference.key_scale import key_scale
from kvjax.mesh import axis_size, on_host, use_mesh
from kvjax.models.chat import token_rows
from kvjax.models.decoder import Decoder
from kvjax.policies.policy import Policy
from kvjax.sampling_params import SamplingParams

CHUNK, BLOCK = 2048, 8
FORKS = 4
"""The number of prompt ends that are kept, per slot."""


class EngineStats(NamedTuple):
    """Sizes of what the engine holds."""

    running: int
    """Answers in slots."""
    waiting: int
    """Requests that are not begun, or whose prompt is being read."""
    paused: int
    """Answers in host memory."""
    forks: int
    """Contexts, and ends of prompts that later prompts may continue."""
    pages: int
    """Pages in use on the device that has the most of them in use."""
    pool_pages: int


class Engine:
    """Answers requests that come and go at any time.

        engine = Engine(model, policy, tokenizer=tokenizer)
        (request,) = engine.submit("Why is the sky blue?")
        while request.finish_reason is None:
            engine.step()
        print(request.text)

    Args:
        model: from `kvjax.load_model`. Its mesh may split heads (`tensor`) and nothing else.
        policy: from `make_policy`; None is the full cache. A policy that compacts while decoding needs `when=position`.
        tokenizer: for texts and chats.
        slots: answers that are decoded at once.
        max_length: tokens of the longest prompt with its answer; by default what the model declares.
        capacity: size of the pool, as in `LLM`; by default what the slots are expected to need.
        page_size: as in `LLM`.
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
        self._model, self._tokenizer, self.vocabulary = model, tokenizer, config.vocab_size
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
                host, **sizes_of(config), batch=self.slots, windows=2 * self.slots + 1, tokens=self.max_length,
                dtype=model.dtype, page_size=page_size, capacity=capacity, free=device_bytes(free=True),
            )  # fmt: skip
            group = config.num_heads // config.num_kv_heads
            self._pool = Pool(self._policy, layout, group, key_scale(model))
            self._slots = Slots(model, self._policy, self._pool, self.block)
        self._page_counts = PageCounts(host, layout)
        # windows of sliding-window layers are not shared: one more for each slot, and that of the prompt being read
        most = self.slots if config.sliding_layers else FORKS * self.slots
        self._forks = Forks(self._pool, self._page_counts, most)
        self._reader = Reader(model, self._policy, self._pool, self._forks, self._page_counts, self.chunk)
        self._waiting: collections.deque[Request] = collections.deque()
        self._paused: list[Paused] = []
        self._arrivals, self._crowded = 0, False

    # ---- requests

    @named_arguments(where="Engine.submit")
    def submit(
        self,
        prompt: Any,
        sampling: SamplingParams | None = None,
        *,
        context: str | None = None,
        constraint: Callable[[], Constraint] | None = None,
        score: bool = False,
        kept: int | None = None,
        expected: int | None = None,
        dropped: Any = (),
        dropped_at: int = 0,
    ) -> list[Request]:
        """Queue a prompt: a text, token ids or a chat. Returns a request for each of its n answers.

        Args:
            context: name of a context that was read (`read_context`), which the prompt continues.
            constraint: makes the `Constraint` of an answer. While such an answer is decoded, all answers are decoded
                token by token.
            score: find the log-probabilities of the prompt's own tokens, too (`Request.prompt_logprobs`).
            kept: the number of the prompt's tokens with which later prompts may begin; None: all. It is smaller for a
                chat template that renders earlier turns differently (`kvjax.models.chat.stable_prefix_length`).
            expected: tokens that an answer is expected to have, for which pages must be free when it begins; None: all
                that it may have. An answer that grows beyond it may be paused.
            dropped: spans of the prompt's tokens that leave the cache, from one index to another. What is read from
                then on does not see them. Later prompts that begin with this one drop them, too, or read it again.
            dropped_at: the number of tokens that are read before that happens. If an earlier prompt has read more, it
                happens before anything else is read.

        Raises:
            UserError: a prompt that is empty or no prompt, or longer with its answer than `max_length`; a context that
                was not read; `score` under a policy that decides after the prompt was read; `dropped` under one that
                does not know positions or does not decide token by token.
            CapacityError: it is expected not to fit into the pool, even alone.
        """
        sampling, before = sampling or SamplingParams(), np.zeros(0, np.int32)
        if context is not None:
            if context not in self._forks.named:
                raise UserError(f"no context {shown(context)} was read")
            before = self._forks.named[context].tokens
        host = self._policy.host
        if score and context is not None:
            raise UserError("a prompt that continues a context is not scored")
        if score and (host.schedule is not None or host.selection is not None):
            raise UserError(
                f"policy {host.name} acts once a prompt is read, so the log-probabilities of the prompt's tokens would "
                "be those of a full cache"
            )
        part = "whole" if context is None else "end"
        (row,) = token_rows([prompt], self._model.config.vocab_size, self._tokenizer, part)
        row = np.concatenate([before, row])
        if row.size + sampling.max_new_tokens > self.max_length:
            raise UserError(
                f"a prompt of {row.size} tokens and an answer of {sampling.max_new_tokens} are longer than max_length="
                f"{self.max_length}"
            )
        dropped, dropped_at = merged_spans(dropped, dropped_at, row.size)
        if dropped:
            if context is not None or score:
                raise UserError("nothing is dropped from a context, and from a prompt that is scored")
            if refused := refusal(host, self._pool.knows_positions):
                raise UserError(refused)
        _, own = stop_tokens_of(sampling.stop, self._tokenizer)
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *own)))
        sampling = dataclasses.replace(sampling, stop_token_ids=stops)
        ends = (*(() if sampling.ignore_eos else self._model.config.eos_ids), *stops)
        check_space(sampling, ends, self._model.config.vocab_size)
        return [
            self._queued(
                Request(
                    row, sampling, number, self._arrivals, ends, self._tokenizer,
                    None if constraint is None else constraint(), context, row.size if kept is None else kept,
                    dropped=dropped, dropped_at=dropped_at, scores=score, expected=expected,
                )
            )
            for number in range(sampling.n)
        ]  # fmt: skip

    def longest_answer(self, prompt: int, context: str | None = None) -> int:
        """Return the most tokens, at least 1, that an answer to a prompt of `prompt` tokens may have and is expected to
        find pages for. context: the name of the context that the prompt continues."""
        fork = None if context is None else self._forks.named.get(context)
        size = prompt + (0 if fork is None else fork.tokens.size)
        with use_mesh(self._model):
            pages = self._pool.layout.pages - self._forks.named_pages
            most = bisect.bisect_right(
                range(1, self.max_length - size + 1),
                pages,
                key=lambda most: self._need(size, size + most - 1, fork),
            )
        return max(1, most)

    def holds(self, tokens: int) -> tuple[int, int]:
        """Return how many requests of so many tokens, prompt and answer, are expected to fit into the pool at once, and
        how many would with a full cache in pages of as many bytes."""
        layout, pages = self._pool.layout, self._pool.layout.pages
        full = np.full((layout.layers, 1, layout.kv_heads), max(0, tokens - layout.window + 1))
        with use_mesh(self._model):
            each, read = self._page_counts.at_end(tokens), self._page_counts.while_read(tokens)
            whole = self._page_counts.held(full, np.array([tokens]))
        others = max(0, pages - read) // max(each, 1)
        return min(others + (read <= pages), pages // max(each, 1)), pages // max(whole, 1)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool's keys and values, on each device."""
        layout = self._pool.layout
        return layout.pages * layout.page_size * layout.entry_bytes

    @named_arguments(where="Engine.read_context")
    def read_context(self, name: str, prompt: Any) -> Request:
        """Queue a context to be read and kept under a name, for prompts that continue it, whatever the policy decides
        at its end. Returns a request, which ends when it is read.

        Raises:
            UserError: a name that is taken; else as `submit`, as CapacityError.
        """
        if name in self._forks.named or any(
            one.reads and one.context == name for one in self._begun_or_waiting
        ):
            raise UserError(f"a context {shown(name)} was read before")
        (row,) = token_rows([prompt], self._model.config.vocab_size, self._tokenizer, "beginning")
        if row.size >= self.max_length:
            raise UserError(f"a context of {row.size} tokens leaves nothing of max_length={self.max_length}")
        one = SamplingParams(max_new_tokens=1)
        return self._queued(Request(row, one, 0, self._arrivals, (), context=name, reads=True))

    @property
    def _begun_or_waiting(self) -> list[Request]:
        return [*self._waiting, *([] if self._reader.request is None else [self._reader.request])]

    def _queued(self, request: Request) -> Request:
        with use_mesh(self._model):
            need, pages = self._need_of(request), self._pool.layout.pages - self._forks.named_pages
        if need > pages:
            raise CapacityError(
                f"a prompt of {request.prompt.size} tokens is expected to take {need} pages, and the pool has {pages} "
                "for it: give a larger capacity"
            )
        self._arrivals += 1
        self._waiting.append(request)
        return request

    def _need_of(self, request: Request) -> int:
        """Return the pages that a request is expected to take."""
        continued = (
            None if request.reads or request.context is None else self._forks.named.get(request.context)
        )
        return self._need(request.prompt.size, request.most, continued)

    def _need(self, prompt: int, most: int, fork: Fork | None) -> int:
        """Return the pages that a prompt of so many tokens is expected to take, with its answer at `most` tokens. The
        pages of the fork that it continues do not count."""
        if fork is None:
            return max(self._page_counts.while_read(prompt), self._page_counts.at_end(most))
        length, counted = on_host(fork.row.layers.length), on_host(fork.row.counted)
        more = self._page_counts.more(length, counted, most - on_host(fork.row.seen))
        return self._page_counts.copied(length, counted) + more

    def forget(self, context: str | None = None) -> None:
        """Free the pages of a context; its prompts end if they were not read yet. None frees those of all ends of
        prompts that later ones could continue.

        Raises:
            UserError: a context that was not read.
        """
        if context is not None and context not in self._forks.named:
            raise UserError(f"no context {shown(context)} was read")
        with use_mesh(self._model):
            if context is None:
                self._forks.drop_unnamed()
            else:
                self._forks.drop(context)

    @property
    def busy(self) -> bool:
        """True while there is a request that has not ended."""
        return bool(self._waiting or self._paused or self._reader.request or self._slots.busy)

    @property
    def stats(self) -> EngineStats:
        """Its requests and pages now."""
        pages, waiting = self._pool.layout.pages, len(self._begun_or_waiting)
        used = pages - self._pool.free
        return EngineStats(
            len(self._slots.running), waiting, len(self._paused), len(self._forks), used, pages
        )

    @named_arguments(where="Engine.warm_up")
    def warm_up(self, *, constrained: bool = False) -> None:
        """Compile the programs that requests will run, before the first one comes: prompts of every compiled size,
        greedy and other sampling, a pause and, where a policy compacts, questions about a context.

        constrained: True if answers will have constraints.
        """
        answer = min(2 * self.block, self.max_length - 1)
        most = self.max_length - answer
        sizes = {min(size, most) for size in (*SIZES, self.chunk) if size <= self.chunk}
        host = self._policy.host
        if host.schedule is not None:
            # compactions are compiled for the longest head cache
            size = 1
            while size < most:
                sizes.add(size := min(bucket(size + 1), most))
        plain = SamplingParams(max_new_tokens=answer, ignore_eos=True)
        drawn = dataclasses.replace(plain, temperature=1.0, logprobs=1)
        vocabulary = self._model.config.vocab_size
        others: list[tuple[SamplingParams, Any]] = [(drawn, None)]
        if constrained:
            others.append((drawn, lambda: Anything(vocabulary)))
        context = None
        if not self._reader.reuses:
            self.read_context(context := "warm_up", [0])
            self._run()
        for size in sorted(sizes):
            self._try(np.zeros(size, np.int32), plain, pausing=True)
            for sampling, constraint in others:
                self._try(np.zeros(size, np.int32), sampling, constraint=constraint)
            others = []
            self.forget()
            if size < most:
                # a prompt that continues an earlier one
                if context is None:
                    self._try([0], plain)
                rest = np.zeros(size if context is not None else size + 1, np.int32)
                self._try(rest, plain, context=context)
            if host.schedule is None and host.selection is None:
                self._try(np.zeros(size, np.int32), plain, score=True)
            self.forget()
        if context is not None:
            self.forget(context)
        if most > 1 and not refusal(host, self._pool.knows_positions):
            self._try([0, 0], plain, dropped=((0, 1),), dropped_at=1)
            self.forget()
        self._page_counts.reset()

    def _try(self, prompt: Any, sampling: SamplingParams, *, pausing: bool = False, **options: Any) -> None:
        """Answer a prompt, unless it does not fit."""
        with contextlib.suppress(CapacityError):
            self.submit(prompt, sampling, **options)
        self._run(pausing)

    def _run(self, pausing: bool = False) -> None:
        """Take turns until nothing is left to do. With `pausing`, the first answer is paused once."""
        while self.busy:
            self.step()
            if pausing and self._slots.running:
                with use_mesh(self._model):
                    self._pause(self._slots.running[0][0])
                pausing = False

    def step(self) -> None:
        """Take a turn."""
        with use_mesh(self._model):
            self._end_cancelled()
            self._go_on()
            self._read()
            count = self._affordable()
            if count == 0:
                self._slots.look_at_block()
                count = self._affordable()
            if count:
                self._slots.decode(count)
            elif self._slots.running:
                self._relieve()

    def _end_cancelled(self) -> None:
        for request in [one for one in self._waiting if one.cancelled]:
            request.finish_reason = "abort"
            self._waiting.remove(request)
        for paused in [one for one in self._paused if one.request.cancelled]:
            paused.request.finish_reason = "abort"
            self._paused.remove(paused)
        if (request := self._reader.request) is not None and request.cancelled:
            request.finish_reason = "abort"
            self._reader.drop()
        for slot, answer in self._slots.running:
            if answer.cancelled:
                self._slots.end(slot, "abort")

    # ---- pages

    def _fits(
        self,
        tokens: int = 0,
        read: int = 0,
        other: Outside | None = None,
        pages: int = 0,
        keep: Fork | None = None,
    ) -> bool:
        """Return True if the pool has pages for `tokens` more tokens of each running slot, after the block that is on
        its way, for `read` tokens of the prompt that is being read, for `tokens` more tokens of the sequence `other`,
        and for `pages` more. Unnamed forks other than `keep` are dropped to make room."""
        if self._policy.host.compacts_answers and not self._pool.is_counted:
            # that block may free pages: the free count and the lengths must be of the same time
            self._slots.look_at_block()
        parts = [(self._slots.length, self._slots.counted, self._slots.more(tokens))]
        if self._reader.request is not None:
            parts.append((*self._reader.sizes, np.array([read])))
        if other is not None:
            parts.append((*other.sizes, np.array([tokens])))
            pages += self._page_counts.held(*other.sizes)
        length, counted, more = zip(*parts, strict=True)
        need = self._page_counts.more(
            np.concatenate(length, 1), np.concatenate(counted), np.concatenate(more)
        )
        return self._forks.make_room(need + pages, keep)

    def _affordable(self) -> int:
        """Return how many tokens all running slots can decode at once; 0: there is no page for one of each, or none
        runs."""
        count = self.block if self._slots.running else 0
        while count and not self._fits(count):
            count //= 2
        return count

    def _relieve(self) -> None:
        """Free pages where the running answers have none for one more token."""
        if self._reader.request is not None:
            self._crowded = True
            self._waiting.appendleft(self._reader.request)
            self._reader.drop()
            return
        slot, _ = max(self._slots.running, key=lambda one: one[1].arrival)
        if len(self._slots.running) == 1:
            self._slots.end(slot, "capacity")
        else:
            self._pause(slot)

    def _pause(self, slot: int) -> None:
        """Pause an answer, to be resumed later."""
        self._slots.look_at_block()
        if slot not in self._slots.vacant:
            self._paused.append(self._slots.pause(slot))
            self._paused.sort(key=lambda one: one.request.arrival)

    def _go_on(self) -> None:
        """Put the oldest paused answer into a slot again, if there is one, and a slot and pages for it."""
        if not self._paused or len(self._slots.vacant) <= (self._reader.request is not None):
            return
        request, outside = self._paused[0]
        # no other request is left whose end would free pages
        alone = not self._slots.running and self._reader.request is None
        if self._fits(1 if alone else self.block, other=outside):
            self._paused.pop(0)
            self._slots.join(request, self._pool.copy_in(outside))
        elif alone:
            self._paused.pop(0)
            length, counted = outside.sizes
            local = min(int(counted[0]), self._pool.layout.window - 1)
            request.end("capacity", length, local, int(outside.row.seen[0]))

    # ---- prompts

    def _read(self) -> None:
        """Read a piece of the prompt that is being read, or of the next one that fits."""
        request = self._reader.request or self._begun()
        if request is None:
            return
        # the first call may drop forks: pages that the prompt shared with them alone need no copies any more
        if not any(self._fits(read=self._reader.tokens, pages=self._reader.copied) for _ in range(2)):
            if not self._slots.running and not self._paused:
                request.finish_reason = "capacity"
                self._reader.drop()
            return
        if (done := self._reader.step()) is None:
            return
        if request.reads:
            self._forks.name(request, *done)
        else:
            self._slots.begin(request, *done)

    def _begun(self) -> Request | None:
        """Begin with the next prompt, if there is a slot and its pages are expected to be free. Returns its request if
        it is to be read."""
        running, counts = self._slots.running, self._page_counts
        if not self._waiting or self._paused or (self._crowded and running):
            return None
        request = self._waiting[0]
        if not self._slots.vacant and not request.reads:
            return None
        growth = sum(max(0, counts.at_end(one.likely) - self._slots.held(counts, i)) for i, one in running)
        named = None if request.reads else request.context
        if named is not None:
            fork = self._forks.named.get(named)
        elif request.reads or request.scores:
            fork = None
        else:
            fork = self._forks.longest(request.prompt, request.dropped)
        fits = self._fits(pages=growth + self._need(request.prompt.size, request.likely, fork), keep=fork)
        if running and not fits:
            return None
        self._waiting.popleft()
        self._crowded = False
        if named is not None and (fork is None or not fits):
            request.finish_reason = "abort" if fork is None else "capacity"
            return None
        if (whole := self._reader.begin(request, fork)) is not None:
            self._slots.begin(request, *whole)
        return self._reader.request
