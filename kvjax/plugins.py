"""Methods of other packages, named by an entry point or as `package.module:NAME`."""

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

from kvjax.errors import UserError

METHODS = "kvjax.methods"
"""The group of entry points of training recipes (`kvjax.train.recipe.Recipe`)."""
POLICIES = "kvjax.policies"
"""The group of entry points of methods' classes, and of functions that return a policy for keyword arguments."""

_command_line: Sequence[str] | None = None
"""The arguments of the running command; None if kvjax is used as a library."""


@contextlib.contextmanager
def only_named(arguments: Sequence[str]) -> Iterator[None]:
    """Return a context in which `package.module:NAME` is imported only if an argument names it, since files that name
    one are not trusted."""
    global _command_line
    before, _command_line = _command_line, arguments
    try:
        yield
    finally:
        _command_line = before


def names(group: str) -> list[str]:
    """Return the names of a group's entry points in installed packages."""
    return sorted({point.name for point in _points(group)})


def find(name: str, group: str, what: str) -> Any:
    """Return the object of an entry point of `group`, or of `package.module:NAME`; None if `name` is neither.

    Modules are also searched in the current folder, as by `python -m`. `what` begins the error messages.

    Raises:
        UserError: it cannot be imported, the module has no such name, or only a file names it (`only_named`).
    """
    for point in _points(group):
        if point.name == name:
            return load(point.value, what)
    if ":" not in name:
        return None
    pattern = rf"(?<![\w.]){re.escape(name)}(?!\w)"
    if _command_line is not None and not any(re.search(pattern, text) for text in _command_line):
        raise UserError(f"{what} {name}: a module is imported only if the command line itself names it")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return load(name, what)


def _points(group: str) -> list[metadata.EntryPoint]:
    """Return the entry points of a group in installed packages. The current folder, which `python -m` puts on the path,
    is not searched, since it is not trusted."""
    path = [folder for folder in sys.path if os.path.realpath(folder) != os.path.realpath("")]
    points = (point for package in metadata.distributions(path=path) for point in package.entry_points)
    return [point for point in points if point.group == group]


def load(path: str, what: str) -> Any:
    """Return the object at `package.module:NAME`. Raises UserError if it cannot be imported."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise UserError(f"{what} {path}: {module} cannot be imported ({error})") from None
    except AttributeError:
        raise UserError(f"{what} {path}: {module} has no {attribute}") from None
