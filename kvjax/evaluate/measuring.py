"""Measure a policy on a set of contexts: read them, ask their questions, and log the entries held at each call."""

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
from kvjax.evaluate.joint_eviction import JointEviction, metadata_of_method
from kvjax.inference import reconstruction
from kvjax.inference.footprint_log import Call, footprint_log
from kvjax.inference.forward import drop_observation_state, feed
from kvjax.inference.prefill import CHUNK, prefill
from kvjax.inference.triggers import TokenRows, at_prompt_end
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
class MeasureSettings:
    """Settings for reading and batching contexts."""

    batch: int = 16
    """The most contexts in a batch."""
    chunk: int = CHUNK
    """Tokens of a prefill call."""
    capacity: int | str | None = None
    page_size: int | None = None
    watch: Stopwatch = field(default_factory=Stopwatch)
    """Times the work."""


@dataclass(frozen=True)
class ContestStatistics:
    """Statistics of problems that were each answered several times. Every answer is right or wrong. pass@1 is the mean
    over problems and answers."""

    draws: int
    """The number of answers to each problem."""
    error: float | None
    """The standard error of pass@1 over the answers to these problems: √(Σ p(1 − p) / (draws − 1)) / problems, where
    p is the pass@1 of a problem. None if each problem has one answer."""
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
    """The number of answers. Every token of a teacher-forced text counts as one."""
    perplexity: float | None
    """Perplexity of the teacher-forced texts; None if there are none."""
    outputs: list[list[Tokens]]
    """The model's answers, by sample and question."""
    footprint: float
    """The KV footprint, as a mean over the answers like the next two (see `Occupancy`)."""
    footprint_held: float
    """The footprint with the tokens that were only read to observe and then removed."""
    peak: float
    """The most entries at one time, relative to full attention."""
    kv_ratio: float
    """Entries relative to a full cache, when the contexts (or the answers to contests) end."""
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
    drawn: ContestStatistics | None = None
    """Statistics of a contest's sampled answers."""


@dataclass(frozen=True)
class Reading:
    """A cache of contexts, the entries held while they were read, and the time that reading took."""

    cache: Cache
    """The cache after the contexts were read."""
    log: Sequence[Call]
    """Entries held at each call."""
    seconds: float
    """Duration of the reading, compaction included."""
    compiled: bool
    """True if programs were compiled in that time."""


def read(model: Decoder, policy: Policy, group: Sequence[Sample], settings: MeasureSettings) -> Reading:
    """Read contexts into a new cache under the policy."""
    settings.watch.lap()
    with footprint_log() as log:
        cache = prefill(
            model,
            [sample.context for sample in group],
            policy=policy,
            max_new_tokens=max(sample.tokens_after_context for sample in group),
            capacity=settings.capacity,
            page_size=settings.page_size,
            chunk=settings.chunk,
            observers=_observers(policy, group),
        )
    jax.block_until_ready(cache)
    return Reading(cache, log, settings.watch.lap(), settings.watch.compiled)


def compact(
    model: Decoder,
    policy: Policy,
    reading: Reading,
    group: Sequence[Sample],
    watch: Stopwatch,
    *,
    reconstructed: bool = False,
) -> Reading:
    """Return a compacted copy of a reading without compaction, as the policy compacts at the prompt's end.

    reconstructed: True if `reconstruct` returned the reading.
    """
    if policy.schedule is None:
        return dataclasses.replace(reading, cache=jax.tree.map(jnp.copy, reading.cache))
    observers = _observers(policy, group)

    def at_end(compiled: CompiledPolicy, cache: Cache, rows: TokenRows) -> Cache:
        run = partial(feed, model, compiled.host, compiled.read, chunk=CHUNK)
        steps = at_prompt_end(model, compiled, cache, rows, run, observers, reconstructed)
        return reconstruction.all_of(steps)

    return _continued(model, policy, reading, group, watch, at_end)


def reconstruct(
    model: Decoder, policy: Policy, reading: Reading, group: Sequence[Sample], watch: Stopwatch
) -> Reading:
    """Return a copy of a reading without compaction, after the reconstruction passes. They are the same at all
    budgets."""

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
    """Return the questions with which a policy observes: those known when their contexts are compressed. None for other
    policies and unknown questions."""
    return (
        [sample.questions[0].prompt for sample in group]
        if group[0].question_known and policy.observes
        else None
    )


def measure(
    model: Decoder, policy: Policy, samples: Sequence[Sample], settings: MeasureSettings
) -> Measurement:
    """Read each context into a cache, then answer its questions greedily, each from that same cache.

    In a conversation each question follows the earlier questions and answers.
    """
    tally = Tally()
    for group in groups(samples, settings.batch):
        tally.add(model, policy, read(model, policy, group, settings), group, settings.watch)
    return tally.total()


