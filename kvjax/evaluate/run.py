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
    PatternSearch,
    default_contexts,
    orders,
    smallest_window,
    wgkv_tau,
)
from kvjax.evaluate.compared import Compared, compared_policies
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.gates import describe_gates, gates_for
from kvjax.evaluate.long_answers import SamplingSettings, measure_contest
from kvjax.evaluate.measuring import (
    Measurement,
    MeasureSettings,
    groups,
    measure,
    measure_together,
    measured_alone,
    read,
)
from kvjax.evaluate.results import ANSWERS_FOLDER, HEADS_FOLDER, Result, Results, result_of, write_answers
from kvjax.evaluate.sized_tasks import SizedTask, calibration_samples
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
from kvjax.files import file_name
from kvjax.inference.generate import BLOCK
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.wgkv import WGKV, load_gates
from kvjax.tasks.sample import Sample, score_agreements

CHOICES = 10
"""The number of samples that static policies are chosen on."""


@dataclass(frozen=True)
class ChoiceSamples:
    """Calibration samples of a task. No policy is compared on them."""

    length: int
    """Tokens of the samples in `for_order`."""
    for_order: list[Sample]
    """Samples on which heads are ordered."""
    for_pattern: list[Sample]
    """Samples on which the order, sinks and windows are chosen."""
    for_gates: list[Sample]
    """Samples on which one of several gates is chosen."""


