"""Methods of other packages, by an entry point's name or as `package.module:NAME`."""

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
"""The entry points of recipes (`kvjax.train.recipe.Recipe`), which say what is trained and how a policy is made of
it."""
POLICIES = "kvjax.policies"
"""The entry points of methods' classes, and of functions that make a policy of keyword arguments."""


_command_line: Sequence[str] | None = None
"""The arguments of the command that is running; None where kvjax is a library."""


@contextlib.contextmanager
def only_named(arguments: Sequence[str]) -> Iterator[None]:
    """Return a context in which `package.module:NAME` is imported only if an argument names it, since files may be a
    stranger's."""
    global _command_line
    before, _command_line = _command_line, arguments
    try:
        yield
    finally:
        _command_line = before


def names(group: str) -> list[str]:
    """Return the names that installed packages offer for a group."""
    return sorted({point.name for point in _points(group)})


def find(name: str, group: str, what: str) -> Any:
    """Return the object of an entry point of `group`, or of `package.module:NAME`; None if `name` is neither.

    A module is also looked for in the current folder, as `python -m` does it.

    Raises:
        UserError: it cannot be imported, the module has no such name, or only a file names it (`only_named`).
    """
    for point in _points(group):
        if point.name == name:
            return load(point.value, what)
    if ":" not in name:
        return None
    whole = rf"(?<![\w.]){re.escape(name)}(?!\w)"
    if _command_line is not None and not any(re.search(whole, text) for text in _command_line):
        raise UserError(f"{what} {name}: a module is imported only if the command line itself names it")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return load(name, what)


def _points(group: str) -> list[metadata.EntryPoint]:
    """Return the entry points of installed packages. The current folder, which `python -m` puts on the path, is passed
    over: it may be a stranger's."""
    path = [folder for folder in sys.path if os.path.realpath(folder) != os.path.realpath("")]
    found = (point for package in metadata.distributions(path=path) for point in package.entry_points)
    return [point for point in found if point.group == group]


def load(path: str, what: str) -> Any:
    """Return the object at `package.module:NAME`. Raises UserError if it cannot be imported."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise UserError(f"{what} {path}: {module} cannot be imported ({error})") from None
    except AttributeError:
        raise UserError(f"{what} {path}: {module} has no {attribute}") from None
