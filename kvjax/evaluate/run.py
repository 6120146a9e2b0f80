"""All cells of an evaluation: policies × budgets × tasks × contexts, those that are finished left out."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvjax import cache as caches
from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.cli.progress import Progress
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
from kvjax.evaluate.compared import (
    LEARNED,
    Compared,
    Sizing,
    budget_policy,
    by_lambda,
    compared_of,
    described,
    known_orders,
    most_selective,
    of_method,
)
from kvjax.evaluate.config import ANSWERING, POLICIES, EvaluateConfig
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
from kvjax.evaluate.results import HEADS_FOLDER, Cell, Results, cell
from kvjax.evaluate.teacher_forcing import TeacherForcing
from kvjax.evaluate.workloads import Workload, for_rivals
from kvjax.inference.generate import BLOCK
from kvjax.models.decoder import Decoder
from kvjax.models.folder import load_tokenizer
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.wgkv import WGKV, load_gates
from kvjax.policies.registry import is_method
from kvjax.tasks.registry import TASKS, check_data, suite_of
from kvjax.tasks.sample import Sample, score_agreements
from kvjax.tasks.suite import TURNS

ANSWERS_FOLDER = "answers"
"""The folder of what was answered to contests."""
CHOICES = 10
"""Samples that static policies are chosen on."""


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
        """Refuse gates of another model."""
        for gates in self.config.gates:
            if (made_for := MadeFor.described(described(gates))) is not None:
                made_for.check(f"--gates {gates}", self.model)

    def _choice_samples(self, workload: Workload) -> ChoiceSamples:
        config, shape = self.config, self.model.config
        every = compared(config)
        chosen = [one for one in every if self._chooses(one, workload)]
        length = workload.length if workload.published else min(workload.length, config.order_length)
        count = config.order_contexts or default_contexts(shape.num_layers * shape.num_kv_heads, length)
        several = any(one.searched and len(gates_for(config, one)) > 1 for one in every)
        return ChoiceSamples(
            length,
            for_rivals(workload, config, count, length) if any(one.orders_heads for one in chosen) else [],
            for_rivals(workload, config, CHOICES, workload.length) if chosen else [],
            # as many as a batch has, for which the programs are there
            for_rivals(workload, config, workload.batch, workload.length) if several else [],
        )

    def _chooses(self, one: Compared, workload: Workload) -> bool:
        """Whether a policy's heads are chosen on calibration contexts: where there are any."""
        return one.chooses_heads and not workload.drawn

    def _sizing(self, workload: Workload, one: Compared, budget: float) -> Sizing:
        return sizing_of(self.config, self.model, workload.tokens, workload.shortest, one, budget)

    def _manner(self, workload: Workload) -> Manner:
        config = self.config
        assert config.chunk is not None
        if workload.drawn:
            # what a policy is expected to hold, unless it is stated: it is all that answers at length need
            stated = None if config.capacity is None else caches.parse_capacity(config.capacity)
            return Manner(workload.batch, config.chunk, stated, config.page_size, self.watch)
        # by default everything fits, whatever the budget, so that pools have one size
        most = 2 * (workload.length + BLOCK)
        capacity = most if config.capacity is None else caches.parse_capacity(config.capacity)
        return Manner(workload.batch, config.chunk, capacity, config.page_size, self.watch)

    def run(self, results: Results, progress: Progress) -> None:
        """Every cell that is not among the results yet, each added to them when it is finished."""
        for workload in self.workloads:
            todo = [
                (one, budget)
                for one, budget in pairs(self.config)
                if (one.label, budget, workload.task, workload.length) not in results.cells
            ]
            if todo:
                workload = self._against_full(workload)
            for group in self._reading_groups(todo, workload):
                for one in self._cells(group, workload):
                    results.add(one)
                    progress.done(str(one))

    def _reading_groups(self, todo: Sequence[tuple[Compared, float]], workload: Workload) -> list["Group"]:
        """The cells of a workload by policy, those together whose contexts are read once for all."""
        found: dict[object, Group] = {}
        for one, budget in todo:
            sizing = self._sizing(workload, one, budget)
            fitted = one.calibrated or workload.drawn
            reading = None if fitted else reading_of(one, budget_policy(one, sizing), sizing.gates)
            group = found.setdefault(reading or one.label, Group(reading is not None, {}))
            group.budgets.setdefault(one.label, (one, []))[1].append(budget)
        return list(found.values())

    def _against_full(self, workload: Workload) -> Workload:
        """The workload, its texts scored by what the full cache says."""
        if not any(question.given for sample in workload.samples for question in sample.questions):
            return workload
        full = make_policy("full", model=self.model)
        reference = measure(self.model, full, workload.samples, self._manner(workload)).outputs
        return dataclasses.replace(workload, samples=score_agreements(workload.samples, reference))

    def _cells(self, group: "Group", workload: Workload) -> Iterator[Cell]:
        """The cells of a workload of a policy at some budgets, or of several that read alike."""
        manner = self._manner(workload)
        known = [
            (one, budgets, self._candidates(one, budgets, workload, manner))
            for one, budgets in group.budgets.values()
        ]
        try:
            if group.together:
                known = [(one, budgets, list(own)) for one, budgets, own in known]
                policies = [[candidate.policy for candidate in own] for _, _, own in known]
                found = iter(measure_together(self.model, policies, workload.samples, manner))
                for one, budgets, own in known:
                    for budget, candidate in zip(budgets, own, strict=True):
                        yield self._cell(one, budget, candidate, workload, next(found))
                return
            for one, budgets, own in known:
                for budget, candidate in zip(budgets, own, strict=True):
                    if workload.drawn:
                        drawing = drawing_of(self.config, workload)
                        measured = measure_drawn(
                            self.model, candidate.policy, workload.samples, drawing, manner
                        )
                    else:
                        measured = measure(self.model, candidate.policy, workload.samples, manner)
                    cell = self._cell(one, budget, candidate, workload, measured)
                    if workload.drawn:
                        self._keep_answers(cell, workload, measured)
                    yield cell
        except UserError as error:
            raise UserError(f"{', '.join(group.budgets)} on {workload.task}: {error}") from None

    def _keep_answers(self, cell: Cell, workload: Workload, found: Measurement) -> None:
        name = f"{cell.task}-{cell.context}-{cell.policy}-{cell.budget:g}.jsonl".replace("/", "_")
        tokenizer = _tokenizer(self.config.model)
        write_answers(self.config.out / ANSWERS_FOLDER / name, workload.samples, found.outputs, tokenizer)

    def _cell(
        self, one: Compared, budget: float, own: Candidate, workload: Workload, found: Measurement
    ) -> Cell:
        return cell(one, budget, workload, found, self.config, own.gates, own_tau(own.policy), own.choice)

    def _candidates(
        self, one: Compared, budgets: Sequence[float], workload: Workload, manner: Manner
    ) -> Iterator[Candidate]:
        """One policy at each budget, fitted on calibration contexts where it has something to fit."""
        samples = functools.cache(lambda: self._for_gates(workload))

        @functools.cache
        def calibrated() -> Calibrated:
            return Calibrated(
                self.model,
                self._rivals(workload, one) if self._chooses(one, workload) else None,
                one.orders_heads,
                size=lambda policy: self._size(policy, workload, manner),
                score=lambda policy: measure(self.model, policy, samples(), manner).score,
            )

        for budget in budgets:
            sizing = self._sizing(workload, one, budget)
            possible = possible_policies(self.config, one, sizing)
            if one.searched or self._chooses(one, workload):
                yield calibrated().fit(budget, sizing.entries, possible)
                continue
            gates, policy = next(iter(possible.items()))
            yield Candidate(policy, None if own_tau(policy) is None else gates)

    def _for_gates(self, workload: Workload) -> Sequence[Sample]:
        """What one of several gates is chosen on, texts scored by what the full cache says."""
        own = self.choice_samples[workload.task, workload.length].for_gates
        return self._against_full(dataclasses.replace(workload, samples=own)).samples

    def _rivals(self, workload: Workload, one: Compared) -> Rivals:
        """What the static policies of a workload are chosen by."""
        sizing, own = self._sizing(workload, one, 1.0), self.choice_samples[workload.task, workload.length]
        known, window = known_orders(sizing)
        if one.orders_heads:
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