@dataclass
class Evaluation:
    """An evaluation of a model, checked before anything is run.

    Raises:
        UserError: a policy cannot meet a budget on some context, gates were made for another model, or there are too
            few samples to calibrate on.
    """

    config: EvaluateConfig
    model: Decoder
    """The model, on its mesh."""
    tasks: Sequence[SizedTask]
    """Every task at every length."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    """Times the work without compilation."""
    choice_samples: dict[tuple[str, int], ChoiceSamples] = field(default_factory=dict, init=False)
    """Calibration samples by task and length."""

    def __post_init__(self):
        for gates in self.config.gates:
            if describe_gates(gates).get("method") == "wgkv":
                load_gates(gates, self.model)
        for gates in () if self.config.force else self.config.gates:
            if (made_for := MadeFor.described(describe_gates(gates))) is not None:
                made_for.check(f"--gates {gates}", self.model)
        check_contexts(self.config, self.model, self.tasks)
        for task in self.tasks:
            self.choice_samples[task.name, task.length] = self._choice_samples(task)

    def _choice_samples(self, task: SizedTask) -> ChoiceSamples:
        config, shape = self.config, self.model.config
        policies = compared_policies(config)
        static = [policy for policy in policies if self._chooses_heads(policy, task)]
        length = task.length if task.published else min(task.length, config.order_length)
        count = config.order_contexts or default_contexts(shape.num_full_layers * shape.num_kv_heads, length)
        chooses_gates = any(policy.searches_tau and len(gates_for(config, policy)) > 1 for policy in policies)
        return ChoiceSamples(
            length,
            calibration_samples(task, config, count, length)
            if any(policy.orders_heads for policy in static)
            else [],
            calibration_samples(task, config, CHOICES, task.length) if static else [],
            # one batch, whose programs the comparison compiles anyway
            calibration_samples(task, config, task.batch, task.length) if chooses_gates else [],
        )

    def _chooses_heads(self, compared: Compared, task: SizedTask) -> bool:
        """Return True if a policy's heads are chosen on calibration contexts of the task. Contests have none."""
        return compared.chooses_heads and not task.is_contest

    def _sizing(self, task: SizedTask, compared: Compared, budget: float) -> Sizing:
        return sizing_of(self.config, self.model, task.tokens, task.shortest, compared, budget)

    def _settings(self, task: SizedTask) -> MeasureSettings:
        config = self.config
        assert config.chunk is not None
        if task.is_contest:
            # by default the pool has the size that the policy is expected to need
            capacity = None if config.capacity is None else caches.parse_capacity(config.capacity)
            return MeasureSettings(task.batch, config.chunk, capacity, config.page_size, self.watch)
        # by default the pool holds the full cache, so that all budgets have the same pool
        full = 2 * (task.length + BLOCK)
        capacity = full if config.capacity is None else caches.parse_capacity(config.capacity)
        return MeasureSettings(task.batch, config.chunk, capacity, config.page_size, self.watch)

    def wanted(self, task: SizedTask) -> list[tuple[Compared, float]]:
        """Return the policies with their budgets to measure on a task: all, or those of this run's shard."""
        all_pairs = pairs(self.config)
        if self.config.shard is None:
            return all_pairs
        # policies that share a reading stay together; starting at the task's index balances the shards
        shard, groups = Shard.parse(self.config.shard), self._reading_groups(all_pairs, task)
        first = self.tasks.index(task)
        own_groups = [
            group for index, group in enumerate(groups, first) if index % shard.count == shard.index
        ]
        return [
            (compared, budget)
            for group in own_groups
            for compared, budgets in group.budgets.values()
            for budget in budgets
        ]

    def run(self, results: Results, progress: Progress) -> None:
        """Measure every missing result, and add each to `results` when it is finished."""
        for task in self.tasks:
            todo = [
                (compared, budget)
                for compared, budget in self.wanted(task)
                if (compared.label, budget, task.name, task.length) not in results.finished
            ]
            if todo:
                task = self._scored_against_full(task)
            for group in self._reading_groups(todo, task):
                for result in self._results(group, task):
                    results.add(result)
                    progress.done(str(result))

    def _reading_groups(self, todo: Sequence[tuple[Compared, float]], task: SizedTask) -> list["Group"]:
        """Group the results of a task by policy. Policies that share one reading of the contexts share a group."""
        groups: dict[object, Group] = {}
        for compared, budget in todo:
            sizing = self._sizing(task, compared, budget)
            alone = compared.calibrated or task.is_contest
            key = None if alone else reading_key(compared, budget_policy(compared, sizing), sizing.gates)
            group = groups.setdefault(key or compared.label, Group(key is not None, {}))
            group.budgets.setdefault(compared.label, (compared, []))[1].append(budget)
        return list(groups.values())

    def _scored_against_full(self, task: SizedTask) -> SizedTask:
        """Return the task with its given texts scored by agreement with the full cache."""
        if not any(question.teacher_forced for sample in task.samples for question in sample.questions):
            return task
        full = make_policy("full", model=self.model)
        reference = measure(self.model, full, task.samples, self._settings(task)).outputs
        return dataclasses.replace(task, samples=score_agreements(task.samples, reference))

    def _results(self, group: "Group", task: SizedTask) -> Iterator[Result]:
        """Yield the results of a group of policies and budgets on a task."""
        settings = self._settings(task)
        planned = [
            (compared, budgets, self._candidates(compared, budgets, task, settings))
            for compared, budgets in group.budgets.values()
        ]
        try:
            together = None
            if group.together:
                planned = [(compared, budgets, list(candidates)) for compared, budgets, candidates in planned]
                policies = [[candidate.policy for candidate in candidates] for _, _, candidates in planned]
                together = iter(measure_together(self.model, policies, task.samples, settings))
            for compared, budgets, candidates in planned:
                for budget, candidate in zip(budgets, candidates, strict=True):
                    measured = next(together) if together else self._measure(candidate.policy, task, settings)
                    result = result_of(compared, budget, candidate, task, measured, self.config)
                    self._write_answers(result, task, measured)
                    yield result
        except UserError as error:
            raise UserError(f"{', '.join(group.budgets)} on {task.name}: {error}") from None

    def _measure(self, policy: Policy, task: SizedTask, settings: MeasureSettings) -> Measurement:
        if not task.is_contest:
            return measure(self.model, policy, task.samples, settings)
        config = self.config
        sampling = SamplingSettings(task.draws, config.temperature, config.top_p, config.top_k, config.seed)
        return measure_contest(self.model, policy, task.samples, sampling, settings)

    def _write_answers(self, result: Result, task: SizedTask, measured: Measurement) -> None:
        name = file_name(f"{result.task}-{result.context}-{result.policy}-{result.budget:g}")
        tokenizer = tokenizer_of(self.config.model)
        write_answers(
            self.config.out / ANSWERS_FOLDER / f"{name}.jsonl", task.samples, measured.outputs, tokenizer
        )

    def _candidates(
        self, compared: Compared, budgets: Sequence[float], task: SizedTask, settings: MeasureSettings
    ) -> Iterator[Candidate]:
        """Yield a policy at each budget. Calibrated policies are fitted on calibration contexts."""
        gate_samples = functools.cache(lambda: self._gate_samples(task))

        @functools.cache
        def calibration() -> Calibrated:
            return Calibrated(
                self.model,
                self._pattern_search(task, compared) if self._chooses_heads(compared, task) else None,
                compared.orders_heads,
                size=lambda policy: self._size(policy, task, settings),
                score=lambda policy: measure(self.model, policy, gate_samples(), settings).score,
            )

        for budget in budgets:
            sizing = self._sizing(task, compared, budget)
            possible = possible_policies(self.config, compared, sizing)
            if compared.searches_tau or self._chooses_heads(compared, task):
                yield calibration().fit(budget, sizing.entries, possible)
                continue
            gates, policy = next(iter(possible.items()))
            yield Candidate(policy, None if wgkv_tau(policy) is None else gates)

    def _gate_samples(self, task: SizedTask) -> Sequence[Sample]:
        """Return the samples for choosing among several gates. Given texts are scored against the full cache."""
        samples = self.choice_samples[task.name, task.length].for_gates
        return self._scored_against_full(dataclasses.replace(task, samples=samples)).samples

    def _pattern_search(self, task: SizedTask, compared: Compared) -> PatternSearch:
        """Return the search for a task's static policies."""
        sizing, samples = self._sizing(task, compared, 1.0), self.choice_samples[task.name, task.length]
        head_orders, window = known_orders(sizing)
        if compared.orders_heads:
            order_window = min(window, smallest_window(samples.length))
            contexts = dataclasses.replace(task, samples=samples.for_order).digest
            name = f"{task.name}-{samples.length}-window-{order_window}-{contexts}"
            folder = self.config.out / HEADS_FOLDER / name
            run = TeacherForcing(self.model, samples.for_order, task.batch)
            measured = orders(run, sizing.shape, order_window, folder, MadeFor.of(self.model))
            head_orders = measured | head_orders
        run = TeacherForcing(self.model, samples.for_pattern, task.batch)
        return PatternSearch(run, head_orders, task.tokens, window, sizing.shape)

    def _size(self, policy: Policy, task: SizedTask, settings: MeasureSettings) -> float:
        """Return the share of the entries that a policy keeps on the samples for the search of τ."""
        entries, full = 0, 0
        for group in groups(task.calibration, settings.batch):
            sizes = caches.stats(read(self.model, policy, group, settings).cache, len(group))
            entries += int(sizes.entries.sum())
            full += (
                int(sizes.tokens.sum()) * self.model.config.num_full_layers * self.model.config.num_kv_heads
            )
        return entries / full


@dataclass(frozen=True)
class Group:
    """Policies and budgets that are measured together on a task."""

    together: bool
    """True if the contexts are read once for all policies."""
    budgets: dict[str, tuple[Compared, list[float]]]
    """Policies and their budgets, by label."""


def reading_key(compared: Compared, policy: Policy, gates: str | None) -> object:
    """Return a key that is equal for all policies that can share one reading of the contexts.

    They may differ from the prompt's end on. Returns None for a policy that shares no reading.
    """
    compacts_at_other_times = policy.schedule is not None and policy.schedule.trigger.when != "prompt"
    if compacts_at_other_times or measured_alone(policy):
        return None
    page_size = caches.default_page_size(
        selects=policy.selection is not None
    )  # a selection may need smaller pages
    if policy.stores_all:
        return page_size
    if compared.combines_gates and compared.gated_method == WGKV.name:
        return page_size, gates, policy.window, wgkv_tau(policy)
    return None
