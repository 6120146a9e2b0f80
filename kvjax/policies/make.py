"""Policies by name: one grammar for Python, YAML, comparisons and the command line.

    policy   := part ("+" part)*       at most one admission, one eviction and one selection, in any order
    part     := name [":" argument ("," argument)*]
    argument := field "=" value | wrapper | wrapper "." field "=" value
    value    := a JSON number, true, false, null, list or quoted string, or bare text

`snapkv:ratio=0.25,adakv` is SnapKV within AdaKV. Of several wrappers the first is innermost. As a mapping, in Python or
YAML, it is `{"snapkv": {"ratio": 0.25, "adakv": {}}}`. An eviction's part also takes its budget, its trigger and its
guidance, and an admission's part takes the window. Both take `positions` (`Policy.positions`).
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvjax.checkpoints.fingerprint import MadeFor, model_name
from kvjax.checkpoints.folder import describe, is_exported
from kvjax.checkpoints.published import find_gates
from kvjax.errors import UserError, named_arguments, refuse_unknown, shown
from kvjax.mesh import use_mesh
from kvjax.plugins import METHODS, names
from kvjax.plugins import POLICIES as PLUGINS
from kvjax.policies.base import Eviction, Guided
from kvjax.policies.budget import BUDGETS, budget
from kvjax.policies.compiled import on_mesh
from kvjax.policies.guidance import token_ids
from kvjax.policies.policy import Policy
from kvjax.policies.registry import (
    EVICTIONS,
    POLICIES,
    WRAPPERS,
    arguments_of,
    find_from_package,
    find_method,
    is_method,
    is_open_ended,
    is_wrapper,
    role,
    trained,
)
from kvjax.policies.schedule import Schedule
from kvjax.policies.trigger import ARGUMENTS, Trigger
from kvjax.struct import changed

SCHEDULE = (*BUDGETS, "when", *ARGUMENTS, "guidance")
"""The arguments of every eviction's part."""
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
"""Numbers as people write them. JSON has neither `.2` nor `2.`."""
Described = dict[str, dict[str, Any]]
"""The arguments of each part, by the name of its method."""


@named_arguments()
def make_policy(
    policy: str | Mapping[str, Any] | Policy,
    *,
    model: Any = None,
    gates: Any = None,
    tokenizer: Any = None,
    force: bool = False,
) -> Policy:
    """Make the policy that a string or a mapping describes.

    `make_policy("snapkv:ratio=0.1,observed=16,adakv")` is
    `Policy(eviction=Adaptive(SnapKV(observed=16)), schedule=Schedule(Ratio(0.1)))`.

    Args:
        policy: methods joined by `+`, each with its arguments: `wgkv:tau=0.1+quest:ratio=0.5`; the same as a mapping,
            `{"wgkv": {"tau": 0.1}, "quest": {"ratio": 0.5}}`; or a policy, which is checked against the model.
        model: the model that the policy is for. Files made for another model are refused. Without it, the policy serves
            any model that its tables fit, and gates and patterns are checked against each model that it is used with.
        gates: the trained gates (or scorers, or head pattern) of the one method of the policy that takes them and has
            none in its arguments: a folder, a file of the method's authors, or the hub id of either.
        tokenizer: the model's tokenizer, for guidance that is text, and for methods that have the model read texts
            (kvzip) or keep what its chat template puts before a prompt (fast_kvzip).
        force: accept gates and patterns that were made for another model of the same shape.

    Raises:
        UserError: for an unknown method or argument (with the nearest known), a value that a method refuses, methods
            that cannot be combined, or files made for another model.
    """
    if model is not None and not hasattr(getattr(model, "config", None), "num_full_layers"):
        raise UserError(f"make_policy: model must be a model such as load_model gives, got {shown(model)}")
    gates = find_gates(gates, "" if model is None else model_name(model))
    with use_mesh(model):
        if isinstance(policy, Policy):
            if gates is not None:
                raise UserError(f"gates: got {shown(gates)} with a Policy object, expected None")
            made = policy
        else:
            parts = _parts(policy, gates)
            if not force:
                _check_files(parts, model)
            made = _composed(parts, model, tokenizer, force)
        made = _without_origin(made) if force else made
        if model is not None:
            made.compile(model)
        return made


