"""The training loop: the updates of a run from the first to the last, with their log, validations and checkpoints."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from kvjax.checkpoints.orbax import abstract
from kvjax.cli.launch import Termination
from kvjax.errors import UserError
from kvjax.models import Decoder
from kvjax.train import memory
from kvjax.train.batches import Rows, to_mesh
from kvjax.train.checkpoints import Checkpoints, all_finite, saved_steps
from kvjax.train.data import Data
from kvjax.train.metrics import Metrics, NotFiniteError, check_numbers
from kvjax.train.preemption import preemption
from kvjax.train.recipe import Recipe, Validation
from kvjax.train.update import TrainState, Update, initial_state
from kvjax.train.validation import make_validate


class TokenCount:
    """An iterator over this process's batches that counts the tokens of all `rows` of a batch. With `tokens` False it
    counts rows, which are not sequences of tokens."""

    def __init__(self, sequences: Iterable[Any], rows: int, tokens: bool):
        self._sequences, self._rows, self._counts_tokens, self._tokens = sequences, rows, tokens, 0
        self.taken = 0
        """The number of batches since the last call of `take`."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self._sequences:
            self._tokens += self._rows * (jax.tree.leaves(batch)[0].shape[1] if self._counts_tokens else 1)
            self.taken += 1
            yield batch

    def take(self) -> int:
        """Return the number of tokens since the last call, and reset the counts."""
        tokens, self._tokens, self.taken = self._tokens, 0, 0
        return tokens


def check_taken(recipe: Recipe, count: int) -> None:
    """Raise ValueError if a recipe took the sequences of `count` ≠ 1 updates for a batch."""
    if count != 1:
        raise ValueError(
            f"{type(recipe).__name__}.batches must take the sequences of one update for a batch, took those of "
            f"{count}: what it holds back would be lost on a resume"
        )


def plan(recipe: Recipe, first: int, tokens: int, parameters: int) -> str:
    """Return a line that says what a run is going to do.

    Args:
        first: the number of updates that are already done.
        tokens: the number of tokens of the whole run.
        parameters: the number of trained parameters.
    """
    rows, steps = recipe.rows, recipe.steps
    token_count = f", {tokens:,} tokens" if recipe.unit == "sequences" else ""
    text = f"{parameters:,} parameters, {rows * steps:,} {recipe.unit}{token_count} in all: {steps} updates of {rows}"
    if rows > recipe.batch:
        shards = recipe.mesh.batch_shards
        text += f", not {recipe.batch}: the mesh splits a batch into {shards} (its axes `tensor` and `sequence` do not)"
    if first:
        text += f"; going on with update {first + 1}" if first < steps else "; all are done"
    return text


