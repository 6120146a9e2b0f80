"""A training run from its configuration to exported gates."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax.checkpoint import Checkpoints, abstract
from kvjax.data import Rows, open_data, step_lengths, to_mesh
from kvjax.errors import UserError
from kvjax.launch import start
from kvjax.metrics import Metrics
from kvjax.models import Decoder, load_model, load_tokenizer, read_config
from kvjax.models.folder import find_model, speaks_builtin
from kvjax.policies.admission.wgkv import WriteGate
from kvjax.train.config import SAVED, TrainConfig, prepare_folder
from kvjax.train.exported import admission_rates, export_gates
from kvjax.train.step import TrainState, initial_state, make_update

SHOWN = {"loss": ".4f", "distillation": ".4f", "sparsity": ".3f", "kv_size": ".3f"}


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run leaves: the frozen model, its gates, and where they are."""

    model: Decoder
    gates: WriteGate
    mesh: Mesh
    folder: Path


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
    if config.data == "builtin" and not speaks_builtin(folder):
        raise UserError(
            f"--data builtin is made of the built-in model's tokens, which {config.model} does not have: name a file, "
            "a folder or a hub data set"
        )


def train(config: TrainConfig) -> Trained:
    """Train gates as `config` (from `parse`) says: checkpoints and metrics on the way, the gates exported at the end.

    Raises:
        UserError: whatever is wrong with the model, the data, the folder or the devices, before anything compiles.
    """
    check(config)
    mesh = start(config.mesh)
    folder = prepare_folder(config, write=jax.process_index() == 0)
    with jax.set_mesh(mesh):
        model = load_model(config.model, dtype=config.dtype, max_length=max(config.lengths))
        rows = Rows.of_this_process(mesh, config.rows)
        sequences = open_data(
            config.data,
            rows=rows,
            schedule=step_lengths(config.steps, config.lengths, config.shares, config.seed),
            seed=config.seed,
            tokenizer=None if config.data == "builtin" else load_tokenizer(config.model),
            instruction=config.instruction,
        )
        beginning = sequences.get_state()
        with Checkpoints(folder / "checkpoints", config.keep) as checkpoints:
            run = Run(config, folder, mesh, model, rows, sequences, checkpoints)
            state = run.steps(*run.begin())
        sequences.set_state(beginning)
        tokens = to_mesh(mesh, rows, next(sequences))
        rates = np.asarray(admission_rates(model, state.gates, tokens, jnp.float32(config.tau)))
        export_gates(folder / "gates", state.gates, config, rates)
        return Trained(model, state.gates, mesh, folder)


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

    def steps(self, state: TrainState, first: int) -> TrainState:
        """The steps from `first` on; the state after them."""
        config, update = self.config, make_update(self.config)
        told = (self.folder / SAVED).read_text(encoding="utf-8")
        with Metrics(
            self.folder,
            total=config.steps,
            first=first,
            shown=SHOWN,
            tensorboard=config.tensorboard,
            quiet=jax.process_index() > 0,
        ) as metrics:
            left = (
                f"steps {first + 1} to {config.steps}"
                if first < config.steps
                else f"all {first} steps are done"
            )
            metrics.say(f"{left}, {self.rows.total} sequences each; the run is kept in {self.folder}")
            for step in range(first, config.steps):
                tokens = to_mesh(self.mesh, self.rows, next(self.sequences))
                state, numbers = update(state, self.model, tokens)
                metrics.step(step, numbers, tokens=tokens.size)
                if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
                    notes = {"data": self.positions(), "config": told}
                    self.checkpoints.save(step + 1, state, notes)
        return state

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
