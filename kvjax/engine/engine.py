"""The engine: requests, contexts, and the compilation of what they run.

All shapes are fixed when the engine is made: slots, and a pool of pages that they share. A prompt is read as a cache of
one sequence over that pool, and then put into a slot. `kvjax.engine.scheduler` decides when.
"""

import bisect
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvjax.cache import CapacityError, device_bytes
from kvjax.engine.forks import Forks
from kvjax.engine.pages import PageCounts
from kvjax.engine.pool import Pool
from kvjax.engine.reader import Reader
from kvjax.engine.request import Anything, Constraint, Request, merged_spans, refusal
from kvjax.engine.samplers import check_space
from kvjax.engine.scheduler import Scheduler
from kvjax.engine.slots import Slots
from kvjax.errors import UserError, named_arguments, shown, whole_number
from kvjax.inference.allocation import layout_for, sizes_of
from kvjax.inference.answers import stop_tokens_of
from kvjax.inference.checks import check_arguments
from kvjax.inference.forward import SIZES, bucket
from kvjax.inference.key_scale import key_scale
from kvjax.mesh import axis_size, use_mesh
from kvjax.models.chat import token_rows
from kvjax.models.decoder import Decoder
from kvjax.policies.policy import Policy
from kvjax.sampling_params import SamplingParams

CHUNK, BLOCK = 2048, 8
FORKS = 4
"""The number of prompt ends that are kept, per slot."""


