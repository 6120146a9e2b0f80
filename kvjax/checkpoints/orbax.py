"""Pytrees of arrays as Orbax checkpoints, restored onto any mesh."""

import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding

from kvjax.errors import UserError
from kvjax.mesh import P
from kvjax.struct import leaves_by_path


def export(folder: Path, tree: Any) -> None:
    """Write a pytree as one Orbax checkpoint of a mapping of arrays by name. An existing checkpoint is replaced.

    Raises:
        UserError: the disk has too little free space.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    check_room(folder.parent, tree)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), leaves_by_path(tree), force=True)


def restore_export(folder: Path, like: Any) -> Any:
    """Return the pytree that `export` wrote.

    Args:
        like: a tree of `jax.ShapeDtypeStruct` with the expected shapes, dtypes and shardings (`abstract`).

    Raises:
        UserError: there is no such export, or its arrays do not match `like`.
    """
    names = leaves_by_path(like)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            saved = checkpointer.metadata(folder.absolute()).item_metadata
            if saved is None:
                raise UserError(f"{folder}: not a whole Orbax export, it has no metadata")
            wrong = wrong_shape(saved.tree, names)
            if wrong:
                raise UserError(f"{folder}: the export is another model's: {wrong}")
            restored = checkpointer.restore(folder.absolute(), names)
    except UserError:
        raise
    except Exception as error:  # damaged files make Orbax raise exceptions of any kind
        raise UserError(f"{folder}: not a whole Orbax export ({error})") from None
    return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in names])


def abstract(make: Any, mesh: Mesh, *args: Any) -> Any:
    """Return the shapes and shardings on `mesh` of the value of `make(*args)`, without computing it."""

    def concrete(leaf):
        spec = P() if leaf.sharding is None else leaf.sharding.spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        return jax.tree.map(concrete, jax.eval_shape(make, *args))


def check_room(folder: Path, tree: Any) -> None:
    """Raise UserError if the disk of `folder` has too little free space for the arrays of `tree`. Otherwise Orbax's
    threads would fail one after another while writing."""
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder}: the disk is full: {needed / 2**20:.1f} MiB to write, {free / 2**20:.1f} MiB left"
        )


def wrong_shape(saved: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """Return a line about the first array whose saved shape is not the wanted one; None if all shapes match."""
    found, expected = ({name: tuple(leaf.shape) for name, leaf in tree.items()} for tree in (saved, wanted))
    for name in sorted(found | expected):
        if found.get(name) != expected.get(name):
            return f"{name} has shape {found.get(name)}, this run needs {expected.get(name)}"
    return None
