"""Methods that other packages bring: by an entry point's name, or as `package.module:NAME`."""

import importlib
import os
import sys
from importlib import metadata
from typing import Any

from kvjax.errors import UserError

METHODS = "kvjax.methods"
"""The entry points of recipes (`kvjax.train.recipe.Recipe`): what is trained, and how a policy is made of it."""
POLICIES = "kvjax.policies"
"""The entry points of methods' classes, and of functions that make a policy of keyword arguments."""


def names(group: str) -> list[str]:
    """What installed packages offer."""
    return sorted({point.name for point in metadata.entry_points(group=group)})


def find(name: str, group: str, what: str) -> Any:
    """The object of an entry point of `group`, or `package.module:NAME`; None if `name` is neither.

    A module is also looked for from the current folder, as `python -m` does it.

    Raises:
        UserError: it cannot be imported, or the module has no such name.
    """
    for point in metadata.entry_points(group=group, name=name):
        return _load(point.value, what)
    return _load(name, what) if ":" in name else None


def _load(path: str, what: str) -> Any:
    module, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise UserError(f"{what} {path}: {module} cannot be imported ({error})") from None
    except AttributeError:
        raise UserError(f"{what} {path}: {module} has no {attribute}") from None
