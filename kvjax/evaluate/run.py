"""All cells of an evaluation: policies × budgets × tasks × contexts, those that are finished left out."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvjax import cache as caches
from kvjax.errors import UserError
from kvjax.evaluate.asked import agreeing
from kvjax.evaluate.calibration import Calibration
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.contenders import Sizing, contender, sized
from kvjax.evaluate.measuring import Manner, measure, measure_budgets, read
from kvjax.evaluate.places import Place
from kvjax.evaluate.progress import Progress
from kvjax.evaluate.results import Cell, Results, cell
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
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
            sized(policy, self._sizing(place, budget))

    def _sizing(self, place: Place, budget: float) -> Sizing:
        config = self.config
        assert config.chunk is not None
        assert config.observed is not None
        return Sizing(
            self.model, budget, place.tokens, place.shortest, config.chunk, config.observed, config.gates,
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
            for name, budgets in todo.items():
                for found in self._cells(name, budgets, place):
                    results.add(found)
                    progress.done(found)

    def _against_full(self, place: Place) -> Place:
        """The place, its texts scored by what the full cache says."""
        if all(question.given is None for context in place.contexts for question in context.questions):
            return place
        full = make_policy("full", model=self.model)
        said = measure(self.model, full, place.contexts, self._manner(place)).said
        return dataclasses.replace(place, contexts=agreeing(place.contexts, said))

    def _cells(self, name: str, budgets: Sequence[float], place: Place) -> Iterator[Cell]:
        """One policy's cells of a place."""
        entry, manner = contender(name), self._manner(place)
        policies = [sized(name, self._sizing(place, budget)) for budget in budgets]
        try:
            if entry.reads_once:
                found = iter(measure_budgets(self.model, policies, place.contexts, manner))
            else:
                fitted = self._calibrated(policies, budgets, place, manner) if entry.calibrated else policies
                found = (measure(self.model, policy, place.contexts, manner) for policy in fitted)
            for budget, one in zip(budgets, found, strict=True):
                yield cell(name, budget, place, one, self.config)
        except UserError as error:
            shown = ", ".join(f"{budget:g}" for budget in budgets)
            raise UserError(f"{name} at {shown} on {place.task}: {error}") from None

    def _calibrated(
        self, policies: Sequence[Policy], budgets: Sequence[float], place: Place, manner: Manner
    ) -> Iterator[Policy]:
        search = Calibration(policies[0], lambda policy: self._size(policy, place, manner))
        return map(search.to, budgets)

    def _size(self, policy: Policy, place: Place, manner: Manner) -> float:
        """The share of the entries that a policy keeps of the contexts for calibration."""
        reading = read(self.model, policy, place.calibration, manner)
        return caches.stats(reading.cache, len(place.calibration)).kv_ratio


def pairs(config: EvaluateConfig) -> list[tuple[str, float]]:
    """Policies with their budgets; one that has but one size has budget 1."""
    return [
        (policy, budget)
        for policy in config.policies
        for budget in ((1.0,) if contender(policy).fixed else config.budgets)
    ]