@dataclass(frozen=True)
class Group:
    """Cells of a workload that are measured one after the other."""

    together: bool
    """Whether contexts are read once for all."""
    budgets: dict[str, tuple[Compared, list[float]]]
    """Policies and their budgets, by label."""


def reading_of(one: Compared, policy: Policy, gates: str | None) -> object:
    """Return what is alike of all policies for which one reading of contexts serves, until the prompt's end; None for
    one that is read alone."""
    late = policy.schedule is not None and policy.schedule.trigger.when != "prompt"
    passes = policy.eviction is not None and policy.eviction.rereads
    if late or passes or measured_alone(policy):
        return None
    if policy.stores_all:
        return True
    if one.over_gates and one.takes_gates == WGKV.name:
        return gates, policy.window, own_tau(policy)
    return None


def compared(config: EvaluateConfig) -> list[Compared]:
    """Return the policies that are compared. Raises UserError for one that is none, and for a label twice."""
    found = [compared_of(text) for text in config.policies]
    labels = [one.label for one in found]
    if twice := [label for at, label in enumerate(labels) if label in labels[:at]]:
        raise UserError(f"--policies names {twice[0]} twice")
    return found


def gates_for(config: EvaluateConfig, one: Compared) -> tuple[str, ...]:
    """Return the folders of gates that are a policy's to take. Raises UserError if it needs some and there are none."""
    if one.orders_heads:
        return of_method(config.gates, "wgkv")
    name = one.takes_gates
    if name is None:
        return ()
    found = of_method(config.gates, name)
    if found or not is_method(one.kinds[name]):
        return found or config.gates
    raise UserError(
        f"--policies {one.label} needs --gates of {name}, a folder that training exported or the authors' file"
    )


