"""Frozen dataclasses that are JAX pytrees."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax
import numpy as np
from jax.core import Tracer

from kvjax.errors import named_fields, shown

T = TypeVar("T")


def static(default: Any = dataclasses.MISSING) -> Any:
    """Return a field that is part of the tree's structure. It must be hashable, and a new value causes
    recompilation."""
    return dataclasses.field(default=default, metadata={"static": True})


def host(default: Any = dataclasses.MISSING, *, repr: bool = True) -> Any:
    """Return a static field that only the host reads. Compiled programs get None instead (`without_host_fields`), so
    that one program serves all values."""
    return dataclasses.field(default=default, repr=repr, metadata={"static": True, "host": True})


def remembered() -> Any:
    """Return a `host` field that is not an argument of the class, for information about the file of an object.
    `dataclasses.replace` resets it to None."""
    return dataclasses.field(default=None, init=False, repr=False, metadata={"static": True, "host": True})


@dataclass_transform(frozen_default=True, field_specifiers=(static, host, dataclasses.field))
def struct(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass and a pytree whose children are its fields, except those declared `static`.

    Unflattening skips `__init__`, since JAX may put shardings, shapes or `None` in place of arrays. The `repr` is
    `short`. A misspelt argument raises UserError (`named_fields`).
    """
    has_repr = "__repr__" in cls.__dict__
    cls = named_fields(dataclasses.dataclass(frozen=True, repr=False)(cls))
    if not has_repr:
        cls.__repr__ = short  # pyright: ignore[reportAttributeAccessIssue]
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    data = tuple(f.name for f in fields if not f.metadata.get("static"))
    meta = tuple(f.name for f in fields if f.metadata.get("static"))

    def flatten(x):
        children = [(jax.tree_util.GetAttrKey(name), getattr(x, name)) for name in data]
        return children, tuple(getattr(x, name) for name in meta)

    def unflatten(aux, children):
        x = object.__new__(cls)
        x.__dict__.update(zip(data, children, strict=True), **dict(zip(meta, aux, strict=True)))
        return x

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


def assign(x: Any, **values: Any) -> None:
    """Set fields of a frozen dataclass in its `__post_init__`."""
    for name, value in values.items():
        object.__setattr__(x, name, value)


def changed(x: T, **values: Any) -> T:
    """Return a copy with other values. Like JAX's unflattening it skips `__init__` and its checks."""
    fields: Any = dataclasses.fields(x)  # pyright: ignore[reportArgumentType]
    new = object.__new__(type(x))
    new.__dict__.update({f.name: getattr(x, f.name) for f in fields} | values)
    return new


def without_host_fields(x: T) -> T:
    """Return a copy with None in the fields that only the host reads."""
    fields: Any = dataclasses.fields(x)  # pyright: ignore[reportArgumentType]
    return changed(x, **{f.name: None for f in fields if f.metadata.get("host")})


def short(x: Any) -> str:
    """Return a dataclass in one line, as in source code. Fields at their default are left out. The first field is shown
    without its name if it has no default or is a dataclass. Arrays are shown by dtype and shape, unless all their
    numbers are equal."""
    parts = []
    for index, f in enumerate(dataclasses.fields(x)):
        value = getattr(x, f.name)
        if not f.repr or _is_default(value, f.default):
            continue
        positional = index == 0 and (f.default is dataclasses.MISSING or dataclasses.is_dataclass(value))
        parts.append(_shown(value) if positional else f"{f.name}={_shown(value)}")
    return f"{type(x).__name__}({', '.join(parts)})"


MAX_COMPARED = 4096
"""The maximum size of an array whose numbers are compared."""


def _number(value: Any) -> Any:
    """Return the number that all elements of an array equal; None if there is none."""
    if isinstance(value, jax.Array):
        if isinstance(value, Tracer) or value.is_deleted() or not value.is_fully_addressable:
            return None
    elif not isinstance(value, np.ndarray | np.generic):
        return None
    if not 0 < value.size <= MAX_COMPARED or getattr(value.dtype, "kind", "O") not in "bif":
        return None
    flat = np.asarray(value).reshape(-1)
    return flat[0] if (flat == flat[0]).all() else None


def _is_default(value: Any, default: Any) -> bool:
    if (number := _number(value)) is not None and isinstance(default, int | float):
        return bool(number == np.asarray(default, number.dtype))
    return type(value) is type(default) and not hasattr(value, "shape") and value == default


def _shown(value: Any) -> str:
    if (number := _number(value)) is not None:
        return f"{number:g}" if number.dtype.kind == "f" else str(number)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value) if dataclasses.is_dataclass(value) else shown(value)


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Return a tree's leaves by path, so that files do not depend on the classes in the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
