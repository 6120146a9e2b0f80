"""Frozen dataclasses that are JAX pytrees."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(default: Any = dataclasses.MISSING) -> Any:
    """A field that belongs to the tree's structure: it must be hashable, and changing it recompiles."""
    return dataclasses.field(default=default, metadata={"static": True})


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def struct(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass and a pytree whose children are its fields, except those declared `static`.

    Unflattening skips `__init__`: JAX may put shardings, shapes or `None` where arrays are declared.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
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
