"""Measure one policy on one set of contexts: read them, ask their questions, and log the entries held at each call."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from kvjax import cache as caches
from kvjax.cache import Cache
from kvjax.cli.stopwatch import Pace, Stopwatch
from kvjax.errors import UserError
from kvjax.evaluate.answering import Answer, answer
from kvjax.evaluate.footprint import occupancy
from kvjax.evaluate.interval import mean_interval
from kvjax.evaluate.joint_eviction import JointEviction, own_metadata
from kvjax.inference import reconstruction
from kvjax.inference.eviction import TokenRows, at_prompt_end
from kvjax.inference.footprint_log import Call, footprint_log
from kvjax.inference.forward import drop_observation_state, feed
from kvjax.inference.prefill import CHUNK, prefill
from kvjax.mesh import use_mesh
from kvjax.models.decoder import Decoder
from kvjax.policies.base import BIAS, Reconstruction
from kvjax.policies.compiled import CompiledPolicy
from kvjax.policies.eviction.wrapper import innermost
from kvjax.policies.policy import Policy
from kvjax.struct import changed
from kvjax.tasks.sample import NO_QUESTION, Question, Sample, Tokens, as_tokens, asked_after

Item = TypeVar("Item")


@dataclass(frozen=True)
class Manner:
    """Settings for reading contexts."""

    batch: int = 16
    """The most contexts in a batch."""
    chunk: int = CHUNK
    """Tokens of a prefill call."""
    capacity: int | str | None = None
    page_size: int | None = None
    watch: Stopwatch = field(default_factory=Stopwatch)
    """Times the work."""


@dataclass(frozen=True)
class Drawn:
    """Statistics of problems that were each answered several times, every answer being right or wrong. pass@1 is the
    mean over problems and answers."""

    draws: int
    """The number of answers to each problem."""
    error: float | None
    """The standard error of pass@1 over the answers to these problems: √(Σ p(1 − p) / (draws − 1)) / problems, p being
    a problem's own pass@1. None if each problem has one answer."""
    cut: float
    """The share of answers that the length limit cut off. They count as wrong."""
    without: float
    """The share of answers that ended without a conclusion. They count as wrong, too."""


@dataclass(frozen=True)
class Measurement:
    """Scores of a policy, and the entries and memory it held."""

    score: float
    """The mean score of the answers, from 0 to 1."""
    interval: tuple[float, float] | None
    """The 95% interval of the score; None for contests, whose `drawn` has a standard error."""
    by_kind: dict[str, float]
    """The mean score by kind of question."""
    answers: int
    """The number of answers. Every token of a given text is one."""
    perplexity: float | None
    """Perplexity of the texts that are given; None: there are none."""
    outputs: list[list[Tokens]]
    """The model's answers, by sample and question."""
    footprint: float
    """The KV footprint, as a mean over the answers like the next two (see `Occupancy`)."""
    footprint_held: float
    """The footprint with the tokens that were only read to observe and then removed."""
    peak: float
    """The most entries at one time, relative to full attention."""
    kv_ratio: float
    """Entries relative to a full cache after the contexts were read, or the answers to contests written."""
    kv_ratios: Float[np.ndarray, "l k"]
    """`kv_ratio` by layer and kv head."""
    rates: Float[np.ndarray, "l k"]
    """Share of the tokens that were retained when they left the window."""
    bytes: int
    """Bytes of a context's pages in use."""
    prefill: float | None
    """Tokens read per second without compilation; None if there was nothing to time."""
    decode: float | None
    """Tokens decoded per second by a whole batch, without compilation; None if there was nothing to time."""
    drawn: Drawn | None = None
    """Statistics of a contest's sampled answers."""


@dataclass(frozen=True)
class Reading:
    """Contexts in a cache, the entries held while they were read, and the time that it took."""

    cache: Cache
    """The cache after the contexts were read."""
    log: Sequence[Call]
    """Entries held at each call."""
    seconds: float
    """Duration of the reading, compaction included."""
    compiled: bool
    """True if programs were compiled in that time."""


