"""Checkpoints of a run (Orbax): written beside the computation, whole or not at all, restored onto any mesh."""

import contextlib
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding

from kvjax.errors import UserError
from kvjax.mesh import P

STATE, NOTES = "state", "notes"


class Checkpoints:
    """The last `keep` checkpoints of a run, in numbered folders. A context, which ends when all is on disk.

    A checkpoint counts once it is complete, so that a crash in the middle of a save leaves the one before it as the
    latest.
    """

    def __init__(self, folder: Path, keep: int):
        # what fails in its threads Orbax raises here again, after logging it in every one of them
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=True, cleanup_tmp_directories=True, create=True
        )
        self._folder = folder
        handlers = {STATE: ocp.StandardCheckpointHandler(), NOTES: ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handlers)

    def save(self, step: int, state: Any, notes: dict[str, Any]) -> None:
        """Start to save a pytree of arrays and a JSON value. Returns once the arrays have left the device; an error of
        the save before is raised here.

        Raises:
            UserError: the disk has not enough room for it.
        """
        check_room(self._folder, state)
        items = {STATE: ocp.args.StandardSave(_named(state)), NOTES: ocp.args.JsonSave(notes)}
        self._manager.save(step, args=ocp.args.Composite(**items))

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, if there is one."""
        return self._manager.latest_step()

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The pytree and the notes saved at `step`.

        Args:
            like: a tree of `jax.ShapeDtypeStruct` with the shardings wanted (`abstract`); the mesh may be another
                than the one that saved.

        Raises:
            UserError: the checkpoint holds other arrays than `like`.
        """
        names = _named(like)
        wrong = _wrong_shape(self._manager.item_metadata(step)[STATE].tree, names)
        if wrong:
            raise UserError(f"{self._folder}: the checkpoint of step {step} is another run's: {wrong}")
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                **{STATE: ocp.args.StandardRestore(names), NOTES: ocp.args.JsonRestore()}
            ),
        )
        leaves = [restored[STATE][name] for name in names]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), restored[NOTES]

    def close(self) -> None:
        """Wait until what was saved is on disk."""
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        """Let the save under way end, also when the run has failed; then the run's own error matters more than its."""
        with contextlib.suppress(Exception) if any(error) else contextlib.nullcontext():
            self.close()


def abstract(make: Any, mesh: Mesh) -> Any:
    """The shapes and shardings on `mesh` of what `make()` returns, without making it."""

    def concrete(leaf):
        spec = P() if leaf.sharding is None else leaf.sharding.spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        return jax.tree.map(concrete, jax.eval_shape(make))


def check_room(folder: Path, tree: Any) -> None:
    """UserError if the disk that `folder` is on has no room for the arrays of `tree`: found out while writing, it takes
    Orbax's threads down one after another."""
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder}: the disk is full: {needed / 2**20:.1f} MiB to write, {free / 2**20:.1f} MiB left"
        )


def check_finite(what: str, tree: Any) -> None:
    """UserError if an array of `tree` holds a number that is not finite: such a state must not replace a good one."""
    if not all(jax.tree.leaves(jax.device_get(_finite(tree)))):
        raise UserError(
            f"{what}: the parameters are no longer finite: the run is stopped, checkpoints of earlier steps are kept. "
            "A smaller --lr may help"
        )


@jax.jit
def _finite(tree):
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), tree)


def export(folder: Path, tree: Any) -> None:
    """Write a pytree as one Orbax checkpoint, a mapping from its arrays' names; replaces what was there.

    Raises:
        UserError: the disk has not enough room for it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    check_room(folder.parent, tree)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), _named(tree), force=True)


def restore_export(folder: Path, like: Any) -> Any:
    """The pytree that `export` wrote.

    Args:
        like: a tree of `jax.ShapeDtypeStruct` with the dtypes and shardings wanted (`abstract`).

    Raises:
        UserError: no such export, or one that holds other arrays than `like`.
    """
    names = _named(like)
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.metadata(folder.absolute()).item_metadata
        if saved is None:
            raise UserError(f"{folder}: not a whole Orbax export, it has no metadata")
        wrong = _wrong_shape(saved.tree, names)
        if wrong:
            raise UserError(f"{folder}: the export is another model's: {wrong}")
        try:
            restored = checkpointer.restore(folder.absolute(), names)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: not a whole Orbax export ({str(error).splitlines()[0]})") from None
    return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in names])


def _wrong_shape(saved: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """The first array whose saved shape is not the wanted one, and both, if there is one."""
    found, needed = ({name: tuple(leaf.shape) for name, leaf in tree.items()} for tree in (saved, wanted))
    for name in sorted(found | needed):
        if found.get(name) != needed.get(name):
            return f"{name} has shape {found.get(name)}, this run needs {needed.get(name)}"
    return None


def _named(tree: Any) -> dict[str, Any]:
    """A tree's leaves by their path in it: what is on disk does not depend on the classes that hold it."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
