"""Methods by name: a line adds one. What other packages bring is found by an entry point's name, or as
`package.module:NAME`."""

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from kvjax.errors import UserError, nearest, shown
from kvjax.plugins import METHODS, find
from kvjax.plugins import POLICIES as PLUGINS
from kvjax.policies.admission.full import Full
from kvjax.policies.admission.head_pattern import HeadPattern
from kvjax.policies.admission.kvpop import KVPOP
from kvjax.policies.admission.random import Random
from kvjax.policies.admission.streaming_llm import StreamingLLM
from kvjax.policies.admission.wgkv import WGKV
from kvjax.policies.eviction.adaptive import Adaptive, Pyramid
from kvjax.policies.eviction.critical_kv import CriticalKV
from kvjax.policies.eviction.expected_attention import ExpectedAttention
from kvjax.policies.eviction.fast_kvzip import FastKVzip
from kvjax.policies.eviction.h2o import H2O
from kvjax.policies.eviction.keydiff import KeyDiff
from kvjax.policies.eviction.knorm import KNorm
from kvjax.policies.eviction.kvzip import KVzip
from kvjax.policies.eviction.oraclekv import OracleKV
from kvjax.policies.eviction.r_kv import RKV
from kvjax.policies.eviction.random import RandomEviction
from kvjax.policies.eviction.snapkv import SnapKV
from kvjax.policies.eviction.tova import TOVA
from kvjax.policies.eviction.wrapper import Wrapper
from kvjax.policies.interfaces import Admission, Eviction, Method, Selection
from kvjax.policies.selection.quest import Quest

ADMISSIONS: dict[str, type[Admission]] = {
    "full": Full,
    "streaming_llm": StreamingLLM,
    "wgkv": WGKV,
    "head_pattern": HeadPattern,
    "kvpop": KVPOP,
    "random": Random,
}
EVICTIONS: dict[str, type[Eviction]] = {
    "snapkv": SnapKV,
    "oraclekv": OracleKV,
    "tova": TOVA,
    "keydiff": KeyDiff,
    "knorm": KNorm,
    "expected_attention": ExpectedAttention,
    "h2o": H2O,
    "fast_kvzip": FastKVzip,
    "r_kv": RKV,
    "kvzip": KVzip,
    "random_eviction": RandomEviction,
}
WRAPPERS: dict[str, type[Wrapper]] = {
    "adakv": Adaptive,
    "pyramidkv": Pyramid,
    "critical_kv": CriticalKV,
}
"""Evictions that hold another one: SnapKV unless another is named."""
SELECTIONS: dict[str, type[Selection]] = {
    "quest": Quest,
}
POLICIES = (*ADMISSIONS, *EVICTIONS, *WRAPPERS, *SELECTIONS)

ELSEWHERE = {
    "DuoAttention": "it is head_pattern, whose pattern= may be a folder of DuoAttention's",
    "PruLong": "it is head_pattern, whose pattern= may be a folder that kvjax.train --method prulong leaves",
    "ObservedAttention": "the nearest is h2o, which sums the attention that ObservedAttention averages over the "
    "queries that see an entry, and leaves half of its budget to the newest (none with recent=0)",
    "Random": "it is random_eviction; random is an admission",
    "CriticalAdaKV": "the nearest is adakv with eviction='critical_kv', which shares budgets by CriticalKV's scores",
}
"""What other methods are here, those of kvpress also with Press behind, where the nearest name does not say it."""


def described() -> dict[str, str]:
    """Each of `POLICIES` with a line about it: the first of its file, or of its class where a file has several."""
    classes: dict[str, type] = {**ADMISSIONS, **EVICTIONS, **WRAPPERS, **SELECTIONS}
    homes = [_home(kind) for kind in classes.values()]
    return {
        name: _first_line((kind if homes.count(home) > 1 else home).__doc__)
        for (name, kind), home in zip(classes.items(), homes, strict=True)
    }


def listed() -> str:
    """The same as text."""
    lines = described()
    wide = max(map(len, lines))
    return "\n".join(f"{name:{wide}}  {line}" for name, line in lines.items())


def _home(kind: type) -> Any:
    """The method's file, or its package where it has one of its own."""
    return sys.modules[kind.__module__.removesuffix(".policy")]


def _first_line(doc: str | None) -> str:
    """The first sentence, in a line."""
    paragraph = " ".join(inspect.cleandoc(doc or "").split("\n\n")[0].split())
    return re.split(r"(?<=[^ .]{2}[.)])\s+(?=[A-Z])", paragraph)[0]


def unknown(what: str, name: str, known: Iterable[str]) -> UserError:
    """The error of a name that is none of these: with what kvpress's method is here, or the nearest of them."""
    elsewhere = {f"{own}{press}".lower(): said for own, said in ELSEWHERE.items() for press in ("", "Press")}
    if said := elsewhere.get(name.lower().replace("_", "")):
        return UserError(f"unknown {what} {name!r}; here {said}")
    near = nearest(name, known) or known
    return UserError(f"unknown {what} {name!r}; the nearest known: {', '.join(near)}")


def find_policy(name: str | None) -> Callable[..., Any] | None:
    """What another package brings under a name: a method's class, or what makes a policy of keyword arguments, which is
    a function or the `policy` of a recipe; None for a name that is neither.

    Raises:
        UserError: it cannot be imported, or is none of these.
    """
    if name is None or name in POLICIES:
        return None
    found = find(name, PLUGINS, "policy")
    found = find(name, METHODS, "policy") if found is None else found
    if found is None:
        return None
    made = getattr(found, "policy", found)
    if is_method(made):
        _check_class(name, made)
    elif isinstance(made, type) or not callable(made):
        raise UserError(
            f"policy {name}: expected a method's class, a function that makes a policy, or a recipe, got {shown(made)}"
        )
    return made


def _check_class(name: str, kind: type[Method]) -> None:
    """Refuse a method's class that is not finished. Raises UserError, which says what it lacks."""
    if not issubclass(kind, Admission | Eviction | Selection):
        raise UserError(f"policy {name}: {kind.__name__} must be an Admission, an Eviction or a Selection")
    if lacking := sorted(getattr(kind, "__abstractmethods__", ())):
        raise UserError(f"policy {name}: {kind.__name__} does not define {', '.join(lacking)}")
    if "__dataclass_fields__" not in vars(kind):
        raise UserError(f"policy {name}: {kind.__name__} needs @struct (kvjax.struct) above its class")


def role(kind: Any) -> str:
    """Which part of a policy a method's class, or an object of it, is: "admission", "eviction" or "selection". What
    makes a whole policy stands for its admission."""
    kind = kind if isinstance(kind, type) else type(kind)
    roles = {"eviction": Eviction, "selection": Selection}
    return next((name for name, own in roles.items() if issubclass(kind, own)), "admission")


def is_method(kind: Any) -> bool:
    """Whether it is a method's class."""
    return isinstance(kind, type) and issubclass(kind, Method)
