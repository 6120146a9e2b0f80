"""`make_policy`: names and flat arguments for the objects that a policy is composed of."""

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvjax.errors import UserError, refuse_unknown, shown, whole_number
from kvjax.exported.fingerprint import MadeFor
from kvjax.exported.folder import describe, is_exported
from kvjax.mesh import use_mesh
from kvjax.policies.assignments import with_arguments
from kvjax.policies.budget import BUDGETS, budget
from kvjax.policies.eviction.adaptive import Adaptive
from kvjax.policies.eviction.protected import Protected
from kvjax.policies.eviction.snapkv import SnapKV
from kvjax.policies.eviction.wrapper import Wrapper
from kvjax.policies.guidance import token_ids
from kvjax.policies.interfaces import Admission, Eviction, Selection
from kvjax.policies.moment import NOTHING, Moment, moment
from kvjax.policies.moment import names as moment_names
from kvjax.policies.policy import Policy
from kvjax.policies.registry import (
    ADMISSIONS,
    EVICTIONS,
    POLICIES,
    SELECTIONS,
    WRAPPERS,
    find_policy,
    is_method,
    listed,
    role,
    unknown,
)

WRAPPING = "over", "pinned", "first", "last"
MOMENT = "when", *NOTHING
SINK = "first tokens that always stay are an admission's sink, or first with an eviction"
LAST = "last tokens that are always visible are window, those that an eviction looks back at observed"
OTHERS = {
    "compression_ratio": {
        "ratio": "kvpress's share that goes is here the share that stays, ratio = 1 − compression_ratio"
    },
    "budget": {"entries": "a budget is one of ratio, entries, size, threshold"},
    "max_capacity_prompt": {"entries": "entries of a kv head that stay are entries"},
    "window_size": {"window": LAST, "observed": LAST},
    "window": {"observed": LAST},
    "ratio": {
        "sparsity": "the share of heads that stream is sparsity, of those that keep everything 1 − sparsity"
    },
    "n_sink": {"sink": SINK, "first": SINK},
    "kernel_size": {"pool": "the kernel that joins neighbours is pool"},
    "alpha_safeguard": {"pinned": "the share that every head keeps of its own best is pinned"},
    "n_future_positions": {"future": "positions ahead are future"},
}
"""Words of other libraries and methods, and what is said of them to a method that has these arguments."""
OWN = "name", "model", "admission", "eviction", "selection", "tokenizer", "force"
"""Arguments of `make_policy` that are no method's."""
WORDS = (*BUDGETS, *MOMENT, "guidance", *WRAPPING)
"""Arguments of `make_policy` that are the policy's where there is an eviction, whatever its methods."""


def make_policy(
    name: str | None = None,
    *,
    model: Any = None,
    admission: str | Admission | None = None,
    eviction: str | Eviction | None = None,
    selection: str | Selection | None = None,
    tokenizer: Any = None,
    force: bool = False,
    **arguments: Any,
) -> Policy:
    """The policy called `name`, with other methods beside it: names and flat arguments for what `Policy` composes of
    objects. `make_policy("adakv", eviction="snapkv:observed=16", ratio=0.1)` is
    `Policy(eviction=Adaptive(SnapKV(observed=16)), budget=Ratio(0.1))`.

    Args:
        name: one of `POLICIES`: an admission, an eviction, one around another `eviction` (adakv, pyramidkv,
            critical_kv; SnapKV unless it is given), or a selection; or what another package brings (`find_policy`).
            None: the first of the others.
        admission, eviction, selection: methods beside it, as an object (`SnapKV(observed=32)`), a name (`"snapkv"`) or
            a name with its arguments (`"snapkv:observed=32,pool=7"`, `"adakv:eviction=(snapkv:pool=7),over=model"`).
        model: the model it is for. What was made for another model is refused. Without it, the policy serves any model
            that its tables fit, and gates and patterns are held against each that it is used with.
        tokenizer: the model's, from `kvjax.load`, for guidance, and methods that have it read texts (kvzip) or keep
            what its chat template puts before them (fast_kvzip).
        force: take gates and patterns that were made for another model of the same shape.
        **arguments: with an eviction `WORDS`: its budget (ratio, entries, size or threshold), its moment (when, chunk,
            every, drop, observers: see `kvjax.policies.moment`), guidance that looks at prompts for it (a text, the
            name of a published one, or token ids: `kvjax.policies.guidance`), and what is around it (over and pinned:
            `Adaptive`; first and last: `Protected`). With an admission, or no eviction, `window`. All others are the
            own arguments of `name`, the fields of its class; `gates` is what training left for any of them, whatever it
            calls that.

    Raises:
        UserError: an unknown name or argument (with the nearest known), a value that a method refuses, a composition
            that means nothing, files made for another model.
    """
    if model is not None and not hasattr(getattr(model, "config", None), "num_layers"):
        raise UserError(f"make_policy: model must be a model such as load_model gives, got {shown(model)}")
    named = _named(name, {"admission": admission, "eviction": eviction, "selection": selection}, arguments)
    with use_mesh(model):
        if not force:
            _check_files(named.parts, model)
        policy = _made(named, model, force, tokenizer)
        policy = policy.unchecked if force else policy
        return policy if model is None else policy.for_model(model)