class EngineStats(NamedTuple):
    """The numbers of an engine's requests, forks and pages."""

    running: int
    """Answers that are being decoded."""
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
        UserError: the mesh splits more than heads, the policy does not fit, or there is too little memory for one
            sequence.
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
                    f"Engine: policy {host.name} compacts while it decodes: use when=position, since requests come at "
                    "any time"
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
        max_forks = self.slots if config.sliding_layers else FORKS * self.slots
        self._forks = Forks(self._pool, self._page_counts, max_forks)
        self._reader = Reader(model, self._policy, self._pool, self._forks, self._page_counts, self.chunk)
        self._scheduler = Scheduler(
            host, self._pool, self._slots, self._forks, self._reader, self._page_counts, self.block
        )
        self._arrivals = 0

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
            score: True to find the log-probabilities of the prompt's own tokens (`Request.prompt_logprobs`).
            kept: the number of the prompt's tokens with which later prompts may begin; None: all. It is smaller for a
                chat template that renders earlier turns differently (`kvjax.models.chat.stable_prefix_length`).
            expected: tokens that an answer is expected to have, for which pages must be free when it begins; None: all
                that it may have. An answer that grows beyond it may be paused.
            dropped: spans (start, end) of the prompt's tokens that leave the cache. Tokens that are read afterwards do
                not see them. A later prompt that begins with this one must drop the same spans to continue it;
                otherwise it is read again.
            dropped_at: the number of tokens that are read before the spans are dropped. If an earlier prompt has read
                more, they are dropped before anything else is read.

        Raises:
            UserError: the prompt is empty or no prompt, or longer with its answer than `max_length`; the context was
                not read; `score` with a policy that decides after the prompt is read; `dropped` with a policy that does
                not know positions or does not decide token by token.
            CapacityError: the request is expected not to fit into the pool, even alone.
        """
        sampling, context_tokens = sampling or SamplingParams(), np.zeros(0, np.int32)
        if context is not None:
            if context not in self._forks.named:
                raise UserError(f"no context {shown(context)} was read")
            context_tokens = self._forks.named[context].tokens
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
        row = np.concatenate([context_tokens, row])
        if row.size + sampling.max_new_tokens > self.max_length:
            raise UserError(
                f"a prompt of {row.size} tokens and an answer of {sampling.max_new_tokens} are longer than max_length="
                f"{self.max_length}"
            )
        dropped, dropped_at = merged_spans(dropped, dropped_at, row.size)
        if dropped:
            if context is not None or score:
                raise UserError(
                    "dropped: no tokens can be dropped from a context or from a prompt that is scored"
                )
            if reason := refusal(host, self._pool.knows_positions):
                raise UserError(reason)
        _, stop_ids = stop_tokens_of(sampling.stop, self._tokenizer)
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *stop_ids)))
        sampling = dataclasses.replace(sampling, stop_token_ids=stops)
        ends = sampling.stop_tokens(self._model.config.eos_ids)
        check_space(sampling, ends, self._model.config.vocab_size)
        return [
            self._queue(
                Request(
                    row, sampling, number, self._arrivals, ends, self._tokenizer,
                    None if constraint is None else constraint(), context,
                    row.size if kept is None else min(kept, row.size), dropped=dropped, dropped_at=dropped_at,
                    scores=score, expected=expected,
                )
            )
            for number in range(sampling.n)
        ]  # fmt: skip

    def _queue(self, request: Request) -> Request:
        with use_mesh(self._model):
            self._scheduler.queue(request)
        self._arrivals += 1
        return request

    def longest_answer(self, prompt: int, context: str | None = None) -> int:
        """Return the most tokens, at least 1, that an answer to a prompt of `prompt` tokens may have so that the pool
        is expected to have pages for it. context: the name of the context that the prompt continues."""
        fork = None if context is None else self._forks.named.get(context)
        size = prompt + (0 if fork is None else fork.tokens.size)
        with use_mesh(self._model):
            pages = self._pool.layout.pages - self._forks.named_pages
            longest = bisect.bisect_right(
                range(1, self.max_length - size + 1),
                pages,
                key=lambda answer: self._scheduler.pages_needed(size, size + answer - 1, fork),
            )
        return max(1, longest)

    def holds(self, tokens: int) -> tuple[int, int]:
        """Return how many requests of `tokens` tokens, prompt and answer, are expected to fit into the pool at once,
        and how many would fit with a full cache in a pool of as many bytes."""
        layout, pages = self._pool.layout, self._pool.layout.pages
        full = np.full((layout.layers, 1, layout.kv_heads), max(0, tokens - layout.window + 1))
        with use_mesh(self._model):
            each, read = self._page_counts.at_end(tokens, tokens), self._page_counts.while_read(tokens)
            each_full = self._page_counts.held(full, np.array([tokens]))
        others = max(0, pages - read) // max(each, 1)
        return min(others + (read <= pages), pages // max(each, 1)), pages // max(each_full, 1)

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
            UserError: the name is taken; otherwise as in `submit`.
            CapacityError: as in `submit`.
        """
        if name in self._forks.named or any(
            request.reads and request.context == name for request in self._scheduler.unanswered
        ):
            raise UserError(f"a context {shown(name)} was read before")
        (row,) = token_rows([prompt], self._model.config.vocab_size, self._tokenizer, "beginning")
        if row.size >= self.max_length:
            raise UserError(f"a context of {row.size} tokens leaves nothing of max_length={self.max_length}")
        sampling = SamplingParams(max_new_tokens=1)
        return self._queue(Request(row, sampling, 0, self._arrivals, (), context=name, reads=True))

    @property
    def contexts(self) -> dict[str, int]:
        """The number of tokens of each context that is kept, by name."""
        return {name: fork.tokens.size for name, fork in self._forks.named.items()}

    def forget(self, context: str | None = None) -> None:
        """Free the pages of a context. Prompts that continue it and were not begun yet end. None frees the pages of all
        ends of prompts that later prompts could continue.

        Raises:
            UserError: the context was not read.
        """
        if context is not None and context not in self._forks.named:
            raise UserError(f"no context {shown(context)} was read")
        with use_mesh(self._model):
            if context is None:
                self._forks.release_unnamed()
            else:
                self._forks.release(context)

    @property
    def busy(self) -> bool:
        """True while there is a request that has not ended."""
        return self._scheduler.busy

    @property
    def stats(self) -> EngineStats:
        """The engine's requests and pages now."""
        pages, scheduler = self._pool.layout.pages, self._scheduler
        return EngineStats(
            running=len(self._slots.running),
            waiting=len(scheduler.unanswered),
            paused=len(scheduler.paused),
            forks=len(self._forks),
            pages=pages - self._pool.free,
            pool_pages=pages,
        )

    def step(self) -> None:
        """Take a turn (`kvjax.engine.scheduler`)."""
        with use_mesh(self._model):
            self._scheduler.step()

    @named_arguments(where="Engine.warm_up")
    def warm_up(self, *, constrained: bool = False, say: Callable[[str], None] = lambda line: None) -> None:
        """Compile the programs that requests will run, before the first one comes: prompts of every compiled size,
        greedy and other sampling, a pause and, where a policy compacts, questions about a context.

        constrained: True if answers will have constraints.
        say: takes a line before each size of prompts.
        """
        answer = min(2 * self.block, self.max_length - 1)
        longest = self.max_length - answer
        sizes = {min(size, longest) for size in (*SIZES, self.chunk) if size <= self.chunk}
        host = self._policy.host
        if host.schedule is not None:
            # compactions are compiled for the longest head cache
            size = 1
            while size < longest:
                sizes.add(size := min(bucket(size + 1), longest))
        greedy = SamplingParams(max_new_tokens=answer, ignore_eos=True)
        sampled = dataclasses.replace(greedy, temperature=1.0, logprobs=1)
        vocabulary = self._model.config.vocab_size
        others: list[tuple[SamplingParams, Any]] = [(sampled, None)]
        if constrained:
            others.append((sampled, lambda: Anything(vocabulary)))
        context = None
        if not self._reader.reuses:
            self.read_context(context := "warm_up", [0])
            self._run()
        for count, size in enumerate(sorted(sizes), 1):
            say(f"Warming up with prompts of {size:,} tokens ({count} of {len(sizes)})")
            self._try(np.zeros(size, np.int32), greedy, pausing=count == 1)
            for sampling, constraint in others:
                self._try(np.zeros(size, np.int32), sampling, constraint=constraint)
            # decoding does not depend on the prompt's size, and the first token is drawn where the prompt is read
            others, greedy = [], dataclasses.replace(greedy, max_new_tokens=1)
            self.forget()
            if size < longest:
                # a prompt that continues an earlier one
                if context is None:
                    self._try([0], greedy)
                rest = np.zeros(size if context is not None else size + 1, np.int32)
                self._try(rest, greedy, context=context)
            if host.schedule is None and host.selection is None:
                self._try(np.zeros(size, np.int32), greedy, score=True)
            self.forget()
        if context is not None:
            self.forget(context)
        if longest > 1 and not refusal(host, self._pool.knows_positions):
            self._try([0, 0], greedy, dropped=((0, 1),), dropped_at=1)
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
                    self._scheduler.pause(self._slots.running[0][0])
                pausing = False
