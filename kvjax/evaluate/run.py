"""An evaluation's measurements: policies × budgets × tasks × lengths, except those that are finished."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvjax import cache as caches
from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.cli.progress import Progress
from kvjax.cli.shards import Shard
from kvjax.cli.stopwatch import Stopwatch
from kvjax.errors import UserError
from kvjax.evaluate.calibrated import (
    Calibrated,
    Candidate,
    Rivals,
    default_contexts,
    narrowest,
    orders,
    own_tau,
)
from kvjax.evaluate.compared import Compared, compared
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.gates import described, gates_for
from kvjax.evaluate.long_answers import Drawing, measure_drawn, write_answers
from kvjax.evaluate.measuring import (
    Manner,
    Measurement,
    groups,
    measure,
    measure_together,
    measured_alone,
    read,
)
from kvjax.evaluate.results import ANSWERS_FOLDER, HEADS_FOLDER, Result, Results, result_of
from kvjax.evaluate.sized_tasks import SizedTask, for_rivals
from kvjax.evaluate.sizing import (
    Sizing,
    budget_policy,
    check_contexts,
    known_orders,
    pairs,
    possible_policies,
    sizing_of,
    tokenizer_of,
)
from kvjax.evaluate.teacher_forcing import TeacherForcing
from kvjax.inference.generate import BLOCK
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.wgkv import WGKV, load_gates
from kvjax.tasks.sample import Sample, score_agreements

CHOICES = 10
"""Samples that static policies are chosen on."""


@dataclass(frozen=True)
class ChoiceSamples:
    """Calibration samples of a task, none of which is compared."""

    length: int
    """Tokens of the samples that heads are ordered on."""
    for_order: list[Sample]
    """Samples that heads are ordered on."""
    for_pattern: list[Sample]
    """Samples that the order, sinks and windows are chosen on."""
    for_gates: list[Sample]
    """Samples that one of several gates is chosen on."""


@dataclass
class Evaluation:
    """An evaluation of a model, checked before anything is run.

    Raises:
        UserError: a budget that a policy cannot keep of some context, by name; gates for another model; too few samples
            to calibrate on.
    """

    config: EvaluateConfig
    model: Decoder
    """The model, on its mesh."""
    tasks: Sequence[SizedTask]
    """Every task at every length."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    """Leaves compilation out of speeds."""
    choice_samples: dict[tuple[str, int], ChoiceSamples] = field(default_factory=dict, init=False)
    """Calibration samples by task and length."""

    def __post_init__(self):
        for gates in self.config.gates:
            if described(gates).get("method") == "wgkv":
                load_gates(gates, self.model)
        for gates in () if self.config.force else self.config.gates:
            if (made_for := MadeFor.described(described(gates))) is not None:
                made_for.check(f"--gates {gates}", self.model)
        check_contexts(self.config, self.model, self.tasks)
        for task in self.tasks:
            self.choice_samples[task.name, task.length] = self._choice_samples(task)

    def _choice_samples(self, task: SizedTask) -> ChoiceSamples:
        config, shape = self.config, self.model.config
        every = compared(config)
        chosen = [one for one in every if self._chooses(one, task)]
        length = task.length if task.published else min(task.length, config.order_length)
        count = config.order_contexts or default_contexts(shape.num_full_layers * shape.num_kv_heads, length)
        several = any(one.searched and len(gates_for(config, one)) > 1 for one in every)
        return ChoiceSamples(
            length,
            for_rivals(task, config, count, length) if any(one.orders_heads for one in chosen) else [],
            for_rivals(task, config, CHOICES, task.length) if chosen else [],
            # one batch, since the programs for it are compiled anyway
            for_rivals(task, config, task.batch, task.length) if several else [],
        )

    def _chooses(self, one: Compared, task: SizedTask) -> bool:
        """Return True if a policy's heads are chosen on calibration contexts of the task. Contests have none."""
        return one.chooses_heads and not task.drawn

    def _sizing(self, task: SizedTask, one: Compared, budget: float) -> Sizing:
        return sizing_of(self.config, self.model, task.tokens, task.shortest, one, budget)

    def _manner(self, task: SizedTask) -> Manner:
        config = self.config
        assert config.chunk is not None
        if task.drawn:
            # by default the pool holds what the policy is expected to keep, which is all that long answers need
            stated = None if config.capacity is None else caches.parse_capacity(config.capacity)
            return Manner(task.batch, config.chunk, stated, config.page_size, self.watch)
        # by default everything fits, whatever the budget, so that pools have one size
        most = 2 * (task.length + BLOCK)
        capacity = most if config.capacity is None else caches.parse_capacity(config.capacity)
        return Manner(task.batch, config.chunk, capacity, config.page_size, self.watch)

    def wanted(self, task: SizedTask) -> list[tuple[Compared, float]]:
        """Return the policies with their budgets that are measured on a task: all, or those of this run's shard."""
        every = pairs(self.config)
        if self.config.shard is None:
            return every
        # policies that share a reading stay together, and each shard has its part of the long and of the short ones
        shard, groups = Shard.parse(self.config.shard), self._reading_groups(every, task)
        begin = self.tasks.index(task)
        mine = [group for at, group in enumerate(groups, begin) if at % shard.count == shard.index]
        return [
            (one, budget) for group in mine for one, budgets in group.budgets.values() for budget in budgets
        ]

    def run(self, results: Results, progress: Progress) -> None:
        """Measure every result that is missing, and add each when it is finished."""
        for task in self.tasks:
            todo = [
                (one, budget)
                for one, budget in self.wanted(task)
                if (one.label, budget, task.name, task.length) not in results.finished
            ]
            if todo:
                task = self._against_full(task)
            for group in self._reading_groups(todo, task):
                for one in self._results(group, task):
                    results.add(one)
                    progress.done(str(one))

    def _reading_groups(self, todo: Sequence[tuple[Compared, float]], task: SizedTask) -> list["Group"]:
        """Group the results of a task by policy. Policies that share one reading of the contexts share a group."""
        found: dict[object, Group] = {}
        for one, budget in todo:
            sizing = self._sizing(task, one, budget)
            fitted = one.calibrated or task.drawn
            reading = None if fitted else reading_of(one, budget_policy(one, sizing), sizing.gates)
            group = found.setdefault(reading or one.label, Group(reading is not None, {}))
            group.budgets.setdefault(one.label, (one, []))[1].append(budget)
        return list(found.values())

    def _against_full(self, task: SizedTask) -> SizedTask:
        """Return the task with its texts scored by agreement with the full cache."""
        if not any(question.given for sample in task.samples for question in sample.questions):
            return task
        full = make_policy("full", model=self.model)
        reference = measure(self.model, full, task.samples, self._manner(task)).outputs
        return dataclasses.replace(task, samples=score_agreements(task.samples, reference))

    def _results(self, group: "Group", task: SizedTask) -> Iterator[Result]:
        """Yield the results of a policy at some budgets on a task, or of several policies that read alike."""
        manner = self._manner(task)
        known = [
            (one, budgets, self._candidates(one, budgets, task, manner))
            for one, budgets in group.budgets.values()
        ]
        try:
            together = None
            if group.together:
                known = [(one, budgets, list(own)) for one, budgets, own in known]
                policies = [[candidate.policy for candidate in own] for _, _, own in known]
                together = iter(measure_together(self.model, policies, task.samples, manner))
            for one, budgets, own in known:
                for budget, candidate in zip(budgets, own, strict=True):
                    found = next(together) if together else self._measured(candidate.policy, task, manner)
                    result = result_of(one, budget, candidate, task, found, self.config)
                    if task.drawn:
                        self._keep_answers(result, task, found)
                    yield result
        except UserError as error:
            raise UserError(f"{', '.join(group.budgets)} on {task.name}: {error}") from None

    def _measured(self, policy: Policy, task: SizedTask, manner: Manner) -> Measurement:
        if not task.drawn:
            return measure(self.model, policy, task.samples, manner)
        config = self.config
        drawing = Drawing(task.draws, config.temperature, config.top_p, config.top_k, config.seed)
        return measure_drawn(self.model, policy, task.samples, drawing, manner)

    def _keep_answers(self, result: Result, task: SizedTask, found: Measurement) -> None:
        name = f"{result.task}-{result.context}-{result.policy}-{result.budget:g}.jsonl".replace("/", "_")
        tokenizer = tokenizer_of(self.config.model)
        write_answers(self.config.out / ANSWERS_FOLDER / name, task.samples, found.outputs, tokenizer)

    def _candidates(
        self, one: Compared, budgets: Sequence[float], task: SizedTask, manner: Manner
    ) -> Iterator[Candidate]:
        """Yield a policy at each budget, fitted on calibration contexts if it has something to fit."""
        samples = functools.cache(lambda: self._for_gates(task))

        @functools.cache
        def calibrated() -> Calibrated:
            return Calibrated(
                self.model,
                self._rivals(task, one) if self._chooses(one, task) else None,
                one.orders_heads,
                size=lambda policy: self._size(policy, task, manner),
                score=lambda policy: measure(self.model, policy, samples(), manner).score,
            )

        for budget in budgets:
            sizing = self._sizing(task, one, budget)
            possible = possible_policies(self.config, one, sizing)
            if one.searched or self._chooses(one, task):
                yield calibrated().fit(budget, sizing.entries, possible)
                continue
            gates, policy = next(iter(possible.items()))
            yield Candidate(policy, None if own_tau(policy) is None else gates)

    def _for_gates(self, task: SizedTask) -> Sequence[Sample]:
        """Return the samples for choosing among several gates. Texts are scored by agreement with the full cache."""
        own = self.choice_samples[task.name, task.length].for_gates
        return self._against_full(dataclasses.replace(task, samples=own)).samples

    def _rivals(self, task: SizedTask, one: Compared) -> Rivals:
        """Return the chooser of a task's static policies."""
        sizing, own = self._sizing(task, one, 1.0), self.choice_samples[task.name, task.length]
        known, window = known_orders(sizing)
        if one.orders_heads:
            narrow = min(window, narrowest(own.length))
            folder = self.config.out / HEADS_FOLDER / f"{task.name}-{own.length}-window-{narrow}"
            run = TeacherForcing(self.model, own.for_order, task.batch)
            known = orders(run, sizing.shape, narrow, folder, MadeFor.of(self.model)) | known
        run = TeacherForcing(self.model, own.for_pattern, task.batch)
        return Rivals(run, known, task.tokens, window, sizing.shape)

    def _size(self, policy: Policy, task: SizedTask, manner: Manner) -> float:
        """Return the share of the entries that a policy keeps of the samples that τ is searched on."""
        entries, whole = 0, 0
        for group in groups(task.calibration, manner.batch):
            sizes = caches.stats(read(self.model, policy, group, manner).cache, len(group))
            entries += int(sizes.entries.sum())
            whole += (
                int(sizes.tokens.sum()) * self.model.config.num_full_layers * self.model.config.num_kv_heads
            )
        return entries / whole


@dataclass(frozen=True)
class Group:
    """Results of a task that are measured one after the other."""

    together: bool
    """True if the contexts are read once for all policies."""
    budgets: dict[str, tuple[Compared, list[float]]]
    """Policies and their budgets, by label."""


def reading_of(one: Compared, policy: Policy, gates: str | None) -> object:
    """Return a key that is equal for all policies that can share one reading of the contexts, until the prompt's end;
    None for a policy that is read alone."""
    late = policy.schedule is not None and policy.schedule.trigger.when != "prompt"
    if late or measured_alone(policy):
        return None
    if policy.stores_all:
        return True
    if one.over_gates and one.takes_gates == WGKV.name:
        return gates, policy.window, own_tau(policy)
    return None
