"""All cells of an evaluation: policies × budgets × tasks × contexts, those that are finished left out."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvjax import cache as caches
from kvjax.command.progress import Progress
from kvjax.command.stopwatch import Stopwatch
from kvjax.errors import UserError
from kvjax.evaluate.config import ANSWERING, FIXED_TAU, POLICIES, EvaluateConfig
from kvjax.evaluate.contenders import CONTENDERS, GATED, Sizing, budget_policy, contender, known_orders
from kvjax.evaluate.gates import (
    TauSearch,
    by_lambda,
    described,
    most_selective,
    nearest,
    of_method,
    own_tau,
)
from kvjax.evaluate.long_answers import Drawing, measure_drawn, write_answers
from kvjax.evaluate.measuring import Manner, Measurement, groups, measure, measure_together, read
from kvjax.evaluate.results import HEADS_FOLDER, Cell, Results, cell
from kvjax.evaluate.static_heads import Rivals, default_contexts, narrowest, orders
from kvjax.evaluate.teacher_forcing import TeacherForcing
from kvjax.evaluate.workloads import Workload, for_rivals
from kvjax.exported.fingerprint import MadeFor
from kvjax.inference.sampling import BLOCK
from kvjax.models.decoder import Decoder
from kvjax.models.folder import load_tokenizer
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.pattern_folder import read_pattern
from kvjax.policies.admission.wgkv import load_gates
from kvjax.tasks.contests import CONTESTS
from kvjax.tasks.sample import Sample, score_agreements
from kvjax.tasks.scbench import TASKS as SCBENCH_TASKS
from kvjax.tasks.scbench import TURNS

ANSWERS_FOLDER = "answers"
"""The folder of what was answered to contests."""
CHOICES = 10
"""Samples that static policies are chosen on."""


@dataclass(frozen=True)
class Candidate:
    """A policy of a budget."""

    policy: Policy
    """Made for the budget."""
    gates: str | None
    """The folder of its gates."""
    choice: str
    """What was chosen on calibration contexts, in words."""


@dataclass(frozen=True)
class ChoiceSamples:
    """What policies of a workload are chosen by, none of it compared."""

    length: int
    """Tokens of the samples for the order."""
    for_order: list[Sample]
    """Heads are ordered on them."""
    for_pattern: list[Sample]
    """Order, sinks and windows are chosen on them."""
    for_gates: list[Sample]
    """One of several gates is chosen on them."""


@dataclass
class Evaluation:
    """An evaluation of a model, checked before anything is run.

    Raises:
        UserError: a budget that a policy cannot keep of some context, by name; too few samples to calibrate on.
    """

    config: EvaluateConfig
    """What it was told."""
    model: Decoder
    """On its mesh."""
    workloads: Sequence[Workload]
    """Every task at every length."""
    watch: Stopwatch = field(default_factory=Stopwatch)
    """What is not counted into speeds."""
    choice_samples: dict[tuple[str, int], ChoiceSamples] = field(default_factory=dict, init=False)
    """By task and length, made when they are first needed."""

    def __post_init__(self):
        for gates in self.config.gates:
            if described(gates).get("method") == "wgkv":
                load_gates(gates, self.model)
        if not self.config.force:
            self._check_files()
        check_contexts(self.config, self.model, self.workloads)
        for workload in self.workloads:
            self.choice_samples[workload.task, workload.length] = self._choice_samples(workload)

    def _check_files(self) -> None:
        """Refuse gates and patterns of another model."""
        said = {f"--gates {gates}": MadeFor.described(described(gates)) for gates in self.config.gates}
        said |= {f"--pattern {folder}": read_pattern(folder).made_for for folder in self.config.pattern}
        for what, made_for in said.items():
            if made_for is not None:
                made_for.check(what, self.model)

    def _choice_samples(self, workload: Workload) -> ChoiceSamples:
        config, shape = self.config, self.model.config
        chosen = [name for name in config.policies if self._chooses(name, workload)]
        length = workload.length if workload.published else min(workload.length, config.order_length)
        count = config.order_contexts or default_contexts(shape.num_layers * shape.num_kv_heads, length)
        several = any(
            contender(name).calibrated and len(gates_for(config, name)) > 1 for name in config.policies
        )
        return ChoiceSamples(
            length,
            for_rivals(workload, config, count, length) if any(map(self._orders, chosen)) else [],
            for_rivals(workload, config, CHOICES, workload.length) if chosen else [],
            # as many as a batch has, for which the programs are there
            for_rivals(workload, config, workload.batch, workload.length) if several else [],
        )

    def _chooses(self, name: str, workload: Workload) -> bool:
        """Whether a policy is the best of its kind on calibration contexts: where there are any."""
        return contender(name).choose is not None and not workload.drawn

    def _orders(self, name: str) -> bool:
        """Whether a policy's heads are measured: where they count and no pattern was given."""
        return contender(name).choose is Rivals.head_pattern and not self.config.pattern

    def _sizing(self, workload: Workload, policy: str, budget: float) -> Sizing:
        return sizing_of(self.config, self.model, workload.tokens, workload.shortest, policy, budget)

    def _manner(self, workload: Workload) -> Manner:
        config = self.config
        assert config.chunk is not None
        if workload.drawn:
            # what a policy is expected to hold, unless it is stated: it is all that answers at length need
            stated = None if config.capacity is None else caches.parse_capacity(config.capacity)
            return Manner(workload.batch, config.chunk, workload.length, stated, config.page_size, self.watch)
        length = workload.length + BLOCK
        # by default everything fits, whatever the budget, so that pools and page tables have one size
        capacity = 2 * length if config.capacity is None else caches.parse_capacity(config.capacity)
        return Manner(workload.batch, config.chunk, length, capacity, config.page_size, self.watch)

    def run(self, results: Results, progress: Progress) -> None:
        """Every cell that is not among the results yet, each added to them when it is finished."""
        for workload in self.workloads:
            todo: dict[str, list[float]] = {}
            for name, budget in pairs(self.config):
                if (name, budget, workload.task, workload.length) not in results.cells:
                    todo.setdefault(name, []).append(budget)
            if todo:
                workload = self._against_full(workload)
            for group in self._reading_groups(todo, workload):
                for one in self._cells(group, workload):
                    results.add(one)
                    progress.done(str(one))

    def _reading_groups(
        self, todo: Mapping[str, Sequence[float]], workload: Workload
    ) -> list[dict[str, list[float]]]:
        """The cells of a workload by policy, those together whose contexts are read once for all."""
        groups: dict[tuple[str, str | Path | None], dict[str, list[float]]] = {}
        for name, budgets in todo.items():
            for budget in budgets:
                word = contender(name).reads
                gates = self._sizing(workload, name, budget).gates if word == GATED else None
                groups.setdefault((word or name, gates), {}).setdefault(name, []).append(budget)
        return list(groups.values())

    def _against_full(self, workload: Workload) -> Workload:
        """The workload, its texts scored by what the full cache says."""
        if not any(question.given for sample in workload.samples for question in sample.questions):
            return workload
        full = make_policy("full", model=self.model)
        reference = measure(self.model, full, workload.samples, self._manner(workload)).outputs
        return dataclasses.replace(workload, samples=score_agreements(workload.samples, reference))

    def _cells(self, todo: Mapping[str, Sequence[float]], workload: Workload) -> Iterator[Cell]:
        """The cells of a workload of a policy at some budgets, or of several that read alike."""
        manner = self._manner(workload)
        candidates = {
            name: self._candidates(name, budgets, workload, manner) for name, budgets in todo.items()
        }
        try:
            if workload.drawn:
                drawing = drawing_of(self.config, workload)
                for name, own in candidates.items():
                    for budget, one in zip(todo[name], own, strict=True):
                        found = measure_drawn(self.model, one.policy, workload.samples, drawing, manner)
                        cell = self._cell(name, budget, one, workload, found)
                        self._keep_answers(cell, workload, found)
                        yield cell
            elif contender(next(iter(todo))).reads:
                known = {name: list(own) for name, own in candidates.items()}
                policies = [[one.policy for one in own] for own in known.values()]
                found = iter(measure_together(self.model, policies, workload.samples, manner))
                for name, own in known.items():
                    for budget, one in zip(todo[name], own, strict=True):
                        yield self._cell(name, budget, one, workload, next(found))
            else:
                for name, own in candidates.items():
                    for budget, one in zip(todo[name], own, strict=True):
                        found = measure(self.model, one.policy, workload.samples, manner)
                        yield self._cell(name, budget, one, workload, found)
        except UserError as error:
            raise UserError(f"{', '.join(todo)} on {workload.task}: {error}") from None

    def _keep_answers(self, cell: Cell, workload: Workload, found: Measurement) -> None:
        name = f"{cell.task}-{cell.context}-{cell.policy}-{cell.budget:g}.jsonl".replace("/", "_")
        tokenizer = _tokenizer(self.config.model)
        write_answers(self.config.out / ANSWERS_FOLDER / name, workload.samples, found.outputs, tokenizer)

    def _cell(self, name: str, budget: float, own: Candidate, workload: Workload, found: Measurement) -> Cell:
        return cell(name, budget, workload, found, self.config, own.gates, own_tau(own.policy), own.choice)

    def _candidates(
        self, name: str, budgets: Sequence[float], workload: Workload, manner: Manner
    ) -> Iterator[Candidate]:
        """One policy at each budget, fitted on calibration contexts where it has something to fit."""
        entry = contender(name)
        searches: dict[str, TauSearch] = {}
        rivals = functools.cache(lambda: self._rivals(workload, name))
        samples = functools.cache(lambda: self._for_gates(workload))

        def size(policy: Policy) -> float:
            return self._size(policy, workload, manner)

        for budget in budgets:
            possible = possible_policies(self.config, name, sizing := self._sizing(workload, name, budget))
            (gates, policy), choice = next(iter(possible.items())), ""
            if entry.choose is not None and self._chooses(name, workload):
                chosen = entry.choose(rivals(), sizing.entries)
                policy, choice = chosen.pattern.policy(self.model, **entry.arguments), chosen.words
            if entry.calibrated:
                for folder, own in possible.items():
                    searches.setdefault(folder, TauSearch(own, size))
                found = nearest({folder: searches[folder] for folder in possible}, budget)
                gates, choice = self._best_gates(found, samples, manner)
                policy = found[gates]
            yield Candidate(policy, None if own_tau(policy) is None else gates, choice)

    def _for_gates(self, workload: Workload) -> Sequence[Sample]:
        """What one of several gates is chosen on, texts scored by what the full cache says."""
        own = self.choice_samples[workload.task, workload.length].for_gates
        return self._against_full(dataclasses.replace(workload, samples=own)).samples

    def _best_gates(
        self, policies: Mapping[str, Policy], samples: Callable[[], Sequence[Sample]], manner: Manner
    ) -> tuple[str, str]:
        """The name of the policy that answers best on the samples, the first of equals, and what was chosen in words;
        of one policy none."""
        if len(policies) == 1:
            return next(iter(policies)), ""
        scores = {
            name: measure(self.model, policy, samples(), manner).score for name, policy in policies.items()
        }
        best = max(scores, key=scores.__getitem__)
        tried = ", ".join(f"{name} {100 * score:.0f}%" for name, score in scores.items())
        return best, f"gates {best} (of {tried})"

    def _rivals(self, workload: Workload, name: str) -> Rivals:
        """What the static policies of a workload are chosen by."""
        sizing, own = self._sizing(workload, name, 1.0), self.choice_samples[workload.task, workload.length]
        known, window = known_orders(sizing)
        if self._orders(name):
            narrow = min(window, narrowest(own.length))
            folder = self.config.out / HEADS_FOLDER / f"{workload.task}-{own.length}-window-{narrow}"
            run = TeacherForcing(self.model, own.for_order, workload.batch)
            known = orders(run, sizing.shape, narrow, folder, MadeFor.of(self.model)) | known
        run = TeacherForcing(self.model, own.for_pattern, workload.batch)
        return Rivals(run, known, workload.tokens, window, sizing.shape)

    def _size(self, policy: Policy, workload: Workload, manner: Manner) -> float:
        """The share of the entries that a policy keeps of the samples for calibration."""
        entries, whole = 0, 0
        for group in groups(workload.calibration, manner.batch):
            sizes = caches.stats(read(self.model, policy, group, manner).cache, len(group))
            entries += int(sizes.entries.sum())
            whole += int(sizes.tokens.sum()) * self.model.config.num_layers * self.model.config.num_kv_heads
        return entries / whole


