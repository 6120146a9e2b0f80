"""The prompt that is being read, one chunk per turn, as a cache of one sequence over the engine's pool."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Array, Int

from kvjax.engine.forks import Fork, Forks
from kvjax.engine.pages import PageCounts
from kvjax.engine.pool import Pool
from kvjax.engine.request import Request, Spans
from kvjax.engine.rows import Row
from kvjax.errors import UserError
from kvjax.inference.forward import SIZES
from kvjax.inference.prefill import Steps, next_step, reading
from kvjax.inference.scoring import scoring
from kvjax.mesh import on_host
from kvjax.models.decoder import Decoder
from kvjax.policies.compiled import CompiledPolicy
from kvjax.policies.schedule import Schedule


class Reader:
    """Reads the prompt of one request after another.

    Without a schedule, a prompt is first read up to `Request.kept`, where a fork is kept for later prompts, and then to
    its end. With a schedule no fork is kept, since what the eviction decides at a prompt's end holds for that prompt
    alone.
    """

    def __init__(
        self,
        model: Decoder,
        policy: CompiledPolicy,
        pool: Pool,
        forks: Forks,
        page_counts: PageCounts,
        chunk: int,
    ):
        self._model, self._policy, self._pool = model, policy, pool
        self._forks, self._page_counts, self._chunk = forks, page_counts, chunk
        self.reuses = policy.host.schedule is None
        """True if forks are kept at the ends of prompts."""
        self.request: Request | None = None
        """The request whose prompt is being read."""
        self._row: Row
        self._parts: Iterator[tuple[Int[np.ndarray, " _"], Spans]]
        self._spans: Spans = ()
        """The tokens that are dropped before the next step."""
        self._dropped: Spans = ()
        """The tokens that the sequence has dropped."""
        self._steps: Steps
        self._part: Int[np.ndarray, " _"]
        self._left = 0
        """Tokens of the part that are not read yet."""
        self._size = chunk
        """The most tokens of a step, without compactions in chunks."""
        self._continues = False
        """True if the sequence continues a prompt whose end was read."""

    @property
    def sizes(self) -> tuple[Int[np.ndarray, "l 1 k"], Int[np.ndarray, " 1"]]:
        """The retained entries of the sequence's heads, and the tokens that its window counts."""
        return on_host(self._row.layers.length), on_host(self._row.counted)

    @property
    def copied(self) -> int:
        """The most shared pages that the next step copies because it moves their entries."""
        return self._pool.shared(self._row, self._spans[0][0]) if self._spans else 0

    @property
    def tokens(self) -> int:
        """The most tokens that the next step runs."""
        read_behind = 0 if self._schedule is None else self._schedule.temporary_tokens
        return min(self._step_tokens, self._left) + read_behind

    @property
    def _schedule(self) -> Schedule | None:
        host = self._policy.host
        return None if self._continues and not host.compacts_answers else host.schedule

    @property
    def _step_tokens(self) -> int:
        """The most tokens of the prompt that a step reads."""
        schedule = self._schedule
        in_chunks = schedule is not None and schedule.trigger.in_chunks
        return schedule.trigger.chunk if in_chunks else self._size  # pyright: ignore[reportOptionalMemberAccess]

    def begin(self, request: Request, fork: Fork | None) -> tuple[Row, Array] | None:
        """Begin with a request's prompt, after the tokens of a fork. If the fork has read the whole prompt, return the
        sequence and the logits after it."""
        row = None if fork is None else self._forks.copy(fork.row)
        request.cached = 0 if row is None or fork is None else fork.tokens.size
        prompt, start = request.prompt, request.cached
        if fork is not None and row is not None and start == prompt.size:
            return row, fork.logits
        self.request, self._continues = request, row is not None
        self._row = self._pool.begin() if row is None else row
        kept = self.reuses and not request.scores and request.kept > start
        self._dropped = () if row is None or fork is None else fork.dropped
        spans = tuple(x for x in request.dropped if x not in self._dropped)
        dropped_at = max(start, request.dropped_at) if spans else start
        cuts = {dropped_at, request.kept} if kept else {dropped_at}
        ends = sorted({x for x in cuts if x > start} | {prompt.size})
        begins = [start, *ends]
        self._parts = iter(
            (prompt[begin:end], spans if begin == dropped_at else ())
            for begin, end in zip(begins, ends, strict=False)
        )
        self._next_part()
        return None

    def _next_part(self) -> bool:
        """Begin with the next part of the prompt, if there is one."""
        part, self._spans = next(self._parts, (None, ()))
        if part is not None:
            self._part, self._left, self._size = part, part.size, self._chunk
            self._steps = self._steps_of(part)
        return part is not None

    def shrink(self) -> bool:
        """Make the next step smaller, so that it takes fewer pages. Return False if it cannot be smaller: a schedule
        sees whole prompts or chunks, and a scored prompt whole parts."""
        smaller = [size for size in SIZES if size < min(self._size, self._left)]
        if not smaller or self._schedule is not None or self.request is None or self.request.scores:
            return False
        self._size = smaller[-1]
        self._steps = self._steps_of(self._part[-self._left :])
        return True

    def _steps_of(self, part: Int[np.ndarray, " _"]) -> Steps:
        request, size = self.request, self._size
        assert request is not None
        if request.scores:
            request.prompt_logprobs.clear()
            alternatives = request.sampling.logprobs or 0
            return scoring(self._model, self._policy, part, size, alternatives, request.prompt_logprobs)
        return reading(self._model, self._policy, [part], size, grows=False, continues=self._continues)

    def step(self) -> tuple[Row, Array] | None:
        """Take a step. Once the whole prompt is read, return the sequence and the logits after it; the reader is then
        free. If tokens cannot be dropped yet, the request ends, and the reader is free too."""
        request = self.request
        assert request is not None
        if self._spans:
            try:
                for span in self._spans:
                    self._row = self._pool.without(self._row, *span)
            except UserError:
                request.finish_reason = "abort"
                self.release()
                return None
            self._spans, self._dropped = (), request.dropped
        size = self._step_tokens
        cache, logits = next_step(self._steps, self._pool.alone(self._row, continues=self._continues))
        self._row, self._left = self._pool.keep(cache), max(0, self._left - size)
        if logits is None:
            if self._size < self._chunk:  # there may be more pages now
                self._size, self._steps = self._chunk, self._steps_of(self._part[-self._left :])
            return None
        self._row, self._continues = self._pool.decoding(cache), True
        length, seen = on_host(self._row.layers.length), int(on_host(self._row.seen)[0])
        if not self._dropped:
            self._page_counts.measure(length, seen)
        if self.reuses and not request.reads and not request.scores and seen == request.kept:
            self._forks.keep(request.prompt[: request.kept], self._row, logits, self._dropped)
        if self._next_part():
            return None
        self.request = None
        return self._row, logits

    def release(self) -> None:
        """Stop reading, and free the pages."""
        self._pool.release(self._row)
        self.request = None
