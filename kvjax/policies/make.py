"""`make_policy`: names and flat arguments for the objects that a policy is composed of."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.errors import UserError, nearest, one_of, refuse_unknown, shown, whole_number
from kvjax.mesh import use_mesh
from kvjax.policies.assignments import with_arguments
from kvjax.policies.budget import BUDGETS, budget
from kvjax.policies.eviction.adaptive import Adaptive, Pyramid
from kvjax.policies.eviction.critical_kv import CriticalKV
from kvjax.policies.eviction.protected import Protected
from kvjax.policies.interfaces import Admission, Eviction, Selection
from kvjax.policies.moment import NOTHING, moment
from kvjax.policies.policy import Policy
from kvjax.policies.registry import (
    ADMISSIONS,
    EVICTIONS,
    POLICIES,
    SELECTIONS,
    WRAPPERS,
    find_policy,
    is_method,
    role,
)

WRAPPING = "over", "pinned", "pyramid", "critical", "first_stage", "first", "last"
MOMENT = "when", *NOTHING
WORDS = (*BUDGETS, *MOMENT, *WRAPPING)
"""Arguments of `make_policy` that are the policy's where there is an eviction, whatever its methods."""


def make_policy(
    name: str | None = None,
    *,
    model: Any = None,
    admission: str | Admission | None = None,
    eviction: str | Eviction | None = None,
    selection: str | Selection | None = None,
    **arguments: Any,
) -> Policy:
    """The policy called `name`, with other methods beside it: names and flat arguments for what `Policy` composes of
    objects. `make_policy("adakv", ratio=0.1, observed=16)` is
    `Policy(eviction=Adaptive(SnapKV(observed=16)), budget=Ratio(0.1))`.

    Args:
        name: one of `POLICIES`: an admission, an eviction, one around the scores of `eviction` (adakv, pyramidkv,
            critical_kv; SnapKV's unless it is given), or a selection; or what another package brings (`find_policy`).
            None: the first of the others.
        admission, eviction, selection: methods beside it, as an object (`SnapKV(observed=32)`), a name (`"snapkv"`) or
            a name with its arguments (`"snapkv:observed=32,pool=7"`).
        model: the model it is for. What was made for another model is refused. Without it, the policy serves any model
            that its tables fit.
        **arguments: with an eviction `WORDS`: its budget (ratio, entries, size or threshold), its moment (when, chunk,
            every, drop, observers: see `kvjax.policies.moment`), and what is around it (over and pinned: `Adaptive`;
            pyramid: `Pyramid`; critical and first_stage: `CriticalKV`; first and last: `Protected`). With an admission,
            or no eviction, `window`. All others are the own arguments of `name`, the fields of its class.

    Raises:
        UserError: an unknown name or argument (with the nearest known), a value that a method refuses, a composition
            that means nothing.
    """
    if name is not None and not isinstance(name, str):
        raise UserError(f"make_policy: name must be the name of a method, got {shown(name)}")
    if model is not None and not hasattr(getattr(model, "config", None), "num_layers"):
        raise UserError(f"make_policy: model must be a model such as load_model gives, got {shown(model)}")
    given = {"admission": admission, "eviction": eviction, "selection": selection}
    parts = {part: _part(part, x) for part, x in given.items() if x is not None}
    own, label = _own(name, parts, given)
    parts[own.role] = own
    evicting = parts.get("eviction")
    words, known = {}, []
    if evicting is not None:
        words = evicting.words | {x: arguments.pop(x) for x in WORDS if x in arguments}
        known = [*WORDS]
    window = None
    if ("admission" in parts or evicting is None) and not own.makes_policies:
        known = ["window", *known]
        if "window" in arguments:
            window = whole_number(label, "window", arguments.pop("window"))
    parts[own.role] = own.with_more(arguments, known)
    with use_mesh(model):
        policy = _composed(label, parts, words, window, model)
        return policy if model is None else policy.for_model(model)


def _own(name: str | None, parts: dict[str, "_Part"], given: dict[str, Any]) -> tuple["_Part", str]:
    """The method that is named, or the first of the others, and what the policy is called."""
    if name is None:
        own = next(iter(parts.values()), None) or _part("admission", "full")
        names = [parts[part].name for part in ("admission", "eviction", "selection") if part in parts]
        return own, "+".join(names) or own.name
    own = _part("policy", name)
    if own.role in parts and own.words:
        beside = parts[own.role]
        own = dataclasses.replace(beside, name=own.name, words=own.words | beside.words)
    elif own.role in parts and given[own.role] != name:
        article = "a" if own.role == "selection" else "an"
        raise UserError(
            f"{own.name} is {article} {own.role} itself, got {own.role}={shown(given[own.role])} beside it"
        )
    selected = [parts["selection"].name] if "selection" in parts and own.role != "selection" else []
    return own, "+".join([own.name, *selected])


