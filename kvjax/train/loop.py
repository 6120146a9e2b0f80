"""A training run from its configuration to what it exports."""

import bisect
import contextlib
import dataclasses
import functools
import json
import shlex
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Int

from kvjax.command.launch import start
from kvjax.errors import UserError
from kvjax.models import Decoder, load_model, load_tokenizer, read_config, save_model
from kvjax.models.folder import find_model, speaks_builtin
from kvjax.orbax_export import abstract, export
from kvjax.train.checkpoints import Checkpoints, all_finite, has_checkpoint
from kvjax.train.config import prepare_folder, release_folder
from kvjax.train.data import Data, draw_step_lengths, open_data
from kvjax.train.metrics import Metrics, NotFiniteError, check_numbers, check_tensorboard
from kvjax.train.recipe import Recipe, Validation
from kvjax.train.rows import Rows, to_mesh
from kvjax.train.update import TrainState, enter, initial_state, make_update, param_dtypes, round_parameters
from kvjax.train.validation import make_validate


@dataclasses.dataclass(frozen=True)
class RunOutput:
    """What a run leaves: the model, loaded or trained, the method's own parameters, the folder, and the validation."""

    model: Decoder
    params: Any
    mesh: Mesh
    folder: Path
    validation: Validation


def check(config: Recipe) -> None:
    """Refuse what can be seen to fail before a device is used. Raises UserError."""
    folder = find_model(config.model)
    model = read_config(folder)
    tensor = config.mesh.tensor
    if model.num_kv_heads % tensor:
        raise UserError(
            f"--mesh {config.mesh}: its tensor axis of {tensor} does not divide the model's "
            f"{model.num_kv_heads} kv heads"
        )
    for phase in config.phases():
        phase.check_model(model)
    if config.data == "builtin" and not speaks_builtin(folder):
        raise UserError(
            f"--data builtin is made of the built-in model's tokens, which {config.model} does not have: name a file, "
            "a folder or a hub data set"
        )
    if config.report == "full" and not speaks_builtin(folder):
        raise UserError(f"--report full is for the built-in model, got --model {config.model}")
    if config.tensorboard:
        check_tensorboard()


def train(config: Recipe) -> RunOutput:
    """Train as `config` (from `parse`) says: checkpoints and metrics on the way, the parameters exported at the end.

    Raises:
        UserError: whatever is wrong with the model, the data, the folder or the devices, before anything compiles.
    """
    check(config)
    phases = tuple(config.phases())
    if any(phase.rows != config.rows for phase in phases):
        raise ValueError(
            f"{type(config).__name__}.phases: each must have the run's {config.rows} sequences an update"
        )
    mesh = start(config.mesh)
    with jax.set_mesh(mesh):
        longest = max(max(phase.lengths) for phase in phases)
        model = load_model(config.model, dtype=config.dtype, max_length=longest)
        rows = Rows.of_this_process(mesh, config.rows)
        lengths = np.concatenate(
            [draw_step_lengths(phase.steps, phase.lengths, phase.shares, phase.seed) for phase in phases]
        )
        data = open_data(
            config.data,
            rows=rows,
            step_lengths=lengths,
            lengths=sorted({length for phase in phases for length in phase.lengths}),
            validation=draw_step_lengths(
                config.validation, phases[-1].lengths, phases[-1].shares, phases[-1].seed
            ),
            seed=config.seed,
            tokenizer=None if config.data == "builtin" else load_tokenizer(config.model),
            instruction=config.instruction,
        )
        # the folder is taken once nothing is left that the user could have to mend
        folder = prepare_folder(config, write=jax.process_index() == 0)
        with _free_if_it_fails(folder), Checkpoints(folder / "checkpoints", config.keep) as checkpoints:
            dtypes = param_dtypes(phases, model)
            run = Run(config, phases, folder, mesh, rows, data, checkpoints, dtypes)
            state, first = run.begin(model)
            read = None if config.takes_model else model
            del model  # what a recipe took over is not kept twice
            try:
                state, found = run.steps(state, first, read, tokens=rows.total * int(lengths.sum()))
            except NotFiniteError as error:
                raise UserError(not_finite(config, folder, error, checkpoints.last_written())) from None
        return _export(phases[-1], mesh, folder, round_parameters(state.params, dtypes[-1]), read, found)