def measured_alone(policy: Policy) -> bool:
    """Return True if a policy cannot share its reading with others, or reads guidance after the context."""
    guided = policy.schedule is not None and bool(policy.schedule.trigger.guidance)
    return guided or policy.max_entries is not None or BIAS in policy.metadata


def measure_together(
    model: Decoder, policies: Sequence[Sequence[Policy]], samples: Sequence[Sample], settings: MeasureSettings
) -> list[Measurement]:
    """Measure methods that read contexts alike, each at several budgets. Return the measurements, policy after policy.

    `policies` has a list for each method, with a policy for each budget. Every group of contexts is read once, and
    compacted anew for each policy. Several measurements have no reading speed, since the reading does the work of all
    methods. Raises UserError for a policy that is `measured_alone`.
    """
    assert model.config.head_order is None, (
        "policies are compiled twice below, which would reorder heads twice"
    )
    methods = [budgets[0] for budgets in policies]
    for policy in methods:
        if measured_alone(policy):
            raise UserError(
                f"{policy.name}: policies with max_entries, biases or guidance cannot share a reading"
            )
    reader = changed(
        methods[0],
        eviction=JointEviction(tuple(innermost(method.compile(model).compact) for method in methods)),
        schedule=None,
        selection=next((method.selection for method in methods if method.selection is not None), None),
    )
    tallies = [[Tally() for _ in budgets] for budgets in policies]
    for group in groups(samples, settings.batch):
        joint = read(model, reader, group, settings)
        for index, budgets in enumerate(policies):
            reconstructs = isinstance(innermost(methods[index].eviction), Reconstruction)
            uncompacted = _reading_of_method(joint, index, methods[index])
            if reconstructs:
                uncompacted = reconstruct(model, methods[index], uncompacted, group, settings.watch)
            for policy, tally in zip(budgets, tallies[index], strict=True):
                reading = compact(
                    model, policy, uncompacted, group, settings.watch, reconstructed=reconstructs
                )
                tally.add(model, policy, reading, group, settings.watch)
                del reading  # free its cache before the next one is made
            del uncompacted
        del joint
    totals = [tally.total() for budgets in tallies for tally in budgets]
    return totals if len(totals) == 1 else [dataclasses.replace(total, prefill=None) for total in totals]


def _reading_of_method(joint: Reading, index: int, method: Policy) -> Reading:
    """Return a joint reading with the state, observation buffer and entry metadata of a single method."""
    layers, pages = joint.cache.layers, joint.cache.pages
    states = dataclasses.replace(layers.state, eviction=layers.state.eviction[index])
    layers = dataclasses.replace(layers, state=states, numbers=metadata_of_method(layers.numbers, index))
    pages = dataclasses.replace(
        pages,
        bounds=None if method.selection is None else pages.bounds,
        metadata=metadata_of_method(pages.metadata, index),
    )
    observations = joint.cache.observations[index]
    cache = dataclasses.replace(joint.cache, layers=layers, pages=pages, observations=observations)
    return dataclasses.replace(joint, cache=cache)


def groups(samples: Sequence[Item], batch: int) -> list[Sequence[Item]]:
    """Return the samples, or their indices, `batch` at a time."""
    return [samples[start : start + batch] for start in range(0, len(samples), batch)]


def for_answers(model: Decoder, policy: Policy, cache: Cache) -> tuple[CompiledPolicy, Cache]:
    """Return the policy and the cache (donated) for decoding answers, without the state that only compactions need.

    All evictions then share one program for answers.
    """
    decoding = changed(policy, eviction=None, schedule=None).compile(model)
    return decoding, drop_observation_state(cache, decoding.decode)


