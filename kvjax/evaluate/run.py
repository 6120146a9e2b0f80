"""All cells of an evaluation: policies × budgets × tasks × contexts, those that are finished left out."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvjax import cache as caches
from kvjax.errors import UserError
from kvjax.evaluate.asked import Context, agreeing
from kvjax.evaluate.calibration import Calibration, nearest
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.contenders import Sizing, contender, known_orders, sized
from kvjax.evaluate.fixed import Rivals
from kvjax.evaluate.gates import by_lambda, own_tau
from kvjax.evaluate.head_order import default_contexts, orders
from kvjax.evaluate.measuring import Found, Manner, measure, measure_together, read
from kvjax.evaluate.places import Place, for_rivals
from kvjax.evaluate.progress import Progress
from kvjax.evaluate.results import Cell, Results, cell
from kvjax.evaluate.teacher_forced import TeacherForced
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.sampling import BLOCK
from kvjax.stopwatch import Stopwatch


@dataclass(frozen=True)
class Made:
    """A policy of a budget. gates: the folder of its gates. choice: what was chosen on calibration contexts, in
    words."""

    policy: Policy
    gates: str | None
    choice: str


@dataclass
class Evaluation:
    """An evaluation of a model, checked before anything is run.

    Raises:
        UserError: a budget that a policy cannot keep of some context, by name; too few contexts to calibrate on.
    """

    config: EvaluateConfig
    model: Decoder
    places: Sequence[Place]
    watch: Stopwatch = field(default_factory=Stopwatch)
    chosen_on: dict[tuple[str, int], dict[int, list[Context]]] = field(default_factory=dict, init=False)

    def __post_init__(self):
        for place, (policy, budget) in itertools.product(self.places, pairs(self.config)):
            sized(policy, self._sizing(place, policy, budget))
        for place in self.places:
            lengths = {length for name in self.config.policies for length in self._choosing(place, name)}
            count = self._order_size(place)[0]
            contexts = {length: for_rivals(place, self.config, count, length) for length in lengths}
            self.chosen_on[place.task, place.length] = contexts

    def _order_size(self, place: Place) -> tuple[int, int]:
        """How many contexts heads are ordered on, and of what length: published ones have that of their place."""
        config = self.config
        length = place.length if place.published else min(place.length, config.order_length)
        heads = self.model.config.num_layers * self.model.config.num_kv_heads
        return config.order_contexts or default_contexts(heads, length), length

    def _choosing(self, place: Place, name: str) -> set[int]:
        """Lengths of the contexts that a policy's static choices are made on."""
        if contender(name).chosen is None:
            return set()
        return {place.length, self._order_size(place)[1]} if self._orders(name) else {place.length}

    def _orders(self, name: str) -> bool:
        """Whether a policy's heads are measured: where they count and no pattern was given."""
        return name == "head_pattern" and self.config.pattern is None

    def _sizing(self, place: Place, policy: str, budget: float) -> Sizing:
        config = self.config
        assert config.chunk is not None
        assert config.observed is not None
        gates = config.gates[0] if config.gates else None
        if contender(policy).own_tau:
            gates, budget = by_lambda(config.gates)[budget], 1.0
        return Sizing(
            self.model, budget, place.tokens, place.shortest, config.chunk, config.observed, gates,
            config.pattern, config.seed,
        )  # fmt: skip

    def _manner(self, place: Place) -> Manner:
        config = self.config
        assert config.chunk is not None
        length = place.length + BLOCK
        # by default everything fits, whatever the budget, so that pools and page tables have one size
        capacity = 2 * length if config.capacity is None else caches.parse_capacity(config.capacity)
        return Manner(place.batch, config.chunk, length, capacity, config.page_size, self.watch)

    def run(self, results: Results, progress: Progress) -> None:
        """Every cell that is not among the results yet, each added to them when it is finished."""
        for place in self.places:
            todo: dict[str, list[float]] = {}
            for name, budget in pairs(self.config):
                if (name, budget, place.task, place.length) not in results.cells:
                    todo.setdefault(name, []).append(budget)
            if todo:
                place = self._against_full(place)
            for names in _reading_alike(todo):
                for found in self._cells({name: todo[name] for name in names}, place):
                    results.add(found)
                    progress.done(found)

    def _against_full(self, place: Place) -> Place:
        """The place, its texts scored by what the full cache says."""
        if all(question.given is None for context in place.contexts for question in context.questions):
            return place
        full = make_policy("full", model=self.model)
        said = measure(self.model, full, place.contexts, self._manner(place)).said
        return dataclasses.replace(place, contexts=agreeing(place.contexts, said))

    def _cells(self, todo: Mapping[str, Sequence[float]], place: Place) -> Iterator[Cell]:
        """The cells of a place of a policy at some budgets, or of several that read alike."""
        manner = self._manner(place)
        made = {name: self._made(name, budgets, place, manner) for name, budgets in todo.items()}
        try:
            if contender(next(iter(todo))).reads:
                fitted = {name: list(own) for name, own in made.items()}
                policies = [[one.policy for one in own] for own in fitted.values()]
                found = iter(measure_together(self.model, policies, place.contexts, manner))
                for name, own in fitted.items():
                    for budget, one in zip(todo[name], own, strict=True):
                        yield self._cell(name, budget, one, place, next(found))
            else:
                for name, own in made.items():
                    for budget, one in zip(todo[name], own, strict=True):
                        found = measure(self.model, one.policy, place.contexts, manner)
                        yield self._cell(name, budget, one, place, found)
        except UserError as error:
            raise UserError(f"{', '.join(todo)} on {place.task}: {error}") from None

    def _cell(self, name: str, budget: float, made: Made, place: Place, found: Found) -> Cell:
        return cell(name, budget, place, found, self.config, made.gates, own_tau(made.policy), made.choice)

    def _made(self, name: str, budgets: Sequence[float], place: Place, manner: Manner) -> Iterator[Made]:
        """One policy at each budget, fitted on calibration contexts where it has something to fit."""
        entry = contender(name)
        searches: dict[str, Calibration] = {}
        rivals = functools.cache(lambda: self._rivals(place, name))
        for budget in budgets:
            policy, choice = sized(name, sizing := self._sizing(place, name, budget)), ""
            if entry.chosen is not None:
                chosen = entry.chosen(rivals(), sizing.entries)
                policy, choice = chosen.fixed.policy(self.model), chosen.said
            if entry.calibrated:
                searches = searches or self._searches(name, sizing, place, manner)
                sizing = dataclasses.replace(sizing, gates=nearest(searches, budget))
                policy = searches[str(sizing.gates)].to(budget)
            yield Made(policy, None if own_tau(policy) is None else str(sizing.gates), choice)

    def _searches(self, name: str, sizing: Sizing, place: Place, manner: Manner) -> dict[str, Calibration]:
        """For each folder of gates the search for its τ."""

        def size(policy: Policy) -> float:
            return self._size(policy, place, manner)

        every = {gates: dataclasses.replace(sizing, gates=gates) for gates in self.config.gates}
        return {gates: Calibration(sized(name, own), size) for gates, own in every.items()}

    def _rivals(self, place: Place, name: str) -> Rivals:
        """What the static policies of a place are chosen by."""
        sizing, contexts = self._sizing(place, name, 1.0), self.chosen_on[place.task, place.length]
        known, window = known_orders(sizing)
        if self._orders(name):
            length = self._order_size(place)[1]
            folder = self.config.out / "heads" / f"{place.task}-{length}"
            known = orders(TeacherForced(self.model, contexts[length]), sizing.shape, window, folder) | known
        run = TeacherForced(self.model, contexts[place.length])
        return Rivals(run, known, place.tokens, window, sizing.shape)

    def _size(self, policy: Policy, place: Place, manner: Manner) -> float:
        """The share of the entries that a policy keeps of the contexts for calibration."""
        reading = read(self.model, policy, place.calibration, manner)
        return caches.stats(reading.cache, len(place.calibration)).kv_ratio


def _reading_alike(names: Iterable[str]) -> list[list[str]]:
    """The names, those together whose contexts are read once for all."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(contender(name).reads or name, []).append(name)
    return list(groups.values())


def pairs(config: EvaluateConfig) -> list[tuple[str, float]]:
    """Policies with their budgets: 1 for one that has but one size, λ for gates at their own τ."""
    return [(policy, budget) for policy in config.policies for budget in _budgets(policy, config)]


def _budgets(policy: str, config: EvaluateConfig) -> tuple[float, ...]:
    if contender(policy).own_tau:
        return tuple(by_lambda(config.gates))
    return (1.0,) if contender(policy).fixed else config.budgets