def _without_origin(policy: Policy) -> Policy:
    """Return the policy without the names of the models that its files were made for."""
    parts = {"admission": policy.admission, "eviction": policy.eviction, "selection": policy.selection}
    from_files = {part: x for part, x in parts.items() if x is not None and x.made_for is not None}
    return changed(policy, **{part: changed(x, made_for=None) for part, x in from_files.items()})


def check_policy(
    policy: str | Mapping[str, Any] | Policy,
    config: Any = None,
    *,
    gates: Any = None,
    tokenizer: Any = None,
    force: bool = False,
) -> None:
    """Check a policy before weights are read. A policy with a method that needs a missing tokenizer, or one that
    another package makes from the model, is only parsed.

    Args:
        config: the model's `ModelConfig`, if it is known.

    Raises:
        UserError: as in `make_policy`.
    """
    if not isinstance(policy, Policy):
        parts = _parts(policy, gates)
        if any(part.takes("model") for part in parts.values()) or (
            tokenizer is None and _needs_tokenizer(parts)
        ):
            return
        policy = _composed(parts, None, tokenizer, force)
    if config is not None:
        policy.check(config)
        with use_mesh():
            on_mesh(policy, config.num_full_layers, config.num_kv_heads)


def takes_tokenizer(policy: str | Mapping[str, Any]) -> bool:
    """Return True if `make_policy` uses the tokenizer for this policy. Raises UserError for unknown methods and
    arguments."""
    return _needs_tokenizer(_parts(policy, None))


def parse_policy(text: str) -> Described:
    """Return the mapping that a policy string stands for. Raises UserError if it is not a policy string."""
    parts: Described = {}
    for part in _split(text, "+"):
        name, arguments = _name_and_arguments(part.strip())
        if name in parts:
            raise UserError(f"policy: got {name} twice, expected each method once")
        parts[name] = {} if arguments is None else _arguments(name, arguments)
    return parts


def format_policy(described: Described) -> str:
    """Return the policy string of a mapping."""
    parts = []
    for name, arguments in described.items():
        texts = []
        for argument, value in arguments.items():
            if not isinstance(value, Mapping):
                texts.append(f"{argument}={_written(value)}")
            else:
                texts += [f"{argument}.{x}={_written(y)}" for x, y in value.items()] or [argument]
        parts.append(f"{name}:{','.join(texts)}" if texts else name)
    return "+".join(parts)


