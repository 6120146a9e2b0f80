"""Policies by name: `make_policy("wgkv", gates=…, tau=0.1)`. One file a method; a method is added by a line below."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from kvjax.errors import UserError
from kvjax.mesh import use_mesh
from kvjax.policies.admission.full import full
from kvjax.policies.admission.head_pattern import head_pattern
from kvjax.policies.admission.random import random
from kvjax.policies.admission.streaming_llm import streaming_llm
from kvjax.policies.admission.wgkv import wgkv
from kvjax.policies.policy import Policy

POLICIES: dict[str, Callable[..., Policy]] = {
    "full": full,
    "streaming_llm": streaming_llm,
    "wgkv": wgkv,
    "head_pattern": head_pattern,
    "random": random,
}


def make_policy(name: str, *, model: Any = None, **arguments: Any) -> Policy:
    """The policy called `name`, with that method's own arguments (see its function, e.g. `wgkv`, `streaming_llm`).

    Args:
        name: one of `POLICIES`.
        model: the model it is for. It gives `layers` and `kv_heads` to the methods that need them, so they need not
            be passed, and what was made for another model is refused.
        **arguments: the method's arguments.

    Raises:
        UserError: an unknown name or argument (with the nearest known), or a value that the method refuses.
    """
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES) or list(POLICIES)
        raise UserError(f"unknown policy {name!r}; the nearest known: {', '.join(near)}")
    method = POLICIES[name]
    known = inspect.signature(method).parameters
    if model is not None:
        shape = {"layers": model.config.num_layers, "kv_heads": model.config.num_kv_heads, "model": model}
        arguments = {key: value for key, value in shape.items() if key in known} | arguments
    for argument in arguments:
        if argument not in known:
            raise UserError(f"{name} has no argument {argument!r}; it has {', '.join(known)}")
    missing = [
        key for key, p in known.items() if p.default is inspect.Parameter.empty and key not in arguments
    ]
    if missing:
        hint = " (model=… gives layers and kv_heads)" if {"layers", "kv_heads"} & set(missing) else ""
        raise UserError(f"{name} needs {', '.join(missing)}{hint}")
    with use_mesh(model):
        return method(**arguments)


__all__ = ["POLICIES", "Policy", "make_policy"]
