"""Policies by name: `make_policy("wgkv", gates=…, tau=0.1)`, `make_policy("snapkv", model=model, ratio=0.25)`.

admission, eviction, selection: the methods, one file each; a method is added by a line below. interfaces: what a method
defines. policy: their composition. budget, plan: how much stays, and when. chance: randomness that repeats.
"""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from kvjax.errors import UserError, one_of, shown, whole_number
from kvjax.mesh import use_mesh
from kvjax.plugins import METHODS, find
from kvjax.plugins import POLICIES as PLUGINS
from kvjax.policies.admission.full import Full, full, stores_all
from kvjax.policies.admission.head_pattern import head_pattern
from kvjax.policies.admission.random import random
from kvjax.policies.admission.streaming_llm import streaming_llm
from kvjax.policies.admission.wgkv import wgkv
from kvjax.policies.budget import Budget, Shares
from kvjax.policies.eviction.critical_kv import critical_kv
from kvjax.policies.eviction.expected_attention import expected_attention
from kvjax.policies.eviction.h2o import h2o
from kvjax.policies.eviction.keydiff import keydiff
from kvjax.policies.eviction.knorm import knorm
from kvjax.policies.eviction.method import Method, Protected
from kvjax.policies.eviction.r_kv import r_kv
from kvjax.policies.eviction.random import random as random_eviction
from kvjax.policies.eviction.snapkv import snapkv
from kvjax.policies.eviction.tova import tova
from kvjax.policies.interfaces import Selection
from kvjax.policies.plan import Plan, Schedule
from kvjax.policies.policy import Policy
from kvjax.policies.selection.quest import quest

ADMISSIONS: dict[str, Callable[..., Policy]] = {
    "full": full,
    "streaming_llm": streaming_llm,
    "wgkv": wgkv,
    "head_pattern": head_pattern,
    "random": random,
}
EVICTIONS: dict[str, Callable[..., Method]] = {
    "snapkv": snapkv,
    "tova": tova,
    "keydiff": keydiff,
    "knorm": knorm,
    "expected_attention": expected_attention,
    "h2o": h2o,
    "r_kv": r_kv,
    "random_eviction": random_eviction,
}
OVER_ANY_SCORE: dict[str, dict[str, Any]] = {
    "adakv": {"over": "layer", "pinned": 0.2},
    "pyramidkv": {"pyramid": 20.0},
    "critical_kv": {"critical": True},
}
"""Evictions that share a budget, or weigh scores, in their own way: another method's scores (SnapKV's unless
`eviction=` names them) with these arguments."""
SELECTIONS: dict[str, Callable[..., Selection]] = {
    "quest": quest,
}
POLICIES = (*ADMISSIONS, *EVICTIONS, *OVER_ANY_SCORE, *SELECTIONS)


def brought(name: str | None) -> Callable[..., Policy] | None:
    """What makes the policy of another package, by an entry point's name or `package.module:NAME`: a function of
    keyword arguments, or the `policy` of a recipe; None for a name that is neither.

    Raises:
        UserError: it cannot be imported, or is no function.
    """
    if name is None or name in POLICIES:
        return None
    found = find(name, PLUGINS, "policy") or find(name, METHODS, "policy")
    if found is None:
        return None
    if not callable(made := getattr(found, "policy", found)):
        raise UserError(f"policy {name}: {shown(found)} is neither a function nor a recipe")
    return cast(Callable[..., Policy], made)


