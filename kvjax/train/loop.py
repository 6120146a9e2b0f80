"""A training run from its configuration to exported gates."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.command.launch import start
from kvjax.errors import LARGEST_INT, UserError
from kvjax.models import Decoder, load_model, load_tokenizer, read_config
from kvjax.models.folder import find_model, speaks_builtin
from kvjax.orbax_export import abstract
from kvjax.policies.admission.wgkv import WriteGate
from kvjax.train.checkpoints import Checkpoints, check_finite
from kvjax.train.config import TrainConfig, prepare_folder
from kvjax.train.data import Rows, open_data, step_lengths, to_mesh
from kvjax.train.exported import export_gates
from kvjax.train.metrics import Metrics, check_tensorboard
from kvjax.train.step import TrainState, initial_state, make_update
from kvjax.train.validation import Validate, Validation, make_validate

SHOWN = {"loss": ".4f", "distillation": ".4f", "sparsity": ".3f", "kv_size": ".3f"}


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run leaves: the frozen model, its gates, where they are, and what they are worth on held-out data."""

    model: Decoder
    gates: WriteGate
    mesh: Mesh
    folder: Path
    validation: Validation


def check(config: TrainConfig) -> None:
    """Refuse what can be seen to fail before a device is used. Raises UserError."""
    folder = find_model(config.model)
    model = read_config(folder)
    tensor = config.mesh.tensor
    if model.num_kv_heads % tensor:
        raise UserError(
            f"--mesh {config.mesh}: its tensor axis of {tensor} does not divide the model's "
            f"{model.num_kv_heads} kv heads"
        )
    # half a neuron and less is rounded to none
    if config.expand is not None and not 0.5 < (width := model.head_dim * config.expand) <= LARGEST_INT:
        raise UserError(
            f"--expand {config.expand:g} makes gates {width:g} wide for the model's head_dim of {model.head_dim}, "
            "expected at least 1"
        )
    if config.data == "builtin" and not speaks_builtin(folder):
        raise UserError(
            f"--data builtin is made of the built-in model's tokens, which {config.model} does not have: name a file, "
            "a folder or a hub data set"
        )
    if config.report == "full" and not speaks_builtin(folder):
        raise UserError(f"--report full is for the built-in model, got --model {config.model}")
    if config.tensorboard:
        check_tensorboard()


def train(config: TrainConfig) -> Trained:
    """Train gates as `config` (from `parse`) says: checkpoints and metrics on the way, the gates exported at the end.

    Raises:
        UserError: whatever is wrong with the model, the data, the folder or the devices, before anything compiles.
    """
    check(config)
    mesh = start(config.mesh)
    with jax.set_mesh(mesh):
        model = load_model(config.model, dtype=config.dtype, max_length=max(config.lengths))
        rows = Rows.of_this_process(mesh, config.rows)
        lengths = step_lengths(config.steps, config.lengths, config.shares, config.seed)
        sequences, held_out = open_data(
            config.data,
            rows=rows,
            schedule=lengths,
            lengths=config.lengths,
            validation=step_lengths(config.validation, config.lengths, config.shares, config.seed),
            seed=config.seed,
            tokenizer=None if config.data == "builtin" else load_tokenizer(config.model),
            instruction=config.instruction,
        )
        # the folder is taken once nothing is left that the user could have to mend
        folder = prepare_folder(config, write=jax.process_index() == 0)
        validate = make_validate(config, mesh, held_out)
        with Checkpoints(folder / "checkpoints", config.keep) as checkpoints:
            run = Run(config, folder, mesh, model, rows, sequences, checkpoints, validate)
            state, found = run.steps(*run.begin(), tokens=rows.total * int(lengths.sum()))
        export_gates(folder / "gates", state.gates, config, found)
        return Trained(model, state.gates, mesh, folder, found)


def plan(config: TrainConfig, first: int, tokens: int) -> str:
    """What a run is going to do, or to go on with, in one line."""
    rows, steps = config.rows, config.steps
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

    config: TrainConfig
    folder: Path
    mesh: Mesh
    model: Decoder
    rows: Rows
    sequences: grain.DatasetIterator
    checkpoints: Checkpoints
    validate: Validate

    def begin(self) -> tuple[TrainState, int]:
        """The state to go on with and its step, the data moved there: the last checkpoint's, or the first ones."""

        def make():
            return initial_state(self.config, self.model.config)

        step = self.checkpoints.latest() if self.config.resume else None
        if step is None:
            return jax.jit(make)(), 0
        state, notes = self.checkpoints.restore(step, abstract(make, self.mesh))
        positions = notes["data"]
        if len(positions) != self.rows.groups and any(position != positions[0] for position in positions):
            raise UserError(
                f"--resume: this run's data was read in {len(positions)} parts, one for each process; now there are "
                f"{self.rows.groups}"
            )
        self.sequences.set_state(positions[self.rows.group if len(positions) == self.rows.groups else 0])
        return state, step

    def steps(self, state: TrainState, first: int, *, tokens: int) -> tuple[TrainState, Validation]:
        """The steps from `first` on; the state after them, and its validation. tokens: of the whole run.

        A checkpoint of step n is saved once the metrics up to n are on disk.

        Raises:
            UserError: the loss or the gates are no longer finite.
        """
        config, update = self.config, make_update(self.config)
        validate_every = config.validate_every or config.checkpoint_every
        found = None
        with Metrics(
            self.folder,
            total=config.steps,
            first=first,
            shown=SHOWN,
            tensorboard=config.tensorboard,
            quiet=jax.process_index() > 0,
        ) as metrics:
            metrics.say(plan(config, first, tokens))
            metrics.say(f"the run is kept in {self.folder}")
            for step in range(first, config.steps):
                batch = to_mesh(self.mesh, self.rows, next(self.sequences))
                state, numbers = update(state, self.model, batch)
                metrics.step(step, numbers, tokens=batch.size)
                done, last = step + 1, step + 1 == config.steps
                if done % validate_every == 0 or last:
                    metrics.flush()
                    found = self.validate(state.gates, self.model)
                    metrics.note(step, "validation", found.numbers)
                    metrics.say(f"step {done}: {found}")
                if done % config.checkpoint_every == 0 or last:
                    metrics.flush()
                    check_finite(f"step {done}", state)
                    self.checkpoints.save(done, state, {"data": self.positions()})
        return state, found or self.validate(state.gates, self.model)

    def positions(self) -> list[Any]:
        """Where each of the `rows.groups` parts of the data stands, a JSON value each."""
        own = self.sequences.get_state()
        if jax.process_count() == 1:
            return [own]
        from jax.experimental import multihost_utils

        text = np.frombuffer(json.dumps([self.rows.group, own]).encode(), np.uint8)
        longest = int(multihost_utils.process_allgather(np.int32(text.size)).max())
        padded = np.pad(text, (0, longest - text.size), constant_values=ord(" "))
        by_group = dict(json.loads(row.tobytes()) for row in multihost_utils.process_allgather(padded))
        return [by_group[group] for group in range(self.rows.groups)]
