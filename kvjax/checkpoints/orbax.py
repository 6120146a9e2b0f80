"""A pytree of arrays as one Orbax checkpoint, written whole and restored onto any mesh."""

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
    """Write a pytree as one Orbax checkpoint, a mapping from its arrays' names; replaces what was there.

    Raises:
        UserError: the disk has not enough room for it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    check_room(folder.parent, tree)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), leaves_by_path(tree), force=True)


def restore_export(folder: Path, like: Any) -> Any:
    """Return the pytree that `export` wrote.

    Args:
        like: a tree of `jax.ShapeDtypeStruct` with the dtypes and shardings wanted (`abstract`).

    Raises:
        UserError: no such export, or one that holds other arrays than `like`.
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
    except Exception as error:  # Orbax raises whatever damaged files make it trip over
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{folder}: not a whole Orbax export ({why})") from None
    return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in names])


def abstract(make: Any, mesh: Mesh, *args: Any) -> Any:
    """Return the shapes and shardings on `mesh` of what `make(*args)` returns, without making it."""

    def concrete(leaf):
        spec = P() if leaf.sharding is None else leaf.sharding.spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        return jax.tree.map(concrete, jax.eval_shape(make, *args))


def check_room(folder: Path, tree: Any) -> None:
    """Raise UserError if the disk that `folder` is on has no room for the arrays of `tree`. When that is found out
    while writing, Orbax's threads fail one after another."""
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder}: the disk is full: {needed / 2**20:.1f} MiB to write, {free / 2**20:.1f} MiB left"
        )


def wrong_shape(saved: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """Return a line with the first array whose saved shape is not the wanted one, and both shapes; None if there is
    none."""
    found, needed = ({name: tuple(leaf.shape) for name, leaf in tree.items()} for tree in (saved, wanted))
    for name in sorted(found | needed):
        if found.get(name) != needed.get(name):
            return f"{name} has shape {found.get(name)}, this run needs {needed.get(name)}"
    return None
