"""Checkpoints of a run (Orbax): saved asynchronously and atomically, and restored onto any mesh."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxtyping import Array, Bool

from kvjax.checkpoints.orbax import check_room, wrong_shape
from kvjax.errors import UserError
from kvjax.struct import leaves_by_path

STATE, NOTES = "state", "notes"


class Checkpoints:
    """The last `keep` checkpoints of a run, in numbered folders. As a context manager it exits when every save is on
    disk.

    An incomplete checkpoint does not count: after a crash during a save, the one before it is the latest. With `keep`
    None checkpoints are only read, and the run that writes them may still be going on.
    """

    def __init__(self, folder: Path, keep: int | None):
        # Orbax logs an error in each of its threads, and then raises it here as well
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        writes = keep is not None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=writes,
            cleanup_tmp_directories=writes,
            create=writes,
            read_only=not writes,
        )
        self._folder = folder
        handlers = {STATE: ocp.StandardCheckpointHandler(), NOTES: ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handlers)

    def save(self, step: int, state: Any, notes: dict[str, Any]) -> None:
        """Start to save a pytree of arrays and a JSON value. Returns once the arrays have left the device. An error of
        the previous save is raised here.

        Raises:
            UserError: the disk has too little space.
        """
        check_room(self._folder, state)
        items = {STATE: ocp.args.StandardSave(leaves_by_path(state)), NOTES: ocp.args.JsonSave(notes)}
        self._manager.save(step, args=ocp.args.Composite(**items))

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint, None if there is none."""
        return self._manager.latest_step()

    def notes(self, step: int) -> dict[str, Any]:
        """Return the notes saved at `step`."""
        return self._manager.restore(step, args=ocp.args.Composite(**{NOTES: ocp.args.JsonRestore()}))[NOTES]

    def restore(self, step: int, like: Any) -> Any:
        """Return the pytree saved at `step`.

        Args:
            like: a tree of `jax.ShapeDtypeStruct` with the new shardings (`abstract`). The mesh may differ from the
                one that saved.

        Raises:
            UserError: the checkpoint holds other arrays than `like`.
        """
        names = leaves_by_path(like)
        problem = wrong_shape(self._manager.item_metadata(step)[STATE].tree, names)
        if problem:
            raise UserError(f"{self._folder}: the checkpoint of step {step} is another run's: {problem}")
        restored = self._manager.restore(
            step, args=ocp.args.Composite(**{STATE: ocp.args.StandardRestore(names)})
        )
        leaves = [restored[STATE][name] for name in names]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def close(self) -> None:
        """Wait until every save is on disk."""
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for the save under way. If the run has failed, its error is raised, and an error of the save is not."""
        with contextlib.suppress(Exception) if any(error) else contextlib.nullcontext():
            self.close()


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, ascending; an empty list if there is no such folder."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


@jax.jit
def all_finite(tree: Any) -> Bool[Array, ""]:
    """Return True if every number of every array is finite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()