def gates_for(config: EvaluateConfig, policy: str) -> tuple[str, ...]:
    """The folders of gates that are a policy's to take. Raises UserError if it needs some and there are none."""
    entry = contender(policy)
    found = of_method(config.gates, entry.gates or entry.method)
    if not found and entry.needs_gates:
        raise UserError(
            f"--policies {policy} needs --gates of {entry.gates}, a folder that training exported or the authors' file"
        )
    return found if entry.gates is not None else found or config.gates


def with_gates(config: EvaluateConfig, say: Callable[[str], None] = lambda text: None) -> EvaluateConfig:
    """Where no policies are named, with those for the tasks that need no gates or have some; `say` gets the others."""
    if config.policies != POLICIES:
        return config

    def runs(policy: str) -> bool:
        entry = contender(policy)
        return not entry.needs_gates or bool(of_method(config.gates, entry.gates or entry.method))

    policies = ANSWERING if answers_contests(config) else POLICIES
    if without := [policy for policy in policies if not runs(policy)]:
        say(f"not compared, since --gates names nothing that was trained for them: {', '.join(without)}")
    return dataclasses.replace(config, policies=tuple(filter(runs, policies)))


def answers_contests(config: EvaluateConfig) -> bool:
    """Whether the tasks are contests.

    Raises UserError for contests beside other tasks, with questions known ahead, or several from one place.
    """
    contests = [task for task in config.tasks if task in CONTESTS]
    others = [task for task in config.tasks if task not in CONTESTS]
    if not contests:
        return False
    if others:
        raise UserError(
            f"--tasks {contests[0]} is answered at length and {others[0]} is asked about a context: evaluate them in "
            "folders of their own"
        )
    if config.question_aware:
        raise UserError(f"--question-aware is for questions about a context, which {contests[0]} has none of")
    if config.contest_data is not None and not config.contest_data.is_dir() and len(contests) > 1:
        raise UserError(
            f"--contest-data {config.contest_data} holds one contest, got --tasks {' '.join(contests)}: give a folder "
            "with a file for each"
        )
    return True