@contextlib.contextmanager
def _free_if_it_fails(folder: Path) -> Iterator[None]:
    """Free the folder of a run that fails before its first checkpoint. One that is stopped may be gone on with."""
    try:
        yield
    except Exception:
        if jax.process_index() == 0 and not has_checkpoint(folder / "checkpoints"):
            release_folder(folder)
        raise


def _export(
    recipe: Recipe, mesh: Mesh, folder: Path, params: Any, loaded: Decoder | None, found: Validation
) -> RunOutput:
    own, trained = recipe.split(params)
    model = loaded if trained is None else trained
    assert model is not None, f"{type(recipe).__name__} takes the model, so its split gives it back"
    into = folder / recipe.exports
    recipe.export(into, own, model, found)
    export(into / "orbax", params)
    if trained is not None:
        # a resumed run may have left one; what is in it is in the checkpoints, too
        if jax.process_index() == 0:
            shutil.rmtree(into / "model", ignore_errors=True)
        multihost_utils.sync_global_devices("the model's folder is free")
        save_model(trained, into / "model", tokenizer_from=recipe.model)
    return RunOutput(model, own, mesh, folder, found)


class TokenCount:
    """Sequences, of which each process has its rows, with the tokens of those that were taken."""

    def __init__(self, sequences: Iterable[Int[np.ndarray, "b t"]], rows: int):
        self._sequences, self._rows, self._tokens = sequences, rows, 0
        self.taken = 0
        """How many were taken since the last call of `take`."""

    def __iter__(self) -> Iterator[Int[np.ndarray, "b t"]]:
        for batch in self._sequences:
            self._tokens += self._rows * batch.shape[1]
            self.taken += 1
            yield batch

    def take(self) -> int:
        """The tokens of all rows since the last call."""
        tokens, self._tokens, self.taken = self._tokens, 0, 0
        return tokens


def check_taken(recipe: Recipe, count: int) -> None:
    """Refuse a recipe that made a batch of the sequences of `count` updates, if that is not one. Raises ValueError."""
    if count != 1:
        raise ValueError(
            f"{type(recipe).__name__}.batches must take the sequences of one update for a batch, took those of "
            f"{count}: what it holds back would be lost on a resume"
        )


def not_finite(config: Recipe, folder: Path, error: NotFiniteError, kept: int | None) -> str:
    """Why a run stopped whose numbers are no longer finite, what is kept, and how to go on, in one line."""
    total = sum(phase.steps for phase in config.phases())
    rate = config.own_options().get("lr")
    if kept is None:
        left = "there is no checkpoint before it"
    else:
        use = shlex.join(["python", "-m", "kvjax.export", str(folder)])
        left = f"the last good checkpoint is of step {kept}, in {folder / 'checkpoints'}: {use} exports it"
    told = "" if rate is None else f" than {rate:g}"
    return (
        f"step {error.step} of {total}: {error.what}: the run is stopped and exports nothing; {left}. If weights and "
        f"data are right, start another run with a smaller --lr{told}"
    )


def plan(config: Recipe, first: int, tokens: int) -> str:
    """What a run is going to do, or to go on with, in one line."""
    rows, steps = config.rows, sum(phase.steps for phase in config.phases())
    text = f"{rows * steps:,} sequences, {tokens:,} tokens in all: {steps} updates of {rows}"
    if rows > config.batch:
        shards = config.mesh.batch_shards
        text += f", not {config.batch}: the mesh splits a batch into {shards} (its axis `tensor` does not)"
    if first:
        text += f"; going on with update {first + 1}" if first < steps else "; all are done"
    return text