def read(model: Decoder, policy: Policy, group: Sequence[Sample], manner: Manner) -> Reading:
    """Read contexts into a new cache, as the policy keeps them."""
    manner.watch.lap()
    with footprint_log() as log:
        cache = prefill(
            model,
            [sample.context for sample in group],
            policy=policy,
            max_new_tokens=max(sample.room for sample in group),
            capacity=manner.capacity,
            page_size=manner.page_size,
            chunk=manner.chunk,
            observers=_observers(policy, group),
        )
    jax.block_until_ready(cache)
    return Reading(cache, log, manner.watch.lap(), manner.watch.compiled)


def compact(
    model: Decoder,
    policy: Policy,
    reading: Reading,
    group: Sequence[Sample],
    watch: Stopwatch,
    *,
    reconstructed: bool = False,
) -> Reading:
    """Return a copy of contexts that were read without compaction, compacted as the policy does at the prompt's end.

    reconstructed: True if `reconstruct` returned the reading.
    """
    if policy.schedule is None:
        return dataclasses.replace(reading, cache=jax.tree.map(jnp.copy, reading.cache))
    observers = _observers(policy, group)

    def at_end(compiled: CompiledPolicy, cache: Cache, rows: TokenRows) -> Cache:
        run = partial(feed, model, compiled.host, compiled.read, chunk=CHUNK)
        steps = at_prompt_end(model, compiled, cache, rows, observers, run, reconstructed=reconstructed)
        return reconstruction.all_of(steps)

    return _continued(model, policy, reading, group, watch, at_end)


def reconstruct(
    model: Decoder, policy: Policy, reading: Reading, group: Sequence[Sample], watch: Stopwatch
) -> Reading:
    """Return a copy of contexts that were read without compaction, after the reconstruction passes. These are the same
    at all budgets."""

    def run(compiled: CompiledPolicy, cache: Cache, rows: TokenRows) -> Cache:
        return reconstruction.all_of(reconstruction.reconstruct(model, compiled, cache, rows))

    return _continued(model, policy, reading, group, watch, run)


def _continued(
    model: Decoder,
    policy: Policy,
    reading: Reading,
    group: Sequence[Sample],
    watch: Stopwatch,
    run: Callable[[CompiledPolicy, Cache, TokenRows], Cache],
) -> Reading:
    watch.lap()
    with use_mesh(model), footprint_log(reading.log) as log:
        copied = jax.tree.map(jnp.copy, reading.cache)
        cache = run(policy.compile(model), copied, [sample.context for sample in group])
    jax.block_until_ready(cache)
    seconds = watch.lap()
    return Reading(cache, log, reading.seconds + seconds, reading.compiled or watch.compiled)


def _observers(policy: Policy, group: Sequence[Sample]) -> list[Tokens] | None:
    """Return the questions that are known when their contexts are compressed, for a policy that observes with them;
    else None."""
    return [sample.questions[0].prompt for sample in group] if group[0].known and policy.observes else None


def measure(model: Decoder, policy: Policy, samples: Sequence[Sample], manner: Manner) -> Measurement:
    """Read each context into a cache, then answer its questions one by one, greedily, each from that same cache. In a
    conversation each question follows all that was asked and answered before.
    """
    tally = Tally()
    for group in groups(samples, manner.batch):
        tally.add(model, policy, read(model, policy, group, manner), group, manner.watch)
    return tally.total()


def measured_alone(policy: Policy) -> bool:
    """Return True if a policy's reading serves no other policy, or needs guidance that is read after the context."""
    guided = policy.schedule is not None and bool(policy.schedule.trigger.guidance)
    return guided or policy.max_entries is not None or BIAS in policy.metadata