def check_policies(config: EvaluateConfig) -> None:
    """Refuse policies that are none, those that are not for the tasks, --dense without contests and --turns without
    SCBench. Raises UserError."""
    drawn = answers_contests(config)
    if config.dense is not None and not drawn:
        raise UserError(f"--dense is for contests, which {config.tasks[0]} is none of")
    if config.turns != TURNS[0] and not any(task in SCBENCH_TASKS for task in config.tasks):
        raise UserError(f"--turns is for SCBench's tasks, which {config.tasks[0]} is none of")
    for name in config.policies:
        entry = contender(name)
        if entry.on not in ("both", "contests" if drawn else "contexts"):
            fits = [other for other, one in CONTENDERS.items() if one.on in ("both", "contests")]
            raise UserError(
                f"--policies {name}: its cache grows with an answer, whatever the budget; for {config.tasks[0]}: "
                f"{', '.join(fits)}"
                if drawn
                else f"--policies {name} evicts while it answers at length, which is measured on contests: "
                f"{', '.join(CONTESTS)}"
            )
    if FIXED_TAU in config.policies:
        by_lambda(gates_for(config, FIXED_TAU))


def drawing_of(config: EvaluateConfig, workload: Workload) -> Drawing:
    """How a contest's answers are drawn."""
    return Drawing(workload.draws, config.temperature, config.top_p, config.top_k, config.seed)


