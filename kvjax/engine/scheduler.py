"""The scheduler: which requests run, and the turns of the engine.

A turn ends what was cancelled, resumes a paused answer if it fits, reads a chunk of one waiting prompt, and decodes a
block of tokens in all running slots. The host looks at a block's tokens while the next one runs.

A request begins when the pages that it is expected to take are free. If pages run short nevertheless, the prompt that
is being read goes back into the queue. If none is being read, the youngest answer is copied to host memory and resumed
later. An answer that runs alone ends.
"""

import collections

import numpy as np

from kvjax.cache import CapacityError
from kvjax.engine.forks import Fork, Forks
from kvjax.engine.pages import PageCounts
from kvjax.engine.pool import HostSequence, Pool
from kvjax.engine.reader import Reader
from kvjax.engine.request import Request
from kvjax.engine.slots import Paused, Slots
from kvjax.mesh import on_host
from kvjax.policies.policy import Policy


class Scheduler:
    """The requests of an engine: those that wait, the one whose prompt is being read, those that run and those that are
    paused. All methods need the model's mesh."""

    def __init__(
        self,
        host: Policy,
        pool: Pool,
        slots: Slots,
        forks: Forks,
        reader: Reader,
        page_counts: PageCounts,
        block: int,
    ):
        self._host, self._pool, self._slots, self._forks = host, pool, slots, forks
        self._reader, self._page_counts, self._block = reader, page_counts, block
        self.waiting: collections.deque[Request] = collections.deque()
        """Requests that are not begun."""
        self.paused: list[Paused] = []
        """Answers in host memory, the oldest first."""
        self._returned: Request | None = None
        """The last request whose prompt went back into the queue. It is begun again once no answer runs."""

    @property
    def unanswered(self) -> list[Request]:
        """The requests that are not begun, or whose prompt is being read."""
        return [*self.waiting, *([] if self._reader.request is None else [self._reader.request])]

    @property
    def busy(self) -> bool:
        """True while there is a request that has not ended."""
        return bool(self.waiting or self.paused or self._reader.request or self._slots.busy)

    def queue(self, request: Request) -> None:
        """Let a request wait for its turn. Raises CapacityError if it is expected not to fit into the pool, even
        alone."""
        context = None if request.reads else request.context
        fork = None if context is None else self._forks.named.get(context)
        need = self.pages_needed(request.prompt.size, request.max_length, fork)
        pages = self._pool.layout.pages - self._forks.named_pages
        if need > pages:
            raise CapacityError(
                f"a prompt of {request.prompt.size} tokens is expected to take {need} pages, and the pool has {pages} "
                "for it: give a larger capacity"
            )
        self.waiting.append(request)

    def pages_needed(self, prompt: int, tokens: int, fork: Fork | None) -> int:
        """Return the pages that a sequence of `tokens` tokens, of which `prompt` are its prompt, is expected to take.
        The pages of the fork that it continues do not count."""
        if fork is None:
            return max(self._page_counts.while_read(prompt), self._page_counts.at_end(tokens, prompt))
        length, counted = on_host(fork.row.layers.length), on_host(fork.row.counted)
        growth = self._page_counts.growth(length, counted, tokens - on_host(fork.row.seen))
        return self._page_counts.copied(length, counted) + growth

    def step(self) -> None:
        """Take a turn."""
        self._end_cancelled()
        self._resume()
        self._read()
        count = self._affordable_tokens()
        if count == 0:
            self._slots.look_at_block()
            count = self._affordable_tokens()
        if count:
            self._slots.decode(count)
        elif self._slots.running:
            self._make_room()

    def _end_cancelled(self) -> None:
        for request in [x for x in self.waiting if x.cancelled]:
            request.finish_reason = "abort"
            self.waiting.remove(request)
        for paused in [x for x in self.paused if x.request.cancelled]:
            paused.request.finish_reason = "abort"
            self.paused.remove(paused)
        if (request := self._reader.request) is not None and request.cancelled:
            request.finish_reason = "abort"
            self._reader.release()
        for slot, answer in self._slots.running:
            if answer.cancelled:
                self._slots.end(slot, "abort")

    # ---- pages

    def _fits(
        self,
        tokens: int = 0,
        read: int = 0,
        paused: HostSequence | None = None,
        pages: int = 0,
        keep: Fork | None = None,
    ) -> bool:
        """Return True if the pool has enough free pages. Unnamed forks other than `keep` are dropped to make room.

        Args:
            tokens: tokens that each running slot decodes, after the block that is on its way, and that `paused` does.
            read: tokens that are read of the prompt that is being read.
            paused: a sequence in host memory, whose pages are needed too.
            pages: pages that are needed in addition.
        """
        if self._host.compacts_answers and not self._pool.is_counted:
            # that block may free pages: the free count and the lengths must be of the same time
            self._slots.look_at_block()
        parts = [(self._slots.length, self._slots.counted, self._slots.tokens_to_come(tokens))]
        if self._reader.request is not None:
            parts.append((*self._reader.sizes, np.array([read])))
        if paused is not None:
            parts.append((*paused.sizes, np.array([tokens])))
            pages += self._page_counts.held(*paused.sizes)
        length, counted, to_come = zip(*parts, strict=True)
        growth = self._page_counts.growth(
            np.concatenate(length, 1), np.concatenate(counted), np.concatenate(to_come)
        )
        return self._forks.make_room(growth + pages, keep)

    def _affordable_tokens(self) -> int:
        """Return how many tokens all running slots can decode at once. It is 0 if there are too few pages for one token
        of each, or if none runs."""
        count = self._block if self._slots.running else 0
        while count and not self._fits(count):
            count //= 2
        return count

    def _make_room(self) -> None:
        """Free pages, since the running answers have too few for one more token."""
        if self._reader.request is not None:
            self._returned = self._reader.request
            self.waiting.appendleft(self._returned)
            self._reader.release()
            return
        slot, _ = max(self._slots.running, key=lambda pair: pair[1].arrival)
        if len(self._slots.running) == 1:
            self._slots.end(slot, "capacity")
        else:
            self.pause(slot)

    def pause(self, slot: int) -> None:
        """Pause the answer of a slot, to be resumed later."""
        self._slots.look_at_block()
        if slot not in self._slots.vacant:
            self.paused.append(self._slots.pause(slot))
            self.paused.sort(key=lambda paused: paused.request.arrival)

    def _resume(self) -> None:
        """Put the oldest paused answer into a slot again, if there are a vacant slot and enough pages."""
        if not self.paused or not self._slots.vacant:
            return
        request, sequence = self.paused[0]
        # no other request is left whose end would free pages: no prompt is read while answers are paused
        alone = not self._slots.running
        if self._fits(1 if alone else self._block, paused=sequence):
            self.paused.pop(0)
            self._slots.join(request, self._pool.copy_in(sequence))
        elif alone:
            self.paused.pop(0)
            length, counted = sequence.sizes
            local = min(int(counted[0]), self._pool.layout.window - 1)
            request.end("capacity", length, local, int(sequence.row.seen[0]))

    # ---- prompts

    def _read(self) -> None:
        """Read a chunk of the prompt that is being read, or of the next one that fits."""
        request = self._reader.request or self._begin_next()
        if request is None:
            return
        # the first call may drop forks: pages that the prompt shared with them alone need no copies any more
        while not any(self._fits(read=self._reader.tokens, pages=self._reader.copied) for _ in range(2)):
            if self._reader.shrink():
                continue
            if not self._slots.running:
                request.finish_reason = "capacity"
                self._reader.release()
            return
        if (sequence := self._reader.step()) is None:
            return
        if request.reads:
            self._forks.name(request, *sequence)
        else:
            self._slots.begin(request, *sequence)

    def _begin_next(self) -> Request | None:
        """Begin the next request, if there is a slot and its pages are expected to be free. Returns the request whose
        prompt is to be read; None if there is none."""
        running, counts = self._slots.running, self._page_counts
        if not self.waiting or self.paused or (self.waiting[0] is self._returned and running):
            return None
        request = self.waiting[0]
        if not self._slots.vacant and not request.reads:
            return None
        growth = sum(
            max(0, counts.at_end(answer.expected_length, answer.compacted) - self._slots.held(counts, slot))
            for slot, answer in running
        )
        context = None if request.reads else request.context
        if context is not None:
            fork = self._forks.named.get(context)
        elif request.reads or request.scores:
            fork = None
        else:
            fork = self._forks.longest(request.prompt, request.dropped)
        need = self.pages_needed(request.prompt.size, request.expected_length, fork)
        fits = self._fits(pages=growth + need, keep=fork)
        if running and not fits:
            return None
        self.waiting.popleft()
        if context is not None and (fork is None or not fits):
            request.finish_reason = "abort" if fork is None else "capacity"
            return None
        if (sequence := self._reader.begin(request, fork)) is not None:
            self._slots.begin(request, *sequence)
        return self._reader.request
