"""A training run, from its options to its export."""

import contextlib
import dataclasses
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Int

from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.checkpoints.folder import write_made_for
from kvjax.checkpoints.orbax import export
from kvjax.cli.launch import start
from kvjax.cli.lock import FolderLock
from kvjax.errors import UserError
from kvjax.models import Decoder, load_model, load_tokenizer, read_config, save_model
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import unfused_values
from kvjax.models.folder import find_model, has_builtin_vocabulary
from kvjax.models.shapes import fit_mesh, fit_mesh_to, warn_if_too_long
from kvjax.policies import Policy
from kvjax.train import memory
from kvjax.train.batches import Rows
from kvjax.train.checkpoints import Checkpoints, saved_steps
from kvjax.train.config import prepare_folder, release_folder
from kvjax.train.data import DataRequest, Open, draw_step_lengths
from kvjax.train.loop import Run, check_resumed
from kvjax.train.metrics import NotFiniteError, check_numbers, check_tensorboard
from kvjax.train.recipe import Recipe, Validation
from kvjax.train.reporting import check_report
from kvjax.train.update import (
    TrainState,
    make_update,
    param_dtypes,
    round_parameters,
)
from kvjax.train.validation import make_validate


@dataclasses.dataclass(frozen=True)
class RunOutput:
    """The results of a run."""

    model: Decoder
    """The trained model, or the loaded one if the run did not train it."""
    params: Any
    """The method's own parameters."""
    mesh: Mesh
    """The mesh of the run."""
    folder: Path
    """The folder of the run."""
    validation: Validation
    """The last validation."""
    held_out: Sequence[Int[np.ndarray, " _"]] = ()
    """The held-out sequences, which were never trained on."""


def check(recipe: Recipe) -> None:
    """Raise UserError for every problem that can be found before a device is used."""
    folder = find_model(recipe.model)
    model = read_config(folder, weights=recipe.weights)
    if recipe.data == "builtin" and not has_builtin_vocabulary(folder):
        raise UserError(
            f"--data builtin is made of the built-in model's tokens, which {recipe.model} does not have: name a file, "
            "a folder or a hub dataset"
        )
    if recipe.tasks:
        if has_builtin_vocabulary(folder):
            raise UserError(
                "--tasks are for the report of another model than the built-in one, which has its own: leave them out"
            )
        from kvjax.train.held_out_report import task_samples

        task_samples(recipe, 1)
    if recipe.tensorboard:
        check_tensorboard()
    check_shape(recipe, model)


def check_shape(recipe: Recipe, model: ModelConfig) -> None:
    """Raise UserError if the options do not fit a model of this shape."""
    fit_mesh(recipe.mesh, model)
    if model.weights is not None and recipe.trains_model:
        raise UserError(
            f"{recipe.method} trains the model itself, which weights of 8 bits ({model.weights}) do not allow"
        )
    recipe.check_model(model)
    longest = recipe.most_tokens
    subject = f"--lengths {longest}: more tokens"
    warn_if_too_long(
        model, longest, subject if recipe.unit == "sequences" else f"contexts of {longest:,} tokens: more"
    )


def train(recipe: Recipe) -> RunOutput:
    """Train according to `recipe` (from `parse`). Checkpoints and metrics are written on the way. The parameters are
    exported at the end.

    Raises:
        UserError: before the first update, for anything wrong with the model, the data, the folder or the devices;
            later, for numbers that are not finite or a disk that is full.
    """
    check(recipe)
    mesh = start(fit_mesh_to(recipe.mesh, recipe.model))
    is_first = jax.process_index() == 0
    assert recipe.out is not None, "parse chose it"
    no_report = check_report(recipe)
    with jax.set_mesh(mesh), FolderLock(recipe.out, "--out", wanted=is_first) as lock:
        model, rows, open_data, tokens = _load(recipe, mesh)
        if recipe.resume:
            check_resumed(recipe, recipe.out, rows.groups)
        dtypes = param_dtypes(recipe, model)
        update = make_update(recipe, dtypes)
        extra_bytes = memory.check(recipe, update, mesh, model)
        # take the folder only after everything that the user may have to fix was checked
        folder = prepare_folder(recipe, write=is_first)
        lock.take()
        with _explain_ending(recipe, folder), Checkpoints(folder / "checkpoints", recipe.keep) as checkpoints:
            data = open_data(model, rows, folder, _say)
            position = data.sequences.get_state()
            recipe.prepare(model, data.sequences, data.held_out, mesh, tokens, _say)
            data.sequences.set_state(position)
            run = Run(recipe, folder, mesh, rows, data, checkpoints, dtypes)
            state, first = run.begin(model)
            if recipe.report != "none":
                no_report = no_report or check_report(recipe, _policy(recipe, state, model))
            if no_report:
                _say(no_report)
            loaded = None if recipe.takes_model else model
            del model  # otherwise a recipe that took over the model would have two copies
            state, validation = run.steps(
                update, state, first, loaded, tokens=tokens, extra_bytes=extra_bytes
            )
            output = _export(run, folder / recipe.exports, state, loaded, validation)
            if is_first:
                recipe.draw(folder, validation)
            return output