class Tally:
    """Sums over groups of contexts and their answers."""

    def __init__(self):
        self._scores: dict[str, list[float]] = defaultdict(list)
        self._outputs: list[list[Tokens]] = []
        self._sources: list[int] = []
        """Index of the original context of each context (`Sample.source`)."""
        self._right: list[float] = []
        """Sum of the scores of each context."""
        self._counts: list[int] = []
        """Number of scores of each context."""
        self._log_likelihood, self._forced_tokens = 0.0, 0
        self._footprints: list[tuple[float, float, float]] = []
        self._entries: list[Float[np.ndarray, "l k"]] = []
        self._retained, self._left_window, self._tokens = np.zeros(()), 0, 0
        self._bytes, self._contexts, self._answers = 0, 0, 0
        self._cut, self._without = 0, 0
        self.reading, self.decoding = Pace(), Pace()

    def add(
        self, model: Decoder, policy: Policy, reading: Reading, group: Sequence[Sample], watch: Stopwatch
    ) -> None:
        """Ask the questions of a group of contexts from the reading's cache (donated), and add the answers.

        Raises UserError for a policy that compacts while decoding.
        """
        if policy.compacts_answers:
            raise UserError(f"{policy.name} compacts while decoding, which only contests measure")
        first = len(self._outputs)
        sources = [first + row if x.source is None else x.source for row, x in enumerate(group)]
        tokens = self.add_entries(reading.cache, policy, sources)
        self.reading.add(tokens, reading.seconds, reading.compiled)
        decoding, cache = for_answers(model, policy, reading.cache)
        before = [as_tokens([])] * len(group)
        for questions in itertools.zip_longest(*(x.questions for x in group), fillvalue=NO_QUESTION):
            if group[0].conversation:
                questions = tuple(map(asked_after, questions, before))
            options = {"stop": model.config.eos_ids, "pace": self.decoding, "watch": watch}
            with footprint_log(reading.log) as log:
                group_answers, cache = answer(model, decoding, cache, questions, **options)
            self.add_answers(questions, group_answers, log)
            before = [
                np.concatenate([q.prompt, reply.tokens])
                for q, reply in zip(questions, group_answers, strict=True)
            ]

    def add_entries(self, cache: Cache, policy: Policy, sources: Sequence[int]) -> int:
        """Add the entries of a group of contexts in a cache. Returns the number of their tokens.

        sources: the index of the original context of each (`Sample.source`). Answers about one original context are
        alike, which the interval takes into account.
        """
        count = len(sources)
        sizes = caches.stats(cache, count)
        local = np.minimum(sizes.tokens, policy.window - 1)
        self._outputs += [[] for _ in range(count)]
        self._sources += sources
        self._right += [0.0] * count
        self._counts += [0] * count
        self._entries.append(sizes.entries.sum(1))
        self._retained = self._retained + (sizes.entries - local[:, None]).sum(1)
        self._left_window += int((sizes.tokens - local).sum())
        self._tokens += int(sizes.tokens.sum())
        self._bytes += sizes.bytes // sizes.pool_pages * sizes.pages
        self._contexts += count
        return int(sizes.tokens.sum())

    def add_answers(
        self, questions: Sequence[Question], answers: Sequence[Answer], log: Sequence[Call]
    ) -> None:
        """Add the answers to one question of each context in the group that was added last.

        log: the footprint log from the contexts' first token on.
        """
        for row, (question, reply) in enumerate(zip(questions, answers, strict=True)):
            if question is NO_QUESTION:
                continue
            context = row - len(questions)
            score = 0.0 if reply.cut else question.score(reply.tokens)
            # every token of a teacher-forced text is an answer
            count = question.answer_tokens if question.teacher_forced else 1
            self._outputs[context].append(reply.tokens)
            self._right[context] += count * score
            self._counts[context] += count
            self._scores[question.kind].append(score)
            if question.concluded is not None:
                self._cut += reply.cut
                self._without += not reply.cut and question.concluded(reply.tokens) is None
            if question.teacher_forced:
                self._forced_tokens += question.answer_tokens
                self._log_likelihood += reply.log_likelihood
            else:
                self._answers += 1
            entries = occupancy(log, row)
            self._footprints.append((entries.footprint, entries.footprint_held, entries.peak))

    def total(self) -> Measurement:
        all_scores = [score for group in self._scores.values() for score in group]
        kv_ratios = np.sum(self._entries, 0) / self._tokens
        footprint, footprint_held, peak = np.mean(self._footprints, 0)
        return Measurement(
            score=float(np.mean(all_scores)),
            interval=mean_interval(
                np.bincount(self._sources, self._right), np.bincount(self._sources, self._counts)
            ),
            by_kind={kind: float(np.mean(scores)) for kind, scores in sorted(self._scores.items())},
            answers=self._answers + self._forced_tokens,
            perplexity=math.exp(-self._log_likelihood / self._forced_tokens) if self._forced_tokens else None,
            outputs=self._outputs,
            footprint=float(footprint),
            footprint_held=float(footprint_held),
            peak=float(peak),
            kv_ratio=float(kv_ratios.mean()),
            kv_ratios=kv_ratios,
            rates=self._retained / max(self._left_window, 1),
            bytes=self._bytes // self._contexts,
            prefill=self.reading.per_second,
            decode=self.decoding.per_second,
        )

    def contest_statistics(self, draws: int) -> ContestStatistics:
        """Return the statistics of problems that were each answered `draws` times."""
        rates = [float(np.mean(scores)) for scores in self._scores.values()]
        variances = [p * (1 - p) for p in rates]
        error = math.sqrt(sum(variances) / (draws - 1)) / len(rates) if draws > 1 else None
        return ContestStatistics(draws, error, self._cut / self._answers, self._without / self._answers)
