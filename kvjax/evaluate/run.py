"""All cells of an evaluation: policies × budgets × tasks × contexts, those that are finished left out."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvjax import cache as caches
from kvjax.errors import UserError
from kvjax.evaluate.calibration import Calibration, nearest
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.contenders import Sizing, contender, known_orders, sized
from kvjax.evaluate.fixed import Rivals
from kvjax.evaluate.gates import by_lambda, own_tau
from kvjax.evaluate.head_order import default_contexts, orders
from kvjax.evaluate.measuring import Manner, Readings, measure, read
from kvjax.evaluate.places import Place, for_rivals
from kvjax.evaluate.progress import Progress
from kvjax.evaluate.results import Cell, Results, cell
from kvjax.evaluate.teacher_forced import TeacherForced
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy
from kvjax.sampling import BLOCK
from kvjax.stopwatch import Stopwatch


@dataclass
class Evaluation:
    """An evaluation of a model, checked before anything is run.

    Raises:
        UserError: a budget that a policy cannot keep of some context, by name.
    """

    config: EvaluateConfig
    model: Decoder
    places: Sequence[Place]
    watch: Stopwatch = field(default_factory=Stopwatch)

    def __post_init__(self):
        for place, (policy, budget) in itertools.product(self.places, pairs(self.config)):
            sized(policy, self._sizing(place, policy, budget))

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
            for name in self.config.policies:
                todo = [
                    budget
                    for policy, budget in pairs(self.config)
                    if policy == name and (name, budget, place.task, place.length) not in results.cells
                ]
                for found in self._cells(name, todo, place):
                    results.add(found)
                    progress.done(found)

    def _cells(self, name: str, budgets: Sequence[float], place: Place) -> Iterator[Cell]:
        """One policy's cells of a place."""
        entry, manner = contender(name), self._manner(place)
        readings = Readings() if entry.reads_once else None
        searches: dict[str, Calibration] = {}
        rivals = functools.cache(lambda: self._rivals(place, name))
        for budget in budgets:
            policy, choice = sized(name, sizing := self._sizing(place, name, budget)), ""
            try:
                if entry.chosen is not None:
                    chosen = entry.chosen(rivals(), sizing.entries)
                    policy, choice = chosen.fixed.policy(self.model), chosen.said
                if entry.calibrated:
                    searches = searches or self._searches(name, sizing, place, manner)
                    sizing = dataclasses.replace(sizing, gates=nearest(searches, budget))
                    policy = searches[str(sizing.gates)].to(budget)
                found = measure(self.model, policy, place.contexts, manner, readings)
            except UserError as error:
                raise UserError(f"{name} at {budget:g} on {place.task}: {error}") from None
            tau = own_tau(policy)
            gates = None if tau is None else str(sizing.gates)
            yield cell(name, budget, place, found, self.config, gates, tau, choice)

    def _searches(self, name: str, sizing: Sizing, place: Place, manner: Manner) -> dict[str, Calibration]:
        """For each folder of gates the search for its τ."""

        def size(policy: Policy) -> float:
            return self._size(policy, place, manner)

        every = {gates: dataclasses.replace(sizing, gates=gates) for gates in self.config.gates}
        return {gates: Calibration(sized(name, own), size) for gates, own in every.items()}

    def _rivals(self, place: Place, name: str) -> Rivals:
        """What the static policies of a place are chosen by. Heads are measured where they count and no pattern was
        given."""
        config, sizing = self.config, self._sizing(place, name, 1.0)
        known, window = known_orders(sizing)
        length = min(place.length, config.order_length)
        count = config.order_contexts or default_contexts(int(np.prod(sizing.shape)), length)
        if name == "head_pattern" and config.pattern is None:
            run = TeacherForced(self.model, for_rivals(place, config, count, length))
            known = orders(run, sizing.shape, window, config.out / "heads" / f"{place.task}-{length}") | known
        run = TeacherForced(self.model, for_rivals(place, config, count, place.length))
        return Rivals(run, known, place.tokens, window, sizing.shape)

    def _size(self, policy: Policy, place: Place, manner: Manner) -> float:
        """The share of the entries that a policy keeps of the contexts for calibration."""
        reading = read(self.model, policy, place.calibration, manner)
        return caches.stats(reading.cache, len(place.calibration)).kv_ratio


def pairs(config: EvaluateConfig) -> list[tuple[str, float]]:
    """Policies with their budgets: 1 for one that has but one size, λ for gates at their own τ."""
    return [(policy, budget) for policy in config.policies for budget in _budgets(policy, config)]


def _budgets(policy: str, config: EvaluateConfig) -> tuple[float, ...]:
    if contender(policy).own_tau:
        return tuple(by_lambda(config.gates))
    return (1.0,) if contender(policy).fixed else config.budgets