def measure_together(
    model: Decoder, policies: Sequence[Sequence[Policy]], samples: Sequence[Sample], manner: Manner
) -> list[Measurement]:
    """Measure methods that read alike until a prompt's end, each as its policies of several budgets. Every group of
    contexts is read once, and compacted anew for each policy. Returns the measurements, policy after policy. If there
    are several, they have no reading speed, since the reading does all methods' work. Raises UserError for a policy
    that is `measured_alone`."""
    assert model.config.head_order is None, "what is compiled twice below would be placed twice"
    methods = [own[0] for own in policies]
    for policy in methods:
        if measured_alone(policy):
            raise UserError(
                f"{policy.name}: max_entries, biases and tokens that observe are measured by themselves"
            )
    reader = changed(
        methods[0],
        eviction=JointEviction(tuple(innermost(method.compile(model).compact) for method in methods)),
        schedule=None,
        selection=next((method.selection for method in methods if method.selection is not None), None),
    )
    tallies = [[Tally() for _ in own] for own in policies]
    for group in groups(samples, manner.batch):
        whole = read(model, reader, group, manner)
        for index, own in enumerate(policies):
            read_again = isinstance(innermost(methods[index].eviction), Reconstruction)
            uncompacted = _own_reading(whole, index, methods[index])
            if read_again:
                uncompacted = reconstruct(model, methods[index], uncompacted, group, manner.watch)
            for policy, tally in zip(own, tallies[index], strict=True):
                reading = compact(model, policy, uncompacted, group, manner.watch, reconstructed=read_again)
                tally.add(model, policy, reading, group, manner.watch)
                del reading  # two compacted caches would be held beside the whole one
            del uncompacted
        del whole
    totals = [tally.total() for own in tallies for tally in own]
    return totals if len(totals) == 1 else [dataclasses.replace(one, prefill=None) for one in totals]


def _own_reading(reading: Reading, index: int, method: Policy) -> Reading:
    """Return contexts that were read together, with one method's state, observation buffer and entry metadata alone."""
    layers, pages = reading.cache.layers, reading.cache.pages
    states = dataclasses.replace(layers.state, eviction=layers.state.eviction[index])
    layers = dataclasses.replace(layers, state=states, numbers=own_metadata(layers.numbers, index))
    pages = dataclasses.replace(
        pages,
        bounds=None if method.selection is None else pages.bounds,
        metadata=own_metadata(pages.metadata, index),
    )
    own = {"layers": layers, "pages": pages, "observations": reading.cache.observations[index]}
    return dataclasses.replace(reading, cache=dataclasses.replace(reading.cache, **own))


def groups(samples: Sequence[Item], batch: int) -> list[Sequence[Item]]:
    """Return the samples, or their indices, `batch` at a time."""
    return [samples[start : start + batch] for start in range(0, len(samples), batch)]


def for_answers(model: Decoder, policy: Policy, cache: Cache) -> tuple[CompiledPolicy, Cache]:
    """Return the policy and the cache (donated) that answers come from, without the state that only compactions need.
    All evictions then share one program for answers."""
    later = changed(policy, eviction=None, schedule=None).compile(model)
    return later, drop_observation_state(cache, later.decode)