def make_policy(
    name: str | None = None,
    *,
    model: Any = None,
    admission: str | None = None,
    eviction: str | None = None,
    selection: str | None = None,
    **arguments: Any,
) -> Policy:
    """The policy called `name`, or one composed of an admission, an eviction and a selection.

    Args:
        name: one of `POLICIES`: an admission, an eviction or a selection, to which the others may be added, or one of
            `OVER_ANY_SCORE`, for which `eviction` names the scores; or what another package brings (`brought`).
        eviction: may also be one of `OVER_ANY_SCORE`, over SnapKV's scores.
        model: the model it is for, whose shape some methods need. What was made for another model is refused. A policy
            that needs none may be made without, for any.
        **arguments: the methods' own arguments (see the functions of their names, e.g. `wgkv`, `snapkv`); with an
            eviction also those of `Budget` (ratio, entries, size or threshold), of `Shares` (over, pinned, pyramid), of
            `Schedule` (when, chunk, every, drop, observers), of `Protected` (first, last), and `critical=True` for
            CriticalKV's second stage. If an eviction and a selection both take `ratio`, it goes to the eviction.

    Raises:
        UserError: an unknown name or argument (with the nearest known), a value that a method refuses, a composition
            that means nothing.
    """
    parts_named = {"name": name, "admission": admission, "eviction": eviction, "selection": selection}
    for what, given in parts_named.items():
        if given is not None and not isinstance(given, str):
            raise UserError(f"make_policy: {what} must be the name of a method, got {shown(given)}")
    if model is not None and not hasattr(getattr(model, "config", None), "num_layers"):
        raise UserError(f"make_policy: model must be a model such as load_model gives, got {shown(model)}")
    admissions = ADMISSIONS | {x: make for x in (name, admission) if (make := brought(x)) is not None}
    made_of = (name,) if name else (admission, eviction)
    label = "+".join(x for x in (*made_of, selection) if x) or "full"
    if name in SELECTIONS:
        if selection not in (None, name):
            raise UserError(f"{name} is a selection itself, got selection={selection!r} beside it")
        label = selection = name
    elif name in admissions:
        if admission not in (None, name):
            raise UserError(f"{name} is an admission itself, got admission={admission!r} beside it")
        admission = name
    elif name in OVER_ANY_SCORE:
        arguments = OVER_ANY_SCORE[name] | arguments
        eviction = eviction or "snapkv"
    elif name is not None:
        if eviction not in (None, _known(name, POLICIES, "policy")):
            raise UserError(f"{name} is an eviction itself, got eviction={eviction!r} beside it")
        eviction = name
    if eviction in OVER_ANY_SCORE:
        arguments, eviction = OVER_ANY_SCORE[eviction] | arguments, "snapkv"
    if eviction == "expected_attention" and arguments.get("critical"):
        arguments = {"values": False} | arguments  # CriticalKV weighs by values itself
    parts: dict[str, Callable[..., Any]] = {}
    if admission is not None or eviction is None:
        parts["admission"] = admissions[_known(admission or "full", admissions, "admission")]
    if eviction is not None:
        parts["eviction"] = EVICTIONS[_known(eviction, EVICTIONS | OVER_ANY_SCORE, "eviction")]
        parts |= {"budget": Budget, "shares": Shares, "schedule": Schedule}
        parts |= {"protected": Protected, "second": second_stage}
    if selection is not None:
        parts["selection"] = SELECTIONS[_known(selection, SELECTIONS, "selection")]
    with use_mesh(model):
        made = {
            part: parts[part](**given) for part, given in _divided(label, parts, model, arguments).items()
        }
        chosen = made.pop("selection", None)
        policy = made.get("admission") or Policy(Full(), name=label, window=1)
        policy = policy if eviction is None else _evicting(label, policy, model, **made)
        policy = policy if chosen is None else dataclasses.replace(policy, name=label, selection=chosen)
        if model is None:
            return policy
        return policy.placed(model.config.num_layers, model.config.num_kv_heads)


def second_stage(*, critical: bool = False, first_stage: float | None = None) -> float | None:
    """The share of the places that the scores alone give (half of them if it is not stated), before CriticalKV weighs
    the rest; None: all of them."""
    one_of("critical_kv", "critical", critical, (True, False))
    if not critical and first_stage is not None:
        raise UserError(f"critical_kv: first_stage={shown(first_stage)} needs critical=True")
    return (0.5 if first_stage is None else first_stage) if critical else None


