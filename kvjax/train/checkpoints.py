"""Checkpoints of a run (Orbax): written beside the computation, whole or not at all, restored onto any mesh."""

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
    """The last `keep` checkpoints of a run, in numbered folders. A context, which ends when all is on disk.

    A checkpoint counts once it is complete, so that a crash in the middle of a save leaves the one before it as the
    latest. Some that are only read (`keep` None) may be those of a run that goes on.
    """

    def __init__(self, folder: Path, keep: int | None):
        # what fails in its threads Orbax raises here again, after logging it in every one of them
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
        """Start to save a pytree of arrays and a JSON value. Returns once the arrays have left the device; an error of
        the save before is raised here.

        Raises:
            UserError: the disk has not enough room for it.
        """
        check_room(self._folder, state)
        items = {STATE: ocp.args.StandardSave(leaves_by_path(state)), NOTES: ocp.args.JsonSave(notes)}
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
        names = leaves_by_path(like)
        wrong = wrong_shape(self._manager.item_metadata(step)[STATE].tree, names)
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


def saved_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, rising; none, if there is no such folder."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


@jax.jit
def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether every number of every array is finite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()
