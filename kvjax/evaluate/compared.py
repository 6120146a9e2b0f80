"""The policies that are compared, as `--policies` names them.

A policy without a budget is measured at each budget of the evaluation, one with its own is measured once. The argument
`calibrated` of streaming_llm, head_pattern or wgkv has the policy fitted on calibration contexts for each budget
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
    """A policy that is compared."""

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
    def kinds(self) -> dict[str, Any]:
        """The methods' classes by their names."""
        return {name: find_method(name) for name in self.described}

    @property
    def roles(self) -> set[str]:
        """The roles of its methods."""
        return {role(kind) for kind in self.kinds.values()}

    @property
    def takes_gates(self) -> str | None:
        """The name of the method that takes gates from --gates; None if there is none."""
        for name, kind in self.kinds.items():
            takes = trained(kind) in inspect.signature(kind).parameters
            if (
                takes
                and not {"gates", trained(kind)} & self.described[name].keys()
                and not (kind is HeadPattern and self.calibrated)
            ):
                return name
        return None

    @property
    def own_gates(self) -> dict[str, str]:
        """The folders and files of gates that its string names, each with the name of its method."""
        return {
            value: name
            for name, arguments in self.described.items()
            for argument, value in arguments.items()
            if argument in ("gates", trained(self.kinds[name])) and isinstance(value, str)
        }

    @property
    def takes_budget(self) -> bool:
        """True if it is measured at each budget of the evaluation."""
        return self.calibrated or any(
            budget_argument(kind, self.described[name], self.roles) is not None
            for name, kind in self.kinds.items()
        )

    @property
    def searched(self) -> bool:
        """True if its τ is searched for on calibration contexts."""
        return self.calibrated and WGKV in self.kinds.values()

    @property
    def chooses_heads(self) -> bool:
        """True if its sinks, windows and whole heads are chosen on calibration contexts."""
        return self.calibrated and not self.searched

    @property
    def orders_heads(self) -> bool:
        """True if the order of its heads is chosen on calibration contexts, too."""
        return self.calibrated and HeadPattern in self.kinds.values()

    @property
    def own_tau(self) -> bool:
        """True if it is measured with each of the evaluation's WG-KV gates, at their own τ."""
        return self.takes_gates is not None and [*self.kinds.values()] == [WGKV] and not self.calibrated

    @property
    def over_gates(self) -> bool:
        """True if it evicts from the entries that WG-KV's gates admit, or reads a part of them."""
        return WGKV in self.kinds.values() and len(self.kinds) > 1

    @property
    def decodes(self) -> bool:
        """True if it evicts while decoding."""
        return any(arguments.get("when") in WHILE_DECODING for arguments in self.described.values())

    @property
    def on_contests(self) -> bool:
        """True if contests can measure it: it evicts while decoding, or it only has an admission that is neither a head
        pattern nor a calibrated wgkv."""
        heads = any(isinstance(kind, type) and issubclass(kind, HeadPattern) for kind in self.kinds.values())
        streams = StreamingLLM in self.kinds.values()
        fitted = self.calibrated and not streams
        return self.decodes or (self.roles == {"admission"} and not fitted and (streams or not heads))


def compared_of(text: str) -> Compared:
    """Return the policy that `--policies` names: a policy string, or a mapping of a label to one as JSON.

    Raises:
        UserError: the policy is invalid, or `calibrated` does not apply to it.
    """
    label, policy = text, text
    try:
        if text.startswith("{"):
            ((label, policy),) = json.loads(text).items()
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
            if twice := [x for x in described[name] if x in chosen or find_method(name) is not WGKV]:
                raise UserError(f"got {twice[0]} with {CALIBRATED}, which chooses it")
    except (UserError, ValueError, AttributeError) as error:
        raise UserError(f"--policies {text}: {error}") from None
    return Compared(label, described, bool(fitted))


def budget_argument(kind: Any, given: dict[str, Any], roles: set[str]) -> str | None:
    """Return the argument by which a method gets a budget; None if it has its own or takes none."""
    if not is_method(kind):
        takes = [x for x in ("ratio", "entries") if x in inspect.signature(kind).parameters]
        return next((x for x in takes if not {"ratio", "entries"} & given.keys()), None)
    if role(kind) == "eviction":
        usual = "entries" if given.get("when") in WHILE_DECODING else "ratio"
        return None if given.keys() & BUDGETS else usual
    if kind is Quest:
        return None if {"tokens", "ratio"} & given.keys() or "eviction" in roles else "ratio"
    argument = {KVPOP: "max_entries", StreamingLLM: "window", HeadPattern: "sparsity"}.get(kind)
    return None if argument in given else argument


def compared(config: EvaluateConfig) -> list[Compared]:
    """Return the policies that are compared. Raises UserError for an invalid policy or a repeated label."""
    found = [compared_of(text) for text in config.policies]
    labels = [one.label for one in found]
    if twice := [label for at, label in enumerate(labels) if label in labels[:at]]:
        raise UserError(f"--policies names {twice[0]} twice")
    return found


def answers_contests(config: EvaluateConfig) -> bool:
    """Return True if the tasks are contests.

    Raises UserError for an unknown task, and for contests together with other tasks or with --question-aware.
    """
    contests = [task for task in config.tasks if suite_of(task).drawn]
    others = [task for task in config.tasks if task not in contests]
    if not contests:
        return False
    if others:
        raise UserError(
            f"--tasks {contests[0]} is answered at length and {others[0]} is asked about a context: evaluate them in "
            "folders of their own"
        )
    if config.question_aware:
        raise UserError(f"--question-aware is for questions about a context, which {contests[0]} has none of")
    return True