def _written(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    bare = len(_split(value, ",")) == len(_split(value, "+")) == 1 and '"' not in value
    return (
        value if bare and value and value == value.strip() and _value(value) == value else json.dumps(value)
    )


def _split(text: str, separator: str) -> list[str]:
    """Split a text at separators outside lists and quoted strings; at a plus only before a letter."""
    parts, depth, quoted = [""], 0, False
    for index, letter in enumerate(text):
        quoted ^= letter == '"' and text[index - 1 : index] != "\\"
        depth += 0 if quoted else (letter in "[{") - (letter in "]}")
        joins = letter != "+" or text[index + 1 :].lstrip()[:1].isalpha()
        if letter == separator and joins and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _name_and_arguments(part: str) -> tuple[str, str | None]:
    """Split a part into its method's name and its arguments, which are None without a colon. The name of another
    package's method, `package.module:NAME`, has a colon, too."""
    name, colon, arguments = part.partition(":")
    path = re.fullmatch(r"([\w.]+:(\w+))(?::(.*))?", part, re.DOTALL)
    if path and path[2] not in WRAPPERS and name not in (*POLICIES, *names(PLUGINS), *names(METHODS)):
        return path[1], path[3]
    return name.strip(), arguments if colon else None


def _arguments(name: str, text: str) -> dict[str, Any]:
    """Return a part's arguments. A wrapper's own arguments are a mapping."""
    arguments: dict[str, Any] = {}
    for argument in _split(text, ","):
        left, equals, value = (piece.strip() for piece in argument.partition("="))
        wrapper, _, field = left.rpartition(".") if equals else ("", "", left)
        if not field or (equals and not value):
            raise UserError(f"{name}: got {argument!r}, expected field=value or a wrapper's name")
        target = arguments.setdefault(wrapper, {}) if wrapper else arguments
        if not isinstance(target, dict) or field in target:
            raise UserError(f"{name}: got {left} twice, expected each argument once")
        target[field] = _value(value) if equals else {}
    return arguments


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return float(text) if NUMBER.fullmatch(text) else text


@dataclasses.dataclass(frozen=True)
class _Part:
    """A method as the policy describes it, not yet made."""

    name: str
    kind: Callable[..., Any]
    """The method's class, or a function that makes a policy."""
    arguments: dict[str, Any]
    """The method's own arguments."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The policy's arguments in this part: those of `SCHEDULE`, or the window, and `positions`."""
    wrappers: tuple["_Part", ...] = ()
    """The wrappers, innermost first."""

    @property
    def guidance(self) -> Any:
        """The guidance of an eviction (token ids, a text or its name); None: there is none."""
        observers = self.options.get("observers", "own")
        observed = not (isinstance(observers, str) and observers == "own")
        if "guidance" in self.options and observed:
            raise UserError(f"{self.name}: got observers and guidance, expected one of them")
        return self.options.get(
            "guidance", None if observed else getattr(self.kind, "guidance", None) or None
        )

    def takes(self, name: str) -> bool:
        """Return True if the method has an argument of this name, including those that `make_policy` gives."""
        return name in inspect.signature(self.kind).parameters

    def build(self, *inner: Eviction, **given: Any) -> Any:
        """Make the method, a wrapper around `inner`, or another package's policy."""
        arguments = self.arguments | {
            name: x for name, x in given.items() if x is not None and self.takes(name)
        }
        required = [x.name for x in arguments_of(self.kind) if x.default is x.empty]
        if missing := [name for name in required if name not in arguments]:
            hint = "; gates=FOLDER, or gates=builtin for the built-in model" if "gates" in missing else ""
            raise UserError(f"{self.name} needs {', '.join(missing)}{hint}")
        method = self.kind(*inner, **arguments)
        if not is_method(self.kind) and not isinstance(method, Policy):
            raise UserError(f"policy {self.name}: got {shown(method)}, expected a Policy")
        return method


def _parts(policy: Any, gates: Any) -> dict[str, _Part]:
    """Return the parts of a policy by their roles."""
    described = parse_policy(policy) if isinstance(policy, str) else policy
    if not isinstance(described, Mapping) or not described:
        raise UserError(
            f"policy: got {shown(policy)}, expected a string such as snapkv:ratio=0.25, or a mapping"
        )
    parts: dict[str, _Part] = {}
    for name, arguments in described.items():
        part = _part(name, arguments)
        if other := parts.get(role(part.kind)):
            raise UserError(f"policy: got {other.name} and {name}, expected one {role(part.kind)}")
        parts[role(part.kind)] = part
    if gates is not None:
        able = [part for part in parts.values() if part.takes(trained(part.kind))]
        lacking = [part for part in able if trained(part.kind) not in part.arguments]
        if len(lacking) != 1:
            given = shown(str(gates) if isinstance(gates, Path) else gates)
            raise UserError(
                f"gates: got {given} for {'+'.join(described)}, expected one method that takes gates and has none in "
                "its arguments"
            )
        lacking[0].arguments[trained(lacking[0].kind)] = gates
    return parts


def _needs_tokenizer(parts: dict[str, _Part]) -> bool:
    """Return True if a method, or guidance that is a text, needs the tokenizer."""
    methods = [x for part in parts.values() for x in (part, *part.wrappers)]
    return any(isinstance(x.guidance, str) or x.takes("tokenizer") for x in methods)


def _part(name: Any, arguments: Any) -> _Part:
    kind = find_method(name) if isinstance(name, str) else None
    if kind is None:
        raise UserError(f"policy: got {shown(name)}, expected the name of a method")
    if is_wrapper(kind):
        raise UserError(f"{name} wraps an eviction: write it among its arguments, snapkv:{name}")
    evicts, options = role(kind) == "eviction", ()
    if evicts:
        options = (*SCHEDULE, "positions")
    elif is_method(kind) and role(kind) == "admission":
        options = ("positions",) if getattr(kind, "owns_window", False) else ("window", "positions")
    part = _Part(name, kind, {})
    known = list(
        dict.fromkeys([*(x.name for x in arguments_of(kind)), *options, *(WRAPPERS if evicts else ())])
    )
    for argument, value in _checked(name, arguments).items():
        if argument == "gates" and part.takes(trained(kind)):
            argument = trained(kind)
        if argument in part.arguments:
            raise UserError(f"{name}: got {argument} twice, expected each argument once")
        if argument in options:
            part.options[argument] = _given(name, argument, value)
        elif part.takes(argument) or is_open_ended(kind):
            part.arguments[argument] = _given(name, argument, value)
        elif (wrapper := WRAPPERS.get(argument) or find_from_package(argument)) and is_wrapper(wrapper):
            if not evicts:
                raise UserError(f"{argument} wraps an eviction, which {name} is not: write snapkv:{argument}")
            part = dataclasses.replace(part, wrappers=(*part.wrappers, _wrapper(argument, wrapper, value)))
        elif argument == "window":
            raise UserError(
                f"{name} has no argument 'window': it is the admission's, full:window={value}+{name}"
            )
        else:
            refuse_unknown(name, argument, known)
    if "guidance" in part.options and not (isinstance(kind, type) and issubclass(kind, Guided)):
        able = ", ".join(name for name, kind in EVICTIONS.items() if issubclass(kind, Guided))
        raise UserError(f"{name}: guidance is for methods that look back at the last tokens ({able})")
    return part


def _wrapper(name: str, kind: Any, arguments: Any) -> _Part:
    part = _Part(name, kind, {})
    for argument, value in _checked(name, arguments).items():
        if argument not in (known := [x.name for x in arguments_of(kind)]):
            refuse_unknown(name, argument, known)
        part.arguments[argument] = _given(name, argument, value)
    return part


def _checked(name: str, arguments: Any) -> Mapping[str, Any]:
    """Return a method's arguments by name. None and True stand for no arguments."""
    by_name = {} if arguments is None or arguments is True else arguments
    if not isinstance(by_name, Mapping):
        raise UserError(f"{name}: got {shown(arguments)}, expected a mapping of its arguments")
    return by_name


def _given(name: str, argument: str, value: Any) -> Any:
    """Return an argument's value. Raises UserError if it stands without a value, like a wrapper."""
    if isinstance(value, Mapping) and not value:
        raise UserError(f"{name}: got {argument} without a value, expected {argument}=VALUE")
    return value


def _check_files(parts: dict[str, _Part], model: Any) -> None:
    """Raise UserError for gates of another model in a part that another package makes. Methods check their own
    files."""
    for part in parts.values():
        gates = part.arguments.get("gates")
        if (
            not is_method(part.kind)
            and model is not None
            and isinstance(gates, str | Path)
            and is_exported(gates)
        ):
            made_for = MadeFor.described(describe(gates))
            if made_for is not None:
                made_for.check(part.name, model)


def _composed(parts: dict[str, _Part], model: Any, tokenizer: Any, force: bool) -> Policy:
    given = {"model": model, "tokenizer": tokenizer, "force": force or None}
    fields = {role: part.build(**given) for role, part in parts.items()}
    if "eviction" in parts:
        fields |= _eviction_fields(parts["eviction"], fields["eviction"], tokenizer)
    admission = parts.get("admission")
    fields |= {} if admission is None else admission.options
    base = fields.get("admission")
    if not isinstance(base, Policy):
        return Policy(**fields)
    # a policy that another package makes keeps that package's name for it
    others = {name: x for name, x in fields.items() if name != "admission"}
    labels = [base.name, *(others[role].label for role in ("eviction", "selection") if role in others)]
    return dataclasses.replace(base, **others, name="+".join(labels)) if others else base


def _eviction_fields(part: _Part, eviction: Eviction, tokenizer: Any) -> dict[str, Any]:
    """Return the eviction within its wrappers, and its schedule."""
    options, guidance = part.options, part.guidance
    trigger_options = {name: options[name] for name in ("when", *ARGUMENTS) if name in options}
    if guidance is not None:
        trigger_options["observers"] = token_ids(guidance, tokenizer)
        if "observed" not in part.arguments:
            assert isinstance(eviction, Guided)
            eviction = eviction.guided(len(trigger_options["observers"]))
    for wrapper in part.wrappers:
        eviction = wrapper.build(eviction, tokenizer=tokenizer)
    amount = budget(**{name: options[name] for name in BUDGETS if name in options})
    usual = eviction.usual_trigger
    is_usual = trigger_options.get("when", usual.when) == usual.when
    trigger = dataclasses.replace(usual, **trigger_options) if is_usual else Trigger(**trigger_options)
    fields = {"eviction": eviction, "schedule": None if amount is None else Schedule(amount, trigger)}
    return fields | {name: x for name, x in options.items() if name == "positions"}