def check_resumed(recipe: Recipe, folder: Path, groups: int) -> None:
    """Raise UserError if the run in a folder cannot go on with rows in `groups` parts, since each part has its own
    documents."""
    steps = saved_steps(folder / "checkpoints")
    own_documents = recipe.data != "builtin" and recipe.unit == "sequences"
    if not own_documents or not steps or steps[-1] >= recipe.steps:
        return
    with Checkpoints(folder / "checkpoints", None) as checkpoints:
        parts = len(checkpoints.notes(steps[-1])["data"])
    if parts != groups:
        raise UserError(
            f"--resume: each process has its own documents, so a run goes on with as many processes that have their "
            f"own rows: got {groups}, expected {parts}"
        )


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run that stay the same from the first step to the last."""

    recipe: Recipe
    """The method and its options."""
    folder: Path
    """The folder of the run."""
    mesh: Mesh
    """The mesh of the run."""
    rows: Rows
    """This process's rows of an update."""
    data: Data
    """The data, positioned at the next update's sequences."""
    checkpoints: Checkpoints
    """The checkpoints of the run."""
    dtypes: Any
    """The dtypes of parameters with master weights (`param_dtypes`)."""

    def begin(self, model: Decoder) -> tuple[TrainState, int]:
        """Return the state to start from and its step, and move the data there. On a resume it is the state of the last
        checkpoint, else the first state."""
        step = self.checkpoints.latest() if self.recipe.resume else None
        if step is None:
            donated = 0 if self.recipe.takes_model else ()
            first_state = jax.jit(functools.partial(initial_state, self.recipe), donate_argnums=donated)
            state = first_state(model)
            return dataclasses.replace(state, params=self.recipe.begin(state.params)), 0
        if step < self.recipe.steps:
            positions = self.checkpoints.notes(step)["data"]
            # `check_resumed` accepts another number of groups only if all of them have the same position
            same_groups = len(positions) == self.rows.groups
            self.data.sequences.set_state(positions[self.rows.group if same_groups else 0])
        return self.restore(model, step), step

    def restore(self, model: Decoder, step: int) -> TrainState:
        """Return a checkpoint's state."""
        return self.checkpoints.restore(
            step, abstract(lambda model: initial_state(self.recipe, model), self.mesh, model)
        )

    def steps(
        self,
        update: Update,
        state: TrainState,
        first: int,
        model: Decoder | None,
        *,
        tokens: int,
        extra_bytes: int,
    ) -> tuple[TrainState, Validation]:
        """Run the steps from `first` on, and return the last state and its validation.

        A checkpoint of step n is saved once the metrics up to n are on disk.

        Args:
            tokens: the number of tokens of the whole run.
            extra_bytes: the result of `memory.check`.

        Raises:
            NotFiniteError: the loss, a gradient, the parameters or a figure of the validation is not finite. All
                processes see the same numbers and stop together.
        """
        recipe, total, validation = self.recipe, self.recipe.steps, None
        validate_every = recipe.validate_every or recipe.checkpoint_every
        counts_tokens = recipe.unit == "sequences"
        validate = make_validate(recipe, self.mesh, self.data.held_out, self.dtypes, self.data.held_rows)
        with (
            Metrics(
                self.folder,
                total=total,
                first=first,
                shown=recipe.shown,
                tensorboard=recipe.tensorboard,
                quiet=jax.process_index() > 0,
                unit="tokens" if counts_tokens else recipe.unit,
            ) as metrics,
            preemption() as preempted,
        ):
            parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
            metrics.say(plan(recipe, first, tokens, parameters))
            if self.data.remark:
                metrics.say(self.data.remark)
            metrics.say(f"the run is kept in {self.folder}")
            if first < total:
                metrics.say(memory.describe(recipe, state, model, extra_bytes))
            counted = TokenCount(self.data.sequences, self.rows.total, counts_tokens)
            batches = recipe.batches(iter(counted), model)
            for step in range(first, total):
                batch = to_mesh(self.mesh, self.rows, next(batches))
                check_taken(recipe, counted.taken)
                state, numbers = update(state, model, batch, np.int32(step))
                metrics.step(step, numbers, tokens=counted.take())
                done = step + 1
                validated = done % validate_every == 0 or done == total
                stops = preempted(done)
                saved = done % recipe.checkpoint_every == 0 or done == total or stops
                if validated or saved:
                    metrics.flush()
                    if not all_finite(state):
                        raise NotFiniteError(done, "the parameters are no longer finite")
                if validated:
                    validation = validate(state, model)
                    check_numbers(done, validation.numbers, "held-out ")
                    metrics.note(step, "validation", validation.numbers | {"sequences": validation.sequences})
                    metrics.say(f"step {done}: {validation}")
                if saved:
                    metrics.flush()
                    self.checkpoints.save(done, state, {"data": self.positions()})
                if stops:
                    raise Termination
        return state, validation or validate(state, model)

    def positions(self) -> list[Any]:
        """Return the positions of the `rows.groups` parts of the data, as JSON values."""
        position = self.data.sequences.get_state()
        if jax.process_count() == 1:
            return [position]
        text = np.frombuffer(json.dumps([self.rows.group, position]).encode(), np.uint8)
        size = int(multihost_utils.process_allgather(np.int32(text.size)).max())
        padded = np.pad(text, (0, size - text.size), constant_values=ord(" "))
        by_group = dict(json.loads(row.tobytes()) for row in multihost_utils.process_allgather(padded))
        return [by_group[group] for group in range(self.rows.groups)]