make_policy.__doc__ = f"{make_policy.__doc__}\n    Methods:\n{textwrap.indent(listed(), ' ' * 8)}\n"


def make_ahead(
    name: str | None = None, *, tokenizer: Any = None, force: bool = False, **arguments: Any
) -> Policy | None:
    """What `make_policy` makes of these before there is a model, so that what it refuses costs nobody the reading of
    weights; None: another package makes it of the model, or a method waits for the tokenizer."""
    named = _named(name, *_by_role(arguments))
    waiting = any(one.waits for one in named.parts.values()) or (tokenizer is None and named.reads_texts)
    return None if waiting else _made(named, None, force, tokenizer)


def takes_tokenizer(name: str | None = None, *, force: bool = False, **arguments: Any) -> bool:
    """Whether `make_policy` has a use for a tokenizer, told these. Raises UserError as `check_names`."""
    return _named(name, *_by_role(arguments)).reads_texts


def _by_role(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The methods among the arguments of `make_policy`, and its others."""
    roles = "admission", "eviction", "selection"
    others = {name: x for name, x in arguments.items() if name not in roles}
    return {role: arguments.get(role) for role in roles}, others


def check_names(
    name: str | None = None,
    *,
    admission: str | Admission | None = None,
    eviction: str | Eviction | None = None,
    selection: str | Selection | None = None,
    **arguments: Any,
) -> None:
    """Refuse the names of methods and arguments that `make_policy` would refuse, before there is a model.

    Raises:
        UserError: as `make_policy`, but for what values, compositions and files mean.
    """
    _named(name, {"admission": admission, "eviction": eviction, "selection": selection}, arguments)


@dataclasses.dataclass(frozen=True)
class _Named:
    """What `make_policy` was told: the methods by role, with their arguments, and the policy's own."""

    own: "_Part"
    """The method that is named first."""
    parts: dict[str, "_Part"]
    label: str
    words: dict[str, Any]
    window: int | None

    @property
    def guidance(self) -> Any:
        """What it is told looks at prompts, or usually does; none: `None`, or an empty text."""
        method = self.parts["eviction"].method if "eviction" in self.parts else None
        return self.words.get("guidance", getattr(method, "guidance", None))

    @property
    def reads_texts(self) -> bool:
        """Whether there is a use for the model's tokenizer."""
        guided = isinstance(self.guidance, str) and self.guidance != ""
        return guided or any(one.reads_texts for one in self.parts.values())

    def hint(self, error: str) -> str:
        """What an error of the first method may come of: an argument that the eviction took; else nothing."""
        own = self.own
        taken = [x for x in self.words if x in own.known and x not in own.arguments and x in error]
        if not taken or not error.startswith(own.name):
            return ""
        told = f"{taken[0]}={shown(self.words[taken[0]])}"
        return f"{told} is the eviction's here, its own goes behind its name: {own.name}:{taken[0]}=…"


def _named(name: Any, given: dict[str, Any], arguments: dict[str, Any]) -> _Named:
    if name is not None and not isinstance(name, str):
        raise UserError(f"make_policy: name must be the name of a method, got {shown(name)}")
    arguments = dict(arguments)
    parts = {part: _part(part, x) for part, x in given.items() if x is not None}
    own, label = _own(name, parts, given)
    parts[own.role] = own
    evicting = parts.get("eviction")
    guided = evicting is not None and _looks_back(evicting.method)
    if "guidance" in arguments and not guided and not own.makes_policies:
        raise _unguided(label)
    words, known = {}, []
    if evicting is not None:
        words = {x: arguments.pop(x) for x in WORDS if x in arguments}
        known = [*WORDS]
    window = None
    if ("admission" in parts or evicting is None) and not own.makes_policies:
        known = ["window", *known]
        if "window" in arguments and not getattr(own.method, "owns_window", False):
            window = whole_number(label, "window", arguments.pop("window"))
    parts[own.role] = own = own.with_more(arguments, known, OWN)
    return _Named(own, parts, label, words, window)


def _own(name: str | None, parts: dict[str, "_Part"], given: dict[str, Any]) -> tuple["_Part", str]:
    """The method that is named, or the first of the others, and what the policy is called."""
    own = (
        _part("policy", name)
        if name is not None
        else next(iter(parts.values()), None) or _part("admission", "full")
    )
    if name is None:
        return own, _label(parts | {own.role: own})
    if own.role in parts and own.is_around:
        own = own.with_more({"eviction": given["eviction"]})
    elif own.role in parts and given[own.role] != name:
        article = "a" if own.role == "selection" else "an"
        raise UserError(
            f"{own.name} is {article} {own.role} itself, got {own.role}={shown(given[own.role])} beside it"
        )
    return own, _label(parts | {own.role: own})


def _label(parts: dict[str, "_Part"]) -> str:
    """The names of all methods, as `Policy` calls itself by them."""
    names = [parts[part].name for part in ("policy", "admission", "eviction", "selection") if part in parts]
    return "+".join(x for x in names if x != "full" or len(names) == 1)


def _check_files(parts: dict[str, "_Part"], model: Any) -> None:
    """Refuse gates of another model for what another package makes a policy of: methods know those that they read."""
    for one in parts.values():
        gates = one.arguments.get("gates")
        if one.makes_policies and model is not None and isinstance(gates, str | Path) and is_exported(gates):
            made_for = MadeFor.described(describe(gates))
            if made_for is not None:
                made_for.check(one.name, model)


def _made(named: _Named, model: Any, force: bool, tokenizer: Any) -> Policy:
    try:
        return _composed(named, model, force, tokenizer)
    except UserError as error:
        if hint := named.hint(str(error)):
            raise UserError(f"{error}; {hint}") from None
        raise


def _composed(named: _Named, model: Any, force: bool, tokenizer: Any) -> Policy:
    words = named.words
    made = {part: one.build(model, force, tokenizer) for part, one in named.parts.items()}
    fields: dict[str, Any] = {} if named.window is None else {"window": named.window}
    if "eviction" in made:
        measures = {x: words[x] for x in BUDGETS if x in words}
        told = {x: words[x] for x in MOMENT if x in words}
        eviction = made["eviction"]
        observers = told.get("observers", "own")
        observed = not (isinstance(observers, str) and observers == "own")
        if "guidance" in words and observed:
            raise UserError(f"{eviction.label}: guidance is who observes, got observers, too")
        if "guidance" in words or (eviction.guidance and not observed):
            eviction, told["observers"] = _guided(eviction, named, tokenizer)
        eviction = _wrapped(eviction, **{x: words[x] for x in WRAPPING if x in words})
        fields |= {"eviction": eviction, "budget": budget(**measures), "when": _moment(eviction, told)}
    fields |= {part: x for part, x in made.items() if part not in fields}
    base = fields.get("admission")
    if isinstance(base, Policy):
        del fields["admission"]
        # another package's, whole: it is called as that package says
        return dataclasses.replace(base, **fields, name=named.label) if fields else base
    return Policy(name=named.label, **fields)


def _guided(eviction: Eviction, named: _Named, tokenizer: Any) -> tuple[Eviction, tuple[int, ...]]:
    """The eviction that looks by guidance, by all of it unless it is told by how many tokens, and its token ids."""
    if eviction.guided(1) is None:
        raise _unguided(eviction.label)
    ids = token_ids(named.guidance, tokenizer)
    guided = eviction if named.parts["eviction"].tells("observed") else eviction.guided(len(ids))
    assert guided is not None
    return guided, ids


def _looks_back(method: Any) -> bool:
    """Whether guidance may look for an eviction of this class, or for what it is around."""
    return method.guided is not Eviction.guided


def _unguided(label: str) -> UserError:
    able = ", ".join(x for x, kind in EVICTIONS.items() if _looks_back(kind))
    return UserError(
        f"{label}: guidance is for methods that look back at the last tokens ({able}, and {', '.join(WRAPPERS)} around "
        "one of them)"
    )


def _moment(eviction: Eviction, told: dict[str, Any]) -> Moment:
    """When it compacts: as it is told, and else as the eviction usually does."""
    usual = eviction.usual_moment
    if told.get("when", usual.when) == usual.when:
        told = {"when": usual.when} | {name: getattr(usual, name) for name in moment_names(usual)} | told
    return moment(**told)


def _wrapped(
    eviction: Eviction, *, first: int | None = None, last: int | None = None, **shares: Any
) -> Eviction:
    """The eviction within what the words say: `shares` are those of the adaptive one that it is, or is put in."""
    if shares:
        own = eviction.shares
        adaptive = eviction if isinstance(eviction, Adaptive) else Adaptive(eviction, own.over, own.pinned)
        eviction = dataclasses.replace(adaptive, **shares)
    return eviction if first is None and last is None else Protected(eviction, first, last)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A method as it was named, or as it was made."""

    role: str
    name: str
    method: Any
    """An object, its class, or a function that makes a policy."""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Its own; an eviction among them is a part, too."""

    @property
    def makes_policies(self) -> bool:
        return callable(self.method) and not is_method(self.method)

    @property
    def waits(self) -> bool:
        """Whether it makes its policy of the model."""
        return self.makes_policies and "model" in inspect.signature(self.method).parameters

    @property
    def reads_texts(self) -> bool:
        """Whether it, or the eviction within it, takes the model's tokenizer."""
        within = self.arguments.get("eviction")
        return "tokenizer" in self.known or (isinstance(within, _Part) and within.reads_texts)

    def tells(self, argument: str) -> bool:
        """Whether it, or the eviction within it, was told this, as an object is."""
        within = self.arguments.get("eviction")
        told = argument in self.arguments or not callable(self.method)
        return told or (isinstance(within, _Part) and within.tells(argument))

    @property
    def is_around(self) -> bool:
        """Whether it is around another eviction."""
        return isinstance(self.method, type) and issubclass(self.method, Wrapper)

    @property
    def known(self) -> list[str]:
        """Its own arguments."""
        if self.makes_policies:
            return [x for x in inspect.signature(self.method).parameters if x not in ("model", "force")]
        if not is_method(self.method):
            return []
        return [field.name for field in dataclasses.fields(self.method) if field.init]

    def with_more(
        self, arguments: dict[str, Any], more: Sequence[str] = (), beside: Sequence[str] = ()
    ) -> "_Part":
        """With these arguments, too. Raises UserError for what it does not have; `more` is what else it might have been
        told, `beside` what is not its own."""
        open_ended = self.makes_policies and any(
            x.kind is x.VAR_KEYWORD for x in inspect.signature(self.method).parameters.values()
        )
        trained = getattr(self.method, "trained", "gates")
        arguments = {
            trained if x == "gates" and trained in self.known else x: y for x, y in arguments.items()
        }
        for argument in arguments:
            if argument in self.arguments:
                raise UserError(f"{self.name} is given {argument} twice")
            if argument not in self.known and not open_ended:
                known = list(dict.fromkeys([*self.known, *more]))
                said = [x for own, x in OTHERS.get(argument, {}).items() if own in known]
                refuse_unknown(self.name, argument, known, {argument: said[0]} if said else None, beside)
        if self.is_around and "eviction" in arguments:
            arguments = arguments | {"eviction": _part("eviction", arguments["eviction"])}
        return dataclasses.replace(self, arguments=self.arguments | arguments)

    def build(self, model: Any, force: bool = False, tokenizer: Any = None) -> Any:
        """The method, or another package's policy. force: of another model's files."""
        if not callable(self.method):
            return self.method
        parameters, given = inspect.signature(self.method).parameters, self.arguments
        if self.is_around:
            inner = given.get("eviction")
            given = given | {"eviction": SnapKV() if inner is None else inner.build(model, force, tokenizer)}
        if self.waits and model is not None:
            given = given | {"model": model}
        if "tokenizer" in self.known and tokenizer is not None:
            given = given | {"tokenizer": tokenizer}
        if self.makes_policies and force and "force" in parameters:
            given = given | {"force": True}
        needed = [x.name for x in parameters.values() if x.default is x.empty and x.kind is not x.VAR_KEYWORD]
        if missing := [x for x in needed if x not in given]:
            raise UserError(f"{self.name} needs {', '.join(missing)}")
        made = self.method(**given)
        if self.makes_policies and not isinstance(made, Policy):
            raise UserError(f"policy {self.name}: expected a Policy, it gave {shown(made)}")
        return made


KNOWN: dict[str, dict[str, Any]] = {
    "admission": dict(ADMISSIONS),
    "eviction": {**EVICTIONS, **WRAPPERS},
    "selection": dict(SELECTIONS),
    "policy": {**ADMISSIONS, **EVICTIONS, **SELECTIONS, **WRAPPERS},
}


def _part(what: str, given: Any) -> _Part:
    """A method that is given as an object, a name, or a name with arguments."""
    objects = {"admission": Admission, "eviction": Eviction, "selection": Selection}
    if isinstance(given, objects.get(what, ())):
        return _Part(what, given.label, given)
    if not isinstance(given, str):
        raise UserError(f"make_policy: {what} must be a method or the name of one, got {shown(given)}")
    known = KNOWN[what]
    name, told = with_arguments(given, known)
    method: Callable[..., Any] | None = known.get(name) or find_policy(name)
    if method is None or (what != "policy" and role(method) != what):
        raise unknown(what, name, POLICIES if what == "policy" else known)
    return _Part(role(method), name, method).with_more(told or {})