def sizing_of(
    config: EvaluateConfig, model: Decoder, tokens: int, shortest: int, policy: str, budget: float
) -> Sizing:
    """What a policy is made for at a budget, of contexts of about `tokens` tokens, `shortest` at least."""
    assert config.chunk is not None
    assert config.observed is not None
    own = gates_for(config, policy)
    gates = own[0] if own else None
    if contender(policy).own_tau:
        gates, budget = by_lambda(own)[budget], 1.0
    elif contender(policy).over_gates:
        gates = most_selective(own, budget, tokens)
    return Sizing(
        model, budget, tokens, shortest, config.chunk, config.observed, gates, config.pattern, config.seed,
        config.force, tokenizer=functools.partial(_tokenizer, config.model),
    )  # fmt: skip


_tokenizer = functools.cache(load_tokenizer)


def possible_policies(
    config: EvaluateConfig, name: str, sizing: Sizing, *, any_gates: bool = False
) -> dict[str, Policy]:
    """The policy of a size, by the folder of its gates: where τ is searched for, or with `any_gates`, each that can
    meet the size.

    Raises UserError if there is none.
    """
    if not (contender(name).calibrated or (any_gates and contender(name).over_gates)):
        return {str(sizing.gates or ""): budget_policy(name, sizing)}
    found, errors = {}, []
    for gates in gates_for(config, name):
        try:
            found[gates] = budget_policy(name, dataclasses.replace(sizing, gates=gates))
        except UserError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def check_lengths(config: EvaluateConfig, model: Decoder) -> None:
    """Refuse budgets that no context of a length that was asked for can hold, before there are any. `model`: shapes
    do. Raises UserError naming the policy and the budget."""
    for length, (policy, budget) in itertools.product(config.context, pairs(config)):
        sizing = sizing_of(config, model, length, length, policy, budget)
        possible_policies(config, policy, sizing, any_gates=True)


def check_contexts(config: EvaluateConfig, model: Decoder, workloads: Sequence[Workload]) -> None:
    """The same for the contexts that there are. Raises UserError that names the task and the length asked for, too."""
    for own, (policy, budget) in itertools.product(workloads, pairs(config)):
        try:
            sizing = sizing_of(config, model, own.tokens, own.shortest, policy, budget)
            possible_policies(config, policy, sizing)
        except UserError as error:
            raise UserError(f"{own.task} at --context {own.length}: {error}") from None


def pairs(config: EvaluateConfig) -> list[tuple[str, float]]:
    """Policies with their budgets: 1 for one that has but one size, λ for gates at their own τ."""
    return [(policy, budget) for policy in config.policies for budget in _budgets(policy, config)]


def _budgets(policy: str, config: EvaluateConfig) -> tuple[float, ...]:
    if contender(policy).own_tau:
        return tuple(by_lambda(gates_for(config, policy)))
    return (1.0,) if contender(policy).one_size else config.budgets