def _evicting(
    label, policy, model, *, eviction, budget, shares, schedule, protected, second, admission=None
) -> Policy:
    """The policy with an eviction."""
    method = protected.within(eviction if second is None else critical_kv(eviction, first=second))
    plan = Plan(budget, shares, schedule, method.last, method.first, method.recent, method.observed)
    if second is not None and budget.threshold is not None:
        raise UserError(f"{label}: critical_kv shares out the places of a budget, and a threshold has none")
    if model is not None:
        shares.check(model.config.num_layers)
    everything = stores_all(policy)
    if everything and schedule.when != "prompt" and plan.last < plan.observed:
        raise UserError(
            f"{label}: when={schedule.when!r} looks back at the last {plan.observed} tokens again and again, so they "
            f"must stay: last must be at least {plan.observed}, got {plan.last}"
        )
    # what is stored is at least as old as the window, and the oldest query that is looked back at is younger than it
    if not everything and policy.window < method.observed:
        raise UserError(
            f"{label} looks back at the last {method.observed} tokens, which must still be in the window: "
            f"window must be at least {method.observed}, got {policy.window}"
        )
    if not everything and schedule.patched:
        raise UserError(
            f"{label}: observers='prompt' reads tokens behind a chunk, which would push its own out of an admission's "
            "ring"
        )
    if not everything and plan.by_chunk:
        raise UserError(
            f"{label}: a budget of each chunk counts its tokens, which an admission does not all store: "
            "state entries or size"
        )
    if not everything and method.eviction.alone:
        raise UserError(f"{label} {method.eviction.alone}")
    if twice := set(policy.admission.planes) & set(method.eviction.planes):
        raise UserError(f"{label}: its admission and its eviction both have a plane called {min(twice)!r}")
    return dataclasses.replace(policy, name=label, eviction=method.eviction, plan=plan)


def _known(name: str, known: Any, what: str) -> str:
    if name not in known:
        near = difflib.get_close_matches(name, known) or list(known)
        raise UserError(f"unknown {what} {name!r}; the nearest known: {', '.join(near)}")
    return name


_ANY = inspect.Parameter("any", inspect.Parameter.KEYWORD_ONLY, default=None)


def _divided(
    label: str, parts: Mapping[str, Callable[..., Any]], model: Any, arguments: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Each part's own arguments."""
    known = {part: dict(inspect.signature(function).parameters) for part, function in parts.items()}
    if "selection" in known and any("ratio" in known[part] for part in known if part != "selection"):
        known["selection"].pop("ratio", None)
    names = dict.fromkeys(
        name for parameters in known.values() for name, x in parameters.items() if x.kind is not x.VAR_KEYWORD
    )
    # what a part takes by ** is its own to refuse
    for parameters in known.values():
        if any(x.kind is x.VAR_KEYWORD for x in list(parameters.values())):
            parameters |= {x: _ANY for x in arguments if x not in names}
    known = {
        part: {x: kind for x, kind in parameters.items() if kind.kind is not kind.VAR_KEYWORD}
        for part, parameters in known.items()
    }
    for argument in arguments:
        owners = [part for part, parameters in known.items() if argument in parameters]
        if not owners:
            raise UserError(f"{label} has no argument {argument!r}; it has {', '.join(names)}")
        if len(owners) > 1:
            raise UserError(
                f"{label}: {argument} is an argument of the {' and of the '.join(owners)}: compose others"
            )
    given = dict(arguments)
    if model is not None:
        shape = {"layers": model.config.num_layers, "kv_heads": model.config.num_kv_heads}
        for name, size in shape.items():
            if name in given and whole_number(label, name, given[name]) != size:
                raise UserError(f"{label}: {name} is {given[name]}, the model has {size}")
        given = given | shape | {"model": model}
    needed = [
        name
        for parameters in known.values()
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
    ]
    missing = [name for name in dict.fromkeys(needed) if name not in given]
    if missing:
        hint = " (model=… gives layers and kv_heads)" if {"layers", "kv_heads"} & set(missing) else ""
        raise UserError(f"{label} needs {', '.join(missing)}{hint}")
    return {
        part: {name: given[name] for name in parameters if name in given}
        for part, parameters in known.items()
    }


__all__ = ["POLICIES", "Policy", "make_policy"]