class Tally:
    """Sums over groups of contexts and their answers."""

    def __init__(self):
        self._scores: dict[str, list[float]] = defaultdict(list)
        self._outputs: list[list[Tokens]] = []
        self._right: list[float] = []
        """Sum of the scores of each context."""
        self._counts: list[int] = []
        """Number of scores of each context."""
        self._log_likelihood, self._given = 0.0, 0
        self._footprints: list[tuple[float, float, float]] = []
        self._entries: list[Float[np.ndarray, "l k"]] = []
        self._retained, self._left, self._tokens = np.zeros(()), 0, 0
        self._bytes, self._contexts, self._answers = 0, 0, 0
        self._cut, self._without = 0, 0
        self.reading, self.decoding = Pace(), Pace()

    def add(
        self, model: Decoder, policy: Policy, reading: Reading, group: Sequence[Sample], watch: Stopwatch
    ) -> None:
        """Ask the questions of a group of contexts, which are in their cache (donated), and add the answers.

        Raises UserError for a policy that compacts while decoding.
        """
        if policy.compacts_answers:
            raise UserError(f"{policy.name} compacts while it decodes, which is not measured here")
        tokens = self.add_entries(reading.cache, policy, len(group))
        self.reading.add(tokens, reading.seconds, reading.compiled)
        later, cache = for_answers(model, policy, reading.cache)
        before = [as_tokens([])] * len(group)
        for questions in itertools.zip_longest(*(x.questions for x in group), fillvalue=NO_QUESTION):
            if group[0].conversation:
                questions = tuple(map(asked_after, questions, before))
            options = {"stop": model.config.eos_ids, "pace": self.decoding, "watch": watch}
            with footprint_log(reading.log) as log:
                group_answers, cache = answer(model, later, cache, questions, **options)
            self.add_answers(questions, group_answers, log)
            before = [
                np.concatenate([q.prompt, x.tokens]) for q, x in zip(questions, group_answers, strict=True)
            ]

    def add_entries(self, cache: Cache, policy: Policy, count: int) -> int:
        """Add the sizes of a group of `count` contexts that are in their cache. Returns the number of their tokens."""
        sizes = caches.stats(cache, count)
        local = np.minimum(sizes.tokens, policy.window - 1)
        self._outputs += [[] for _ in range(count)]
        self._right += [0.0] * count
        self._counts += [0] * count
        self._entries.append(sizes.entries.sum(1))
        self._retained = self._retained + (sizes.entries - local[:, None]).sum(1)
        self._left += int((sizes.tokens - local).sum())
        self._tokens += int(sizes.tokens.sum())
        self._bytes += sizes.bytes // sizes.pool_pages * sizes.pages
        self._contexts += count
        return int(sizes.tokens.sum())

    def add_answers(
        self, questions: Sequence[Question], answers: Sequence[Answer], log: Sequence[Call]
    ) -> None:
        """Add the answers to a question of each context of the group that was added last. `log`: the footprint log from
        the contexts' first token on."""
        for row, (question, one) in enumerate(zip(questions, answers, strict=True)):
            if question is NO_QUESTION:
                continue
            context = row - len(questions)
            score = 0.0 if one.cut else question.score(one.tokens)
            # every token of a given text is an answer
            count = question.answer_tokens if question.given else 1
            self._outputs[context].append(one.tokens)
            self._right[context] += count * score
            self._counts[context] += count
            self._scores[question.kind].append(score)
            if question.concluded is not None:
                self._cut += one.cut
                self._without += not one.cut and question.concluded(one.tokens) is None
            if question.given:
                self._given += question.answer_tokens
                self._log_likelihood += one.log_likelihood
            else:
                self._answers += 1
            held = occupancy(log, row)
            self._footprints.append((held.footprint, held.footprint_held, held.peak))

    def total(self) -> Measurement:
        everything = [score for group in self._scores.values() for score in group]
        kv_ratios = np.sum(self._entries, 0) / self._tokens
        footprint, footprint_held, peak = np.mean(self._footprints, 0)
        return Measurement(
            score=float(np.mean(everything)),
            interval=mean_interval(self._right, self._counts),
            by_kind={kind: float(np.mean(scores)) for kind, scores in sorted(self._scores.items())},
            answers=self._answers + self._given,
            perplexity=math.exp(-self._log_likelihood / self._given) if self._given else None,
            outputs=self._outputs,
            footprint=float(footprint),
            footprint_held=float(footprint_held),
            peak=float(peak),
            kv_ratio=float(kv_ratios.mean()),
            kv_ratios=kv_ratios,
            rates=self._retained / max(self._left, 1),
            bytes=self._bytes // self._contexts,
            prefill=self.reading.per_second,
            decode=self.decoding.per_second,
        )

    def drawn(self, draws: int) -> Drawn:
        """Return the statistics of problems that were each answered `draws` times."""
        own = [float(np.mean(scores)) for scores in self._scores.values()]
        spread = [p * (1 - p) for p in own]
        error = math.sqrt(sum(spread) / (draws - 1)) / len(own) if draws > 1 else None
        return Drawn(draws, error, self._cut / self._answers, self._without / self._answers)
