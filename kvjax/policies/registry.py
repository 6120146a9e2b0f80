"""The methods by name. A new method needs a line here. Methods of other packages are found by an entry point's name or
by `package.module:NAME`."""

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from kvjax.errors import UserError, nearest, shown
from kvjax.plugins import METHODS, find
from kvjax.plugins import POLICIES as PLUGINS
from kvjax.policies.admission.full import Full
from kvjax.policies.admission.head_pattern import HeadPattern
from kvjax.policies.admission.kvpop import KVPOP
from kvjax.policies.admission.kvzap import KVzap
from kvjax.policies.admission.random import Random
from kvjax.policies.admission.streaming_llm import StreamingLLM
from kvjax.policies.admission.wgkv import WGKV
from kvjax.policies.base import Admission, Eviction, Method, Selection
from kvjax.policies.eviction.adaptive import Adaptive, Pyramid
from kvjax.policies.eviction.critical_kv import CriticalKV
from kvjax.policies.eviction.defensive_kv import DefensiveKV
from kvjax.policies.eviction.dropkv import DropKV
from kvjax.policies.eviction.expected_attention import ExpectedAttention
from kvjax.policies.eviction.fast_kvzip import FastKVzip
from kvjax.policies.eviction.h2o import H2O
from kvjax.policies.eviction.keydiff import KeyDiff
from kvjax.policies.eviction.knorm import KNorm
from kvjax.policies.eviction.kvzap import KVzapEviction
from kvjax.policies.eviction.kvzip import KVzip
from kvjax.policies.eviction.oraclekv import OracleKV
from kvjax.policies.eviction.protected import Protected
from kvjax.policies.eviction.r_kv import RKV
from kvjax.policies.eviction.random import RandomEviction
from kvjax.policies.eviction.refit import Refit
from kvjax.policies.eviction.snapkv import SnapKV
from kvjax.policies.eviction.tova import TOVA
from kvjax.policies.eviction.triattention import TriAttention
from kvjax.policies.eviction.trimkv import TrimKV
from kvjax.policies.eviction.wrapper import Wrapper
from kvjax.policies.selection.quest import Quest

ADMISSIONS: dict[str, type[Admission]] = {
    "full": Full,
    "streaming_llm": StreamingLLM,
    "wgkv": WGKV,
    "head_pattern": HeadPattern,
    "kvpop": KVPOP,
    "kvzap": KVzap,
    "random": Random,
}
EVICTIONS: dict[str, type[Eviction]] = {
    "snapkv": SnapKV,
    "oraclekv": OracleKV,
    "defensive_kv": DefensiveKV,
    "dropkv": DropKV,
    "tova": TOVA,
    "keydiff": KeyDiff,
    "knorm": KNorm,
    "expected_attention": ExpectedAttention,
    "h2o": H2O,
    "fast_kvzip": FastKVzip,
    "r_kv": RKV,
    "kvzip": KVzip,
    "kvzap_eviction": KVzapEviction,
    "triattention": TriAttention,
    "trimkv": TrimKV,
    "random_eviction": RandomEviction,
}
WRAPPERS: dict[str, type[Wrapper]] = {
    "adakv": Adaptive,
    "pyramidkv": Pyramid,
    "critical_kv": CriticalKV,
    "protected": Protected,
    "refit": Refit,
}
"""Wrappers, each named among the arguments of the eviction that it changes."""
SELECTIONS: dict[str, type[Selection]] = {
    "quest": Quest,
}
POLICIES = (*ADMISSIONS, *EVICTIONS, *SELECTIONS)
"""The methods that a policy may consist of."""


def method_list() -> str:
    """Return a list of the methods, each with a line about it and a line of its arguments and their defaults."""
    classes: dict[str, type] = {**ADMISSIONS, **EVICTIONS, **WRAPPERS, **SELECTIONS}
    modules = [_module(kind) for kind in classes.values()]
    lines = []
    for (name, kind), module in zip(classes.items(), modules, strict=True):
        first = _first_line((kind if modules.count(module) > 1 else module).__doc__)
        lines += [
            f"{name}: {first}",
            f"    {', '.join(map(_with_default, arguments_of(kind))) or 'no arguments of its own'}",
        ]
    return "\n".join(lines)