def compute_share(recipe: Recipe) -> None:
    """Compute this machine's share of what a run needs before its first update, into the folder `recipe.kept`.

    Raises:
        UserError: as `train` before its first update.
    """
    check(recipe)
    mesh = start(fit_mesh_to(recipe.mesh, recipe.model), alone=True)
    with jax.set_mesh(mesh):
        model, rows, open_data, tokens = _load(recipe, mesh)
        data = open_data(model, rows, recipe.out or Path(), _say)
        recipe.prepare(model, data.sequences, data.held_out, mesh, tokens, _say)


def _say(text: str) -> None:
    """Print a line in the first process."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def _policy(recipe: Recipe, state: TrainState, loaded: Decoder) -> Policy:
    """Return the policy that deploys a state."""
    params, trained = recipe.split(state.params)
    return recipe.deploy(params, loaded if trained is None else trained)


def export_checkpoint(
    recipe: Recipe, step: int | None, destination: Path | None
) -> tuple[RunOutput, int, Path]:
    """Export the parameters of a run's checkpoint, as the run does at its end. The run may still be in progress.

    Args:
        recipe: the recipe of the run, from `parse` with --resume.
        step: the step of the checkpoint; None: the last one.
        destination: a new folder; None: the run's own.

    Returns:
        the exported model and parameters, the step and the folder.

    Raises:
        UserError: there is no such checkpoint, `destination` exists, or `train` would raise one for the same options.
    """
    check(recipe)
    assert recipe.out is not None, "parse chose it"
    folder, saved = recipe.out / "checkpoints", saved_steps(recipe.out / "checkpoints")
    if not saved or step not in (None, *saved):
        problem = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise UserError(
            f"{folder} has {problem}; it has those of steps {saved}" if saved else f"{folder} has {problem}"
        )
    step, own_exports = saved[-1] if step is None else step, recipe.out / recipe.exports
    if destination is not None and destination.resolve() != own_exports.resolve() and destination.exists():
        raise UserError(f"--out {destination} exists: name a new folder")
    mesh = start(fit_mesh_to(recipe.mesh, recipe.model))
    with jax.set_mesh(mesh):
        model, rows, open_data, _ = _load(recipe, mesh)
        data = open_data(model, rows, recipe.out, _say)
        recipe.prepare(model, iter(()), data.held_out, mesh, 0, _say)
        with Checkpoints(folder, None) as checkpoints:
            run = Run(recipe, recipe.out, mesh, rows, data, checkpoints, param_dtypes(recipe, model))
            state = run.restore(model, step)
        loaded = None if recipe.takes_model else model
        del model
        validate = make_validate(recipe, mesh, data.held_out, run.dtypes, data.held_rows)
        validation = validate(state, loaded)
        check_numbers(step, validation.numbers, "held-out ")
        destination = destination or own_exports
        return _export(run, destination, state, loaded, validation), step, destination


def _load(recipe: Recipe, mesh: Mesh) -> tuple[Decoder, Rows, Open, int]:
    """Return the model, this process's rows, a function that opens the data, and the number of tokens of the whole run
    (the number of rows if these are not sequences)."""
    rows = Rows.of_this_process(mesh, recipe.rows)
    longest = recipe.most_tokens
    if (open_own := recipe.collect()) is not None:
        model = load_model(recipe.model, dtype=recipe.dtype, weights=recipe.weights, max_length=longest)
        return model, rows, open_own, rows.total * recipe.steps
    lengths = draw_step_lengths(recipe.steps, recipe.lengths, recipe.shares, recipe.seed)
    request = DataRequest(
        recipe.data,
        rows=rows,
        step_lengths=lengths,
        lengths=recipe.lengths,
        validation=draw_step_lengths(recipe.validation, recipe.lengths, recipe.shares, recipe.seed),
        seed=recipe.seed,
        tokenizer=None if recipe.data == "builtin" else load_tokenizer(recipe.model),
        instruction=recipe.instruction,
    )
    data = recipe.open_data(request)
    model = load_model(recipe.model, dtype=recipe.dtype, weights=recipe.weights, max_length=longest)
    return model, rows, lambda *_: data, rows.total * int(lengths.sum())


@contextlib.contextmanager
def _explain_ending(recipe: Recipe, folder: Path) -> Iterator[None]:
    """A context that adds to the errors of a run how to go on. A run that fails before its first checkpoint releases
    its folder. A run that is stopped keeps it."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise type(stop)(stopped_message(recipe.method, folder)) from None
    except Exception as error:
        if jax.process_index() == 0 and not saved_steps(folder / "checkpoints"):
            release_folder(folder)
        if isinstance(error, NotFiniteError):
            raise UserError(not_finite_message(recipe, folder, error)) from None
        raise


