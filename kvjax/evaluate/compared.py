"""The policies that are compared, as `--policies` names them.

A policy without a budget is measured at each budget of the evaluation. A policy with its own budget is measured once.
The argument `calibrated` of streaming_llm, head_pattern or wgkv fits the policy on calibration contexts for each budget
(`kvjax.evaluate.calibrated`).
"""

import functools
import inspect
import json
from dataclasses import dataclass
from typing import Any

from kvjax.errors import UserError
from kvjax.evaluate.config import EvaluateConfig
from kvjax.policies import WGKV, HeadPattern, Quest, StreamingLLM
from kvjax.policies.admission.kvpop import KVPOP
from kvjax.policies.budget import BUDGETS
from kvjax.policies.make import Described, format_policy, parse_policy, takes_tokenizer
from kvjax.policies.registry import find_method, is_method, role, trained
from kvjax.policies.trigger import WHILE_DECODING
from kvjax.tasks.registry import suite_of

CALIBRATED = "calibrated"
FITTED = {
    StreamingLLM: ("sink", "window"),
    HeadPattern: ("pattern", "sparsity", "sink", "window"),
    WGKV: ("tau",),
}
"""Admissions that can be calibrated, with the arguments that calibration chooses."""


@dataclass(frozen=True)
class Compared:
    """A policy to compare."""

    label: str
    """The policy's name in results."""
    described: Described
    """Its methods and their arguments."""
    calibrated: bool = False
    """True if it is fitted on calibration contexts."""

    @property
    def text(self) -> str:
        """The policy string."""
        fitted: dict[str, Any] = {CALIBRATED: {}} if self.calibrated else {}
        return format_policy({name: arguments | fitted for name, arguments in self.described.items()})

    @functools.cached_property
    def methods(self) -> dict[str, Any]:
        """The methods' classes (or functions) by name."""
        return {name: find_method(name) for name in self.described}

    @property
    def roles(self) -> set[str]:
        """The roles of its methods."""
        return {role(method) for method in self.methods.values()}

    @property
    def gated_method(self) -> str | None:
        """The name of the method that takes gates from --gates; None if there is none."""
        for name, method in self.methods.items():
            takes = trained(method) in inspect.signature(method).parameters
            if (
                takes
                and not {"gates", trained(method)} & self.described[name].keys()
                and not (method is HeadPattern and self.calibrated)
            ):
                return name
        return None

    @property
    def named_gates(self) -> dict[str, str]:
        """The folders and files of gates in the policy string, each with the name of the method that uses it."""
        return {
            value: name
            for name, arguments in self.described.items()
            for argument, value in arguments.items()
            if argument in ("gates", trained(self.methods[name])) and isinstance(value, str)
        }

    @property
    def takes_budget(self) -> bool:
        """True if it is measured at each budget of the evaluation."""
        return self.calibrated or any(
            budget_argument(method, self.described[name], self.roles) is not None
            for name, method in self.methods.items()
        )

    @property
    def searches_tau(self) -> bool:
        """True if calibration searches for its τ."""
        return self.calibrated and WGKV in self.methods.values()

    @property
    def chooses_heads(self) -> bool:
        """True if calibration chooses its sinks, windows and whole heads."""
        return self.calibrated and not self.searches_tau

    @property
    def orders_heads(self) -> bool:
        """True if calibration also chooses the order of its heads."""
        return self.calibrated and HeadPattern in self.methods.values()

    @property
    def at_exported_tau(self) -> bool:
        """True if it is measured with each set of WG-KV gates in --gates, at their exported τ."""
        return self.gated_method is not None and [*self.methods.values()] == [WGKV] and not self.calibrated

    @property
    def combines_gates(self) -> bool:
        """True if another method evicts or selects among the entries that WG-KV's gates admit."""
        return WGKV in self.methods.values() and len(self.methods) > 1

    @property
    def evicts_while_decoding(self) -> bool:
        """True if it evicts while decoding."""
        return any(arguments.get("when") in WHILE_DECODING for arguments in self.described.values())

    @property
    def runs_on_contests(self) -> bool:
        """True if contests can measure it: it evicts while decoding, or it only has an admission that is neither a head
        pattern nor a calibrated wgkv."""
        if self.evicts_while_decoding:
            return True
        if self.roles != {"admission"}:
            return False
        if StreamingLLM in self.methods.values():
            return True
        patterns = (
            isinstance(method, type) and issubclass(method, HeadPattern) for method in self.methods.values()
        )
        return not self.calibrated and not any(patterns)