def _composed(
    label: str, parts: dict[str, "_Part"], words: dict[str, Any], window: int | None, model: Any
) -> Policy:
    made = {part: one.build(model) for part, one in parts.items()}
    fields: dict[str, Any] = {} if window is None else {"window": window}
    if "eviction" in made:
        measures = {x: words[x] for x in BUDGETS if x in words}
        told = {x: words[x] for x in MOMENT if x in words}
        eviction = _wrapped(made["eviction"], **{x: words[x] for x in WRAPPING if x in words})
        fields |= {"eviction": eviction, "budget": budget(**measures), "when": moment(**told)}
    fields |= {part: x for part, x in made.items() if part not in fields}
    base = fields.get("admission")
    if isinstance(base, Policy):
        del fields["admission"]
        # another package's, whole: it is called as that package says
        return dataclasses.replace(base, **fields, name=label) if fields else base
    return Policy(name=label, **fields)


def _wrapped(
    eviction: Eviction,
    *,
    critical: bool = False,
    first_stage: float | None = None,
    pyramid: float | None = None,
    first: int | None = None,
    last: int | None = None,
    **shares: Any,
) -> Eviction:
    """The eviction within what the words say."""
    one_of("critical_kv", "critical", critical, (True, False))
    if critical:
        stage = {} if first_stage is None else {"first_stage": first_stage}
        eviction = CriticalKV(eviction, **stage)
    elif first_stage is not None:
        raise UserError(f"critical_kv: first_stage={shown(first_stage)} needs critical=True")
    if pyramid is not None:
        eviction = Pyramid(eviction, pyramid)
    if shares:
        eviction = Adaptive(eviction, **({"over": "head", "pinned": 0.0} | shares))
    return eviction if first is None and last is None else Protected(eviction, first, last)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A method as it was named, or as it was made."""

    role: str
    name: str
    method: Any
    """An object, its class, or a function that makes a policy."""
    arguments: dict[str, Any]
    words: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of `make_policy`, that the name stands for."""

    @property
    def makes_policies(self) -> bool:
        return callable(self.method) and not is_method(self.method)

    @property
    def known(self) -> list[str]:
        """Its own arguments."""
        if self.makes_policies:
            return [x for x in inspect.signature(self.method).parameters if x != "model"]
        if not is_method(self.method):
            return []
        return [field.name for field in dataclasses.fields(self.method) if field.init]

    def with_more(self, arguments: dict[str, Any], more: Sequence[str] = ()) -> "_Part":
        """With these arguments of its own, too. Raises UserError for what it does not have; `more` is what else it
        might have been told."""
        open_ended = self.makes_policies and any(
            x.kind is x.VAR_KEYWORD for x in inspect.signature(self.method).parameters.values()
        )
        for argument in arguments:
            if argument in self.arguments:
                raise UserError(f"{self.name} is given {argument} twice")
            if argument not in self.known and not open_ended:
                refuse_unknown(self.name, argument, list(dict.fromkeys([*self.known, *more])))
        return dataclasses.replace(self, arguments=self.arguments | arguments)

    def build(self, model: Any) -> Any:
        """The method, or another package's policy."""
        if not callable(self.method):
            return self.method
        parameters, given = inspect.signature(self.method).parameters, self.arguments
        if self.makes_policies and model is not None and "model" in parameters:
            given = given | {"model": model}
        needed = [x.name for x in parameters.values() if x.default is x.empty and x.kind is not x.VAR_KEYWORD]
        if missing := [x for x in needed if x not in given]:
            raise UserError(f"{self.name} needs {', '.join(missing)}")
        made = self.method(**given)
        if self.makes_policies and not isinstance(made, Policy):
            raise UserError(f"policy {self.name}: expected a Policy, it gave {shown(made)}")
        return made


KNOWN: dict[str, dict[str, Any]] = {
    "admission": dict(ADMISSIONS),
    "eviction": EVICTIONS | WRAPPERS,
    "selection": dict(SELECTIONS),
    "policy": ADMISSIONS | EVICTIONS | SELECTIONS | WRAPPERS,
}


def _part(what: str, given: Any) -> _Part:
    """A method that is given as an object, a name, or a name with arguments."""
    objects = {"admission": Admission, "eviction": Eviction, "selection": Selection}
    if isinstance(given, objects.get(what, ())):
        return _Part(what, given.label, given, {})
    if not isinstance(given, str):
        raise UserError(f"make_policy: {what} must be a method or the name of one, got {shown(given)}")
    known = KNOWN[what]
    name, told = with_arguments(given, known)
    made: Callable[..., Any] | None = find_policy(name)
    if name in WRAPPERS:
        part = _Part("eviction", name, EVICTIONS["snapkv"], {}, WRAPPERS[name])
    else:
        method = known.get(name) or made
        if method is None or (what != "policy" and role(method) != what):
            candidates = POLICIES if what == "policy" else known
            near = nearest(name, candidates) or list(candidates)
            raise UserError(f"unknown {what} {name!r}; the nearest known: {', '.join(near)}")
        part = _Part(role(method), name, method, {})
    return part if told is None else part.with_more(told)