def _module(kind: type) -> Any:
    """Return the method's module, or its package if it has its own package."""
    return sys.modules[kind.__module__.removesuffix(".policy")]


def _first_line(doc: str | None) -> str:
    """Return the first sentence, in one line."""
    paragraph = " ".join(inspect.cleandoc(doc or "").split("\n\n")[0].split())
    return re.split(r"(?<=[^ .]{2}[.)])\s+(?=[A-Z])", paragraph)[0]


def _with_default(parameter: inspect.Parameter) -> str:
    default = parameter.default
    plain = default is None or isinstance(default, bool | int | float | str)
    return f"{parameter.name}={default}" if plain else parameter.name


def arguments_of(kind: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that a policy string may set: all but those that `make_policy` sets itself."""
    excluded = ("eviction", "tokenizer") if is_method(kind) else ("model", "tokenizer", "force")
    parameters = inspect.signature(kind).parameters.values()
    return [x for x in parameters if x.name not in excluded and x.kind is not x.VAR_KEYWORD]


def find_method(name: str) -> Callable[..., Any]:
    """Return the class of the method called `name`. Another package may provide a class, or a function that makes a
    policy from keyword arguments, such as the `policy` of a recipe.

    Raises:
        UserError: if there is no such method, if it cannot be imported, or if it is neither.
    """
    classes = {**ADMISSIONS, **EVICTIONS, **WRAPPERS, **SELECTIONS}
    method = classes.get(name) or find_from_package(name)
    if method is None:
        near = nearest(name, classes)
        if near:
            raise UserError(f"unknown method {name!r}; the nearest known: {', '.join(near)}")
        raise UserError(
            f"unknown method {name!r}: expected METHOD:ARGUMENT=VALUE, such as kvzip:ratio=0.3, with one of the "
            f"methods {', '.join(POLICIES)}"
        )
    return method


def find_from_package(name: str) -> Callable[..., Any] | None:
    """Return the class or function that another package provides under this name; None if no package does.

    Raises:
        UserError: if it cannot be imported, or neither is a method nor makes a policy.
    """
    provided = find(name, PLUGINS, "policy")
    provided = find(name, METHODS, "policy") if provided is None else provided
    if provided is None:
        return None
    kind = getattr(provided, "policy", provided)
    if is_method(kind):
        _check_class(name, kind)
    elif isinstance(kind, type) or not callable(kind):
        raise UserError(
            f"policy {name}: expected a method's class, a function that makes a policy, or a recipe, got {shown(kind)}"
        )
    return kind


def _check_class(name: str, kind: type[Method]) -> None:
    """Raise UserError if a method's class is incomplete."""
    if not issubclass(kind, Admission | Eviction | Selection):
        raise UserError(f"policy {name}: {kind.__name__} must be an Admission, an Eviction or a Selection")
    if lacking := sorted(getattr(kind, "__abstractmethods__", ())):
        raise UserError(f"policy {name}: {kind.__name__} does not define {', '.join(lacking)}")
    if "__dataclass_fields__" not in vars(kind):
        raise UserError(f"policy {name}: {kind.__name__} needs @struct (kvjax.struct) above its class")


def role(kind: Any) -> str:
    """Return the role of a method's class or object: "admission", "eviction" or "selection". A function that makes a
    whole policy counts as an admission."""
    kind = kind if isinstance(kind, type) else type(kind)
    roles = {"eviction": Eviction, "selection": Selection}
    return next((name for name, base in roles.items() if issubclass(kind, base)), "admission")


def is_method(kind: Any) -> bool:
    """Return True for a method's class."""
    return isinstance(kind, type) and issubclass(kind, Method)


def is_wrapper(kind: Any) -> bool:
    """Return True for the class of a wrapper of evictions."""
    return isinstance(kind, type) and issubclass(kind, Wrapper)


def is_open_ended(kind: Callable[..., Any]) -> bool:
    """Return True for a function that takes any keyword arguments."""
    return any(x.kind is x.VAR_KEYWORD for x in inspect.signature(kind).parameters.values())


def trained(kind: Any) -> str:
    """Return the name of the argument that takes what training produced, by default "gates"."""
    return getattr(kind, "trained", "gates")
