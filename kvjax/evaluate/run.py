"""All cells of an evaluation: policies × budgets × tasks × contexts, those that are finished left out."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvjax import cache as caches
from kvjax.errors import UserError
from kvjax.evaluate.asked import Context, question_aware
from kvjax.evaluate.calibration import Calibration
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.contenders import Sizing, contender, sized
from kvjax.evaluate.measuring import Manner, Readings, measure, read
from kvjax.evaluate.progress import Progress
from kvjax.evaluate.results import Cell, Results, cell
from kvjax.evaluate.sources import Material, Source, check_separable, source
from kvjax.evaluate.tasks.ruler import Files
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy
from kvjax.sampling import BLOCK
from kvjax.stopwatch import Stopwatch

FIRST_SEED = 1_000_000
"""Seeds of the contexts start here, those of run seed 1 a million further, and so on."""
CALIBRATION_SEED = 500_000
"""So much further start the contexts that τ is calibrated on."""
CALIBRATION = 4
"""How many they are."""


@dataclass(frozen=True)
class Place:
    """A task at a length, with its contexts and those for calibration."""

    task: str
    length: int
    source: Source
    contexts: Sequence[Context]
    calibration: Sequence[Context]

    @property
    def tokens(self) -> int:
        """Of a context, on average, to a sixteenth of the length: tasks whose contexts differ by a few tokens then get
        the same windows, and run the same programs."""
        mean, step = np.mean([len(context.tokens) for context in self.contexts]), max(1, self.length // 16)
        return step * max(1, round(mean / step))


@dataclass
class Evaluation:
    """An evaluation of a model, checked before anything is run.

    Raises:
        UserError: a policy, a task or a budget that does not do, by name.
    """

    config: EvaluateConfig
    model: Decoder
    watch: Stopwatch = field(default_factory=Stopwatch)

    def __post_init__(self):
        config = self.config
        self.places = [self._place(task, length) for length in config.context for task in config.tasks]
        for place, (policy, budget) in itertools.product(self.places, pairs(config)):
            sized(policy, self._sizing(place, budget))

    def _place(self, task: str, length: int) -> Place:
        config = self.config
        files = Files(config.essays, config.squad, config.hotpotqa)
        found = source(task, Material(config.model, files, config.ruler_data, config.chat))
        first = FIRST_SEED * (1 + config.seed)
        contexts = found.contexts(first, _whole_batches(config, found.worth(length)), length)
        calibration = found.contexts(first + CALIBRATION_SEED, CALIBRATION, length)
        if config.question_aware:
            contexts, calibration = question_aware(contexts), question_aware(calibration)[:CALIBRATION]
        else:
            check_separable(task, contexts)
        return Place(task, length, found, contexts, calibration)

    def _sizing(self, place: Place, budget: float) -> Sizing:
        config = self.config
        assert config.chunk is not None
        assert config.observed is not None
        return Sizing(
            self.model, budget, place.tokens, config.chunk, config.observed, config.gates, config.pattern,
            config.seed,
        )  # fmt: skip

    def _manner(self, place: Place) -> Manner:
        config = self.config
        assert config.chunk is not None
        length = place.length + BLOCK
        # by default everything fits, whatever the budget, so that pools and page tables have one size
        capacity = 2 * length if config.capacity is None else caches.parse_capacity(config.capacity)
        batches = -(-len(place.contexts) // config.batch)
        batch = -(-len(place.contexts) // batches)
        return Manner(batch, config.chunk, length, capacity, config.page_size, self.watch)

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
        search: Calibration | None = None
        for budget in budgets:
            policy = sized(name, self._sizing(place, budget))
            try:
                if entry.calibrated:
                    search = search or Calibration(policy, lambda policy: self._size(policy, place, manner))
                    policy = search.to(budget)
                found = measure(self.model, policy, place.contexts, manner, readings)
            except UserError as error:
                raise UserError(f"{name} at {budget:g} on {place.task}: {error}") from None
            published = any(context.published for context in place.contexts)
            metric = place.source.metric
            yield cell(name, budget, place.task, place.length, metric, found, published, self.config)

    def _size(self, policy: Policy, place: Place, manner: Manner) -> float:
        """The share of the entries that a policy keeps of the contexts for calibration."""
        reading = read(self.model, policy, place.calibration, manner)
        return caches.stats(reading.cache, len(place.calibration)).kv_ratio


def _whole_batches(config: EvaluateConfig, worth: int) -> int:
    """Contexts for so many answers or some more: batches of one size, since each size is a program of its own."""
    count = -(-config.samples // worth)
    batches = -(-count // config.batch)
    return batches * -(-count // batches)


def pairs(config: EvaluateConfig) -> list[tuple[str, float]]:
    """Policies with their budgets; one that has but one size has budget 1."""
    return [
        (policy, budget)
        for policy in config.policies
        for budget in ((1.0,) if contender(policy).fixed else config.budgets)
    ]