def stopped_message(method: str, folder: Path) -> str:
    """Return a line that says how to go on with a run that was stopped by a person or a batch system."""
    steps = saved_steps(folder / "checkpoints")
    if steps:
        return (
            f"the last checkpoint is of step {steps[-1]}: {resume_command(method, folder)} goes on from there"
        )
    return f"there is no checkpoint yet: {resume_command(method, folder)} begins again with the same options"


def resume_command(method: str, folder: Path) -> str:
    """Return the command that resumes a run, or makes the report of a finished one."""
    command = ["python", "-m", "kvjax.train", "--resume", "--out", str(folder)]
    return shlex.join([*command, *_method_option(method)])


def _method_option(method: str) -> list[str]:
    """Return the option --method if the method is a module, which is imported only if the command line names it."""
    return ["--method", method] if ":" in method else []


def _export(
    run: Run,
    destination: Path,
    state: TrainState,
    loaded: Decoder | None,
    validation: Validation,
) -> RunOutput:
    """Export the parameters of a state into a folder, which is written atomically and replaces an older one."""
    recipe, params = run.recipe, round_parameters(state.params, run.dtypes)
    own_params, trained = recipe.split(params)
    model = loaded if trained is None else trained
    assert model is not None, f"{type(recipe).__name__} takes the model, so its split gives it back"
    destination.parent.mkdir(parents=True, exist_ok=True)
    new, old = (destination.with_name(f".{destination.name}.{word}") for word in ("new", "old"))
    is_first = jax.process_index() == 0
    with contextlib.ExitStack() as partial:
        if is_first:
            # a failed export leaves nothing behind
            partial.callback(shutil.rmtree, new, ignore_errors=True)
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
        multihost_utils.sync_global_devices("the folder is there")
        recipe.export(new, own_params, model, validation)
        made_for = MadeFor.of(model, recipe.model if trained is None else str(destination / "model"))
        if is_first:
            write_made_for(new, made_for)
        export(new / "orbax", unfused_values(params))
        if trained is not None:
            save_model(trained, new / "model", tokenizer_from=recipe.model)
        multihost_utils.sync_global_devices("everything is written")
        if is_first:
            shutil.rmtree(old, ignore_errors=True)
            if destination.exists():
                destination.rename(old)
            new.rename(destination)
            shutil.rmtree(old, ignore_errors=True)
        multihost_utils.sync_global_devices("the folder has its name")
    return RunOutput(model, own_params, run.mesh, run.folder, validation, run.data.held_out_tokens)


def not_finite_message(recipe: Recipe, folder: Path, error: NotFiniteError) -> str:
    """Return a line for a run that stopped since a number is not finite: which number, what is kept, how to go on."""
    rate, saved = recipe.own_options().get("lr"), saved_steps(folder / "checkpoints")
    advice = "there is no checkpoint before it"
    if saved:
        command = shlex.join(["python", "-m", "kvjax.export", str(folder), *_method_option(recipe.method)])
        advice = f"the last good checkpoint is of step {saved[-1]}, in {folder / 'checkpoints'}: {command} exports it"
    than = "" if rate is None else f" than {rate:g}"
    return (
        f"step {error.step} of {recipe.steps}: {error.what}: the run is stopped and exports nothing; {advice}. If "
        f"weights and data are right, start another run with a smaller --lr{than}"
    )