@dataclasses.dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last."""

    config: Recipe
    phases: tuple[Recipe, ...]
    folder: Path
    mesh: Mesh
    rows: Rows
    data: Data
    checkpoints: Checkpoints
    dtypes: tuple[Any, ...]
    """Of each phase's parameters with master weights (`param_dtypes`)."""

    @property
    def ends(self) -> list[int]:
        """The updates of the run after which each phase is over."""
        return np.cumsum([phase.steps for phase in self.phases]).tolist()

    def first_state(self, model: Decoder, phase: int) -> TrainState:
        """A state of the structure and shardings that the phase's have; of the first, the one before any update."""
        state = initial_state(self.phases[0], model)
        for later, dtypes in zip(self.phases[1 : phase + 1], self.dtypes, strict=False):
            state = enter(later, state.params, dtypes)
        return state

    def begin(self, model: Decoder) -> tuple[TrainState, int]:
        """The state to go on with and its step, the data moved there: the last checkpoint's, or the first ones."""
        step = self.checkpoints.latest() if self.config.resume else None
        if step is None:
            given = 0 if self.config.takes_model else ()
            return jax.jit(self.first_state, static_argnums=1, donate_argnums=given)(model, 0), 0
        phase = bisect.bisect_left(self.ends, step)
        like = abstract(lambda model: self.first_state(model, phase), self.mesh, model)
        state, notes = self.checkpoints.restore(step, like)
        positions = notes["data"]
        if len(positions) != self.rows.groups and any(position != positions[0] for position in positions):
            raise UserError(
                f"--resume: this run's data was read in {len(positions)} parts, one for each process; now there are "
                f"{self.rows.groups}"
            )
        self.data.sequences.set_state(positions[self.rows.group if len(positions) == self.rows.groups else 0])
        return state, step

    def steps(
        self, state: TrainState, first: int, model: Decoder | None, *, tokens: int
    ) -> tuple[TrainState, Validation]:
        """The steps from `first` on; the state after them, and its validation. tokens: of the whole run.

        A checkpoint of step n is saved once the metrics up to n are on disk.

        Raises:
            NotFiniteError: the loss, a gradient, the parameters or a figure of the validation is not finite. All
                processes see the same numbers, and stop together.
        """
        config, ends = self.config, self.ends
        total, found = ends[-1], None
        validate_every = config.validate_every or config.checkpoint_every
        with Metrics(
            self.folder,
            total=total,
            first=first,
            shown=config.shown,
            tensorboard=config.tensorboard,
            quiet=jax.process_index() > 0,
        ) as metrics:
            metrics.say(plan(config, first, tokens))
            if self.data.remark:
                metrics.say(self.data.remark)
            metrics.say(f"the run is kept in {self.folder}")
            for at, recipe in enumerate(self.phases):
                began, last = ([0, *ends][at], ends[at])
                validate = make_validate(recipe, self.mesh, self.data.held_out, self.dtypes[at])
                if first >= last:
                    continue
                if at and first <= began:
                    entered = functools.partial(enter, recipe, dtypes=self.dtypes[at - 1])
                    state = jax.jit(entered, donate_argnums=0)(state.params)
                    metrics.say(f"phase {at + 1} of {len(self.phases)}: {recipe.steps} updates")
                update, counted = (
                    make_update(recipe, self.dtypes[at], before=began),
                    TokenCount(self.data.sequences, self.rows.total),
                )
                batches = recipe.batches(iter(counted), model)
                for step in range(max(first, began), last):
                    batch = to_mesh(self.mesh, self.rows, next(batches))
                    check_taken(recipe, counted.taken)
                    state, numbers = update(state, model, batch, np.int32(step - began))
                    metrics.step(step, numbers, tokens=counted.take())
                    done = step + 1
                    validated = done % validate_every == 0 or done == last
                    saved = done % config.checkpoint_every == 0 or done == last
                    if validated or saved:
                        metrics.flush()
                        if not all_finite(state):
                            raise NotFiniteError(done, "the parameters are no longer finite")
                    if validated:
                        found = validate(state, model)
                        check_numbers(done, found.numbers, "held-out ")
                        metrics.note(step, "validation", found.numbers | {"sequences": found.sequences})
                        metrics.say(f"step {done}: {found}")
                    if saved:
                        metrics.flush()
                        self.checkpoints.save(done, state, {"data": self.positions()})
        return state, found or validate(state, model)

    def positions(self) -> list[Any]:
        """Where each of the `rows.groups` parts of the data stands, a JSON value each."""
        own = self.data.sequences.get_state()
        if jax.process_count() == 1:
            return [own]
        text = np.frombuffer(json.dumps([self.rows.group, own]).encode(), np.uint8)
        longest = int(multihost_utils.process_allgather(np.int32(text.size)).max())
        padded = np.pad(text, (0, longest - text.size), constant_values=ord(" "))
        by_group = dict(json.loads(row.tobytes()) for row in multihost_utils.process_allgather(padded))
        return [by_group[group] for group in range(self.rows.groups)]