def with_gates(config: EvaluateConfig, say: Callable[[str], None] = lambda text: None) -> EvaluateConfig:
    """Where no policies are named, with those for the tasks that need no gates or have some; `say` gets the others."""
    if config.policies != POLICIES:
        return config

    def runs(policy: str) -> bool:
        name = compared_of(policy).takes_gates
        return name is None or bool(of_method(config.gates, name))

    learned = [folder for method in LEARNED for folder in of_method(config.gates, method)]
    contests = answers_contests(config)
    policies = ANSWERING if contests else (*POLICIES, *(f"head_pattern:gates={folder}" for folder in learned))
    if without := [policy for policy in policies if not runs(policy)]:
        say(f"not compared, since --gates names nothing that was trained for them: {', '.join(without)}")
    return dataclasses.replace(config, policies=tuple(filter(runs, policies)))


def answers_contests(config: EvaluateConfig) -> bool:
    """Whether the tasks are contests.

    Raises UserError for an unknown task, and for contests beside other tasks or with questions known ahead.
    """
    contests = [task for task in config.tasks if suite_of(task).drawn]
    others = [task for task in config.tasks if task not in contests]
    if not contests:
        return False
    if others:
        raise UserError(
            f"--tasks {contests[0]} is answered at length and {others[0]} is asked about a context: evaluate them in "
            "folders of their own"
        )
    if config.question_aware:
        raise UserError(f"--question-aware is for questions about a context, which {contests[0]} has none of")
    return True


def check_policies(config: EvaluateConfig) -> None:
    """Refuse policies that are none, those that are not for the tasks, --dense without contests and --turns without
    SCBench. Raises UserError."""
    drawn = answers_contests(config)
    check_data(list(config.files))
    if config.dense is not None and not drawn:
        raise UserError(f"--dense is for contests, which {config.tasks[0]} is none of")
    if config.turns != TURNS[0] and not any(suite_of(task).takes_turns for task in config.tasks):
        raise UserError(f"--turns is for SCBench's tasks, which {config.tasks[0]} is none of")
    for one in compared(config):
        if not (one.on_contests if drawn else one.on_contexts):
            raise UserError(
                f"--policies {one.label}: its cache grows with an answer, whatever the budget; {config.tasks[0]} is "
                "for those that evict while they answer (when=position), and for full, streaming_llm, wgkv and kvpop"
                if drawn
                else f"--policies {one.label} evicts while it answers at length, which is measured on contests: "
                f"{', '.join(task for task, suite in TASKS.items() if suite.drawn)}"
            )
        if one.own_tau and len(found := gates_for(config, one)) > 1:
            by_lambda(found)


def drawing_of(config: EvaluateConfig, workload: Workload) -> Drawing:
    """How a contest's answers are drawn."""
    return Drawing(workload.draws, config.temperature, config.top_p, config.top_k, config.seed)


def sizing_of(
    config: EvaluateConfig, model: Decoder, tokens: int, shortest: int, one: Compared, budget: float
) -> Sizing:
    """What a policy is made for at a budget, of contexts of about `tokens` tokens, `shortest` at least."""
    assert config.chunk is not None
    assert config.observed is not None
    own = gates_for(config, one)
    gates = own[0] if own else None
    if one.own_tau:
        gates, budget = _by_lambda(own)[budget], 1.0
    elif one.over_gates and own:
        gates = most_selective(own, budget, tokens)
    return Sizing(
        model, budget, tokens, shortest, config.chunk, config.observed, gates, config.seed, config.force,
        tokenizer=functools.partial(_tokenizer, config.model),
    )  # fmt: skip


_tokenizer = functools.cache(load_tokenizer)


def _by_lambda(folders: Sequence[str]) -> dict[float, str]:
    """Gates at their own τ by their λ, which one alone need not say."""
    alone = len(folders) == 1 and not isinstance(described(folders[0]).get("lambda"), int | float)
    return {1.0: folders[0]} if alone else by_lambda(folders)


def possible_policies(
    config: EvaluateConfig, one: Compared, sizing: Sizing, *, any_gates: bool = False
) -> dict[str, Policy]:
    """The policy of a size, by the folder of its gates: where τ is searched for, or with `any_gates`, each that can
    meet the size.

    Raises UserError if there is none.
    """
    if not (one.searched or (any_gates and one.over_gates and sizing.gates is not None)):
        return {str(sizing.gates or ""): budget_policy(one, sizing)}
    found, errors = {}, []
    for gates in gates_for(config, one) or (sizing.gates,):
        try:
            found[gates or ""] = budget_policy(one, dataclasses.replace(sizing, gates=gates))
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


def pairs(config: EvaluateConfig) -> list[tuple[Compared, float]]:
    """Policies with their budgets: 1 for one with a size of its own, λ for gates at their own τ."""
    return [(one, budget) for one in compared(config) for budget in _budgets(one, config)]


def _budgets(one: Compared, config: EvaluateConfig) -> tuple[float, ...]:
    if one.own_tau:
        return tuple(_by_lambda(gates_for(config, one)))
    return config.budgets if one.takes_budget else (1.0,)