def parse_compared(text: str) -> Compared:
    """Return the policy for one value of `--policies`: a policy string, or a JSON object with a label and a policy.

    Raises:
        UserError: the policy is invalid, or `calibrated` does not apply to it.
    """
    label, policy = text, text
    try:
        if text.startswith("{"):
            labelled = json.loads(text)
            if len(labelled) != 1:
                raise UserError(
                    f"expected one label and its policy, got {len(labelled)}: give each its own object"
                )
            ((label, policy),) = labelled.items()
        described = (
            parse_policy(policy) if isinstance(policy, str) else {x: dict(y or {}) for x, y in policy.items()}
        )
        fitted = [name for name, arguments in described.items() if CALIBRATED in arguments]
        for name in fitted:
            del described[name][CALIBRATED]
        takes_tokenizer(described)
        for name in fitted:
            chosen = FITTED.get(find_method(name))
            if chosen is None or len(described) > 1:
                raise UserError(
                    f"got {CALIBRATED} in {'+'.join(described)}, expected it in streaming_llm, head_pattern or wgkv, "
                    "alone"
                )
            if conflicts := [x for x in described[name] if x in chosen or find_method(name) is not WGKV]:
                raise UserError(f"got {conflicts[0]} with {CALIBRATED}, which chooses it")
    except (UserError, ValueError, AttributeError) as error:
        raise UserError(f"--policies {text}: {error}") from None
    return Compared(label, described, bool(fitted))


def budget_argument(method: Any, given: dict[str, Any], roles: set[str]) -> str | None:
    """Return the argument that sets a method's budget; None if `given` sets a budget or the method takes none."""
    if not is_method(method):
        takes = [x for x in ("ratio", "entries") if x in inspect.signature(method).parameters]
        return next((x for x in takes if not {"ratio", "entries"} & given.keys()), None)
    if role(method) == "eviction":
        usual = "entries" if given.get("when") in WHILE_DECODING else "ratio"
        return None if given.keys() & BUDGETS else usual
    if method is Quest:
        return None if {"tokens", "ratio"} & given.keys() or "eviction" in roles else "ratio"
    argument = {KVPOP: "max_entries", StreamingLLM: "window", HeadPattern: "sparsity"}.get(method)
    return None if argument in given else argument


def compared_policies(config: EvaluateConfig) -> list[Compared]:
    """Return the policies to compare. Raises UserError for an invalid policy or a repeated label."""
    policies = [parse_compared(text) for text in config.policies]
    labels = [policy.label for policy in policies]
    if repeated := [label for index, label in enumerate(labels) if label in labels[:index]]:
        raise UserError(f"--policies names {repeated[0]} twice")
    return policies


def has_contests(config: EvaluateConfig) -> bool:
    """Return True if the tasks are contests.

    Raises UserError for an unknown task, and for contests together with other tasks or with --question-aware.
    """
    contests = [task for task in config.tasks if suite_of(task).is_contest]
    others = [task for task in config.tasks if task not in contests]
    if not contests:
        return False
    if others:
        raise UserError(
            f"--tasks: contests and other tasks need separate --out folders, got {contests[0]} and {others[0]}"
        )
    if config.question_aware:
        raise UserError(
            f"--question-aware is for tasks with a context and questions, got the contest {contests[0]}"
        )
    return True
