"""Parameters of a module as arrays by name, and modules made from such arrays."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from kvjax.errors import UserError
from kvjax.mesh import put, use_mesh

M = TypeVar("M", bound=nnx.Module)


def arrays_of(module: nnx.Module) -> dict[str, np.ndarray]:
    """Return the parameters of a module by name. It must not contain other modules."""
    return {str(name): np.asarray(param) for name, param in nnx.to_pure_dict(nnx.state(module)).items()}


def filled(make: Callable[[], M], arrays: Mapping[str, Any], where: str | Path) -> M:
    """Return the module that `make` makes, with these parameters in float32 instead of random ones. They are split over
    the mesh in the same way.

    Raises UserError if a parameter is missing or has another shape. `where` (the file) begins the message.
    """
    with use_mesh():
        module = jax.eval_shape(make)
        state = nnx.state(module)
        for path, param in nnx.to_flat_state(state):
            name, expected = str(path[-1]), param.get_value()
            if name not in arrays or arrays[name].shape != expected.shape:
                found = arrays[name].shape if name in arrays else "nothing"
                raise UserError(f"{where}: {name} should have shape {expected.shape}, found {found}")
            param.set_value(put(arrays[name].astype(np.float32), *expected.sharding.spec))
        nnx.update(module, state)
    return module
