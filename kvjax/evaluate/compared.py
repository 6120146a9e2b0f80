"""The policies that are compared: policy strings, and what an evaluation fills in where they say nothing.

A policy without a budget gets each budget of the evaluation, one with its own is measured once as it is. Gates, chunks
and how many last tokens SnapKV looks at come of the evaluation's options. `calibrated` among the arguments of
streaming_llm, head_pattern or wgkv has it fitted on calibration contexts for each budget (`kvjax.evaluate.calibrated`).
"""

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from kvjax.checkpoints.folder import describe
from kvjax.checkpoints.torch_file import TorchFile, is_torch_file
from kvjax.errors import UserError
from kvjax.evaluate.calibrated import SINKS, narrowest, sink_and_window, whole_heads
from kvjax.models.decoder import Decoder
from kvjax.policies import (
    WGKV,
    FastKVzip,
    HeadPattern,
    Policy,
    Quest,
    RandomEviction,
    SnapKV,
    StreamingLLM,
    make_policy,
)
from kvjax.policies.admission.kvpop import KVPOP
from kvjax.policies.admission.pattern_folder import PatternFolder, read_pattern
from kvjax.policies.admission.wgkv import files as wgkv
from kvjax.policies.budget import BUDGETS
from kvjax.policies.eviction.fast_kvzip import files as fast_kvzip
from kvjax.policies.make import Described, format_policy, parse_policy, takes_tokenizer
from kvjax.policies.numbers import head_table
from kvjax.policies.registry import find_method, is_method, role, trained
from kvjax.policies.trigger import WHILE_DECODING

CALIBRATED = "calibrated"
LEARNED = "prulong", "duo_attention"
"""Recipes whose exports are head patterns."""
FITTED = {
    StreamingLLM: ("sink", "window"),
    HeadPattern: ("pattern", "sparsity", "sink", "window"),
    WGKV: ("tau",),
}
"""Admissions that can be calibrated, and the arguments that are then chosen."""


@dataclass(frozen=True)
class Sizing:
    """What a policy is made for."""

    model: Decoder
    """On its mesh."""
    ratio: float
    """The budget: the share of the entries that it keeps, or reads."""
    tokens: int
    """Tokens of a context, about."""
    shortest: int
    """Tokens of the shortest context."""
    chunk: int
    """Tokens of a chunk."""
    observed: int
    """Last tokens that SnapKV looks back at."""
    gates: str | None = None
    """A folder or a file."""
    seed: int = 0
    """Seed of what is random."""
    force: bool = False
    """Take gates that were made for another model."""
    tokenizer: Callable[[], Any] = lambda: None
    """Loads the model's."""

    @property
    def entries(self) -> float:
        """The budget in entries of each kv head."""
        return self.ratio * self.tokens

    @property
    def shape(self) -> tuple[int, int]:
        """Layers × kv heads."""
        return self.model.config.num_layers, self.model.config.num_kv_heads


@dataclass(frozen=True)
class Compared:
    """A policy that is compared."""

    label: str
    """How results call it."""
    described: Described
    """Its methods and their arguments."""
    calibrated: bool = False
    """Whether it is fitted on calibration contexts."""

    @property
    def text(self) -> str:
        """The policy string."""
        return format_policy(
            self.described | ({self._only: self._own | {CALIBRATED: {}}} if self.calibrated else {})
        )

    @property
    def _only(self) -> str:
        return next(iter(self.described))

    @property
    def _own(self) -> dict[str, Any]:
        return self.described[self._only]

    @functools.cached_property
    def kinds(self) -> dict[str, Any]:
        """The methods' classes by their names."""
        return {name: find_method(name) for name in self.described}

    @property
    def roles(self) -> set[str]:
        """Of its methods."""
        return {role(kind) for kind in self.kinds.values()}

    @property
    def takes_gates(self) -> str | None:
        """The method that has gates to be given; None: there is none."""
        for name, kind in self.kinds.items():
            takes, told = trained(kind) in inspect.signature(kind).parameters, self.described[name]
            if (
                takes
                and not {"gates", trained(kind)} & told.keys()
                and not (kind is HeadPattern and self.calibrated)
            ):
                return name
        return None

    @property
    def own_gates(self) -> dict[str, str]:
        """The folders and files of gates that its string names, and the methods that they are of."""
        return {
            value: name
            for name, told in self.described.items()
            for argument, value in told.items()
            if argument in ("gates", trained(self.kinds[name])) and isinstance(value, str)
        }

    @property
    def takes_budget(self) -> bool:
        """Whether budgets change it."""
        return self.calibrated or any(
            budget_argument(kind, self.described[name], self.roles) is not None
            for name, kind in self.kinds.items()
        )

    @property
    def searched(self) -> bool:
        """Whether its τ is searched for on calibration contexts."""
        return self.calibrated and WGKV in self.kinds.values()

    @property
    def chooses_heads(self) -> bool:
        """Whether its sinks, windows and whole heads are chosen on calibration contexts."""
        return self.calibrated and not self.searched

    @property
    def orders_heads(self) -> bool:
        """Whether the order of the heads is, too."""
        return self.calibrated and HeadPattern in self.kinds.values()

    @property
    def own_tau(self) -> bool:
        """Whether it is compared with all WG-KV gates of the evaluation, each at its own τ."""
        return self.takes_gates is not None and [*self.kinds.values()] == [WGKV] and not self.calibrated

    @property
    def over_gates(self) -> bool:
        """Whether it evicts from, or reads a part of, what WG-KV's gates let in."""
        return WGKV in self.kinds.values() and len(self.kinds) > 1

    @property
    def decodes(self) -> bool:
        """Whether it evicts while it answers."""
        return any(told.get("when") in WHILE_DECODING for told in self.described.values())

    @property
    def on_contexts(self) -> bool:
        """Whether it can be measured on contexts that are read and then asked about."""
        return not self.decodes

    @property
    def on_contests(self) -> bool:
        """Whether it keeps the budget while it answers."""
        heads = any(isinstance(kind, type) and issubclass(kind, HeadPattern) for kind in self.kinds.values())
        streams = StreamingLLM in self.kinds.values()
        fitted = self.calibrated and not streams
        return self.decodes or (self.roles == {"admission"} and not fitted and (streams or not heads))


def compared_of(text: str) -> Compared:
    """Return the policy that `--policies` names: a policy string, or a mapping of a label to one as JSON.

    Raises:
        UserError: it is none, or `calibrated` means nothing there.
    """
    label, policy = text, text
    try:
        if text.startswith("{"):
            ((label, policy),) = json.loads(text).items()
        described = (
            parse_policy(policy) if isinstance(policy, str) else {x: dict(y or {}) for x, y in policy.items()}
        )
        fitted = [name for name, told in described.items() if CALIBRATED in told]
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


def budget_argument(kind: Any, told: dict[str, Any], roles: set[str]) -> str | None:
    """Return the argument by which a method gets a budget; None: it has its own, or takes none."""
    if not is_method(kind):
        takes = [x for x in ("ratio", "entries") if x in inspect.signature(kind).parameters]
        return next((x for x in takes if not {"ratio", "entries"} & told.keys()), None)
    if role(kind) == "eviction":
        return None if told.keys() & BUDGETS else "entries" if told.get("when") in WHILE_DECODING else "ratio"
    if kind is Quest:
        return None if {"tokens", "ratio"} & told.keys() or "eviction" in roles else "ratio"
    own = {
        KVPOP: ("max_entries", "max_entries"),
        StreamingLLM: ("window", "window"),
        HeadPattern: ("sparsity", "sparsity"),
    }
    given, argument = own.get(kind, ("", None))
    return None if given in told else argument


def policy_of(one: Compared, sizing: Sizing) -> Policy:
    """Return the policy of a budget. A calibrated one is then fitted; it is the plainest of its kind here."""
    if one.calibrated:
        return _plainest(one, sizing)
    told = {name: dict(arguments) for name, arguments in one.described.items()}
    window = sizing.observed
    for name in sorted(told, key=lambda name: role(one.kinds[name])):  # admissions first
        kind, own = one.kinds[name], told[name]
        if one.takes_gates == name and sizing.gates is not None:
            own[trained(kind)] = sizing.gates
        argument = budget_argument(kind, own, one.roles)
        if kind is StreamingLLM and argument:
            sink = int(own.setdefault("sink", SINKS[0]))
            _check_holds(sizing.entries, sink, f"{sink} sinks")
            own["window"] = sink_and_window(sizing.shape, entries=sizing.entries, sink=sink).window
        elif kind is HeadPattern and argument:
            own |= _learned_heads(own, sizing)
        elif argument:
            own[argument] = sizing.ratio if argument == "ratio" else round(sizing.entries)
        if role(kind) == "eviction":
            if own.get("when", "chunk" if kind is FastKVzip else "prompt") == "chunk":
                own.setdefault("chunk", sizing.chunk)
            if kind is SnapKV and "guidance" not in own:
                own.setdefault("observed", window)
            if kind is RandomEviction:
                own.setdefault("seed", sizing.seed)
        elif role(kind) == "admission" and is_method(kind) and len(told) > 1:
            alone = make_policy({name: own}, model=sizing.model, force=sizing.force)
            # what SnapKV looks back at must still be in the window
            window = window if alone.stores_all else min(window, alone.window)
    tokenizer = sizing.tokenizer() if takes_tokenizer(told) else None
    return make_policy(told, model=sizing.model, tokenizer=tokenizer, force=sizing.force)


def _learned_heads(own: dict[str, Any], sizing: Sizing) -> dict[str, Any]:
    """Return a head pattern's arguments at a budget: as many whole heads in its order as leave the others its sinks and
    its window, which is then widened."""
    folder = own.pop("gates", own.get("pattern"))
    if not isinstance(folder, str | Path):
        raise UserError(
            "head_pattern without a sparsity: got no gates to order heads by; calibrated measures an order"
        )
    learned = ranked(str(folder), read_pattern(folder))
    _check_holds(sizing.entries, learned.sink, f"{learned.sink} sinks")
    weights = head_table("head_pattern", "pattern", learned.weights, *sizing.shape, shares=False)
    sizes = {
        "entries": sizing.entries,
        "context": sizing.tokens,
        "window": learned.recent,
        "sink": learned.sink,
    }
    found = whole_heads(weights, **sizes)
    return {"pattern": found.whole.astype(float), "sink": found.sink, "window": found.window}


def ranked(where: str, pattern: PatternFolder) -> PatternFolder:
    """Return a pattern that has an order of the heads for any budget. Raises UserError for one of 0 and 1 alone."""
    if np.isin(pattern.weights, (0, 1)).all():
        raise UserError(
            f"{where}: a pattern of 0 and 1 has no order of its heads for --budgets; as it is it is "
            f"head_pattern:sparsity={1 - pattern.weights.mean():g}"
        )
    return pattern


def _plainest(one: Compared, sizing: Sizing) -> Policy:
    kind = one.kinds[one._only]
    if kind is WGKV:
        policy = make_policy(one.described, model=sizing.model, gates=sizing.gates, force=sizing.force)
        _check_holds(sizing.entries, policy.window, f"its window of {policy.window}")
        return policy
    _check_holds(sizing.entries, SINKS[0], f"{SINKS[0]} sinks")
    if kind is StreamingLLM:
        return sink_and_window(sizing.shape, entries=sizing.entries, sink=SINKS[0]).policy(sizing.model)
    orders, window = known_orders(sizing)
    weights = next(iter(orders.values()), np.zeros(sizing.shape))
    sizes = {"entries": sizing.entries, "context": sizing.tokens, "window": window, "sink": SINKS[0]}
    return whole_heads(weights, **sizes).policy(sizing.model)


def known_orders(sizing: Sizing) -> tuple[dict[str, Float[np.ndarray, "l k"]], int]:
    """Return what heads are worth as far as it need not be measured, by the orders' names, and the smallest window of
    streaming heads: the gates', if there are any."""
    orders, window = {}, narrowest(sizing.tokens)
    if sizing.gates is not None:
        said = described(sizing.gates)
        window = int(said.get("window", window))
        if "rate" in said:
            orders["the gates' rates"] = head_table("--gates", "rate", said["rate"], *sizing.shape)
    return orders, window


def _check_holds(entries: float, least: int, what: str) -> None:
    if entries < least:
        raise UserError(f"a budget of {entries:.1f} entries of each kv head does not hold {what}")


def budget_policy(one: Compared, sizing: Sizing) -> Policy:
    """Return the policy, once it is sure that it can keep so much of such a context.

    Raises UserError naming it and the budget.
    """
    try:
        policy = policy_of(one, sizing)
        if policy.schedule is not None:
            _check_holds(sizing.ratio * sizing.shortest, policy.window - 1, f"its window of {policy.window}")
            # budgets are no bytes here
            policy.schedule.check_bound(policy.name, policy.window - 1, entry_bytes=1)
    except UserError as error:
        raise UserError(f"{one.label} at {sizing.ratio:g} of {sizing.tokens} tokens: {error}") from None
    return policy


def described(gates: str | Path) -> dict[str, Any]:
    """Return what a folder's config.json says of its gates; of a file of the authors', by whose layout the method is
    known, what is in the file. Raises UserError for what are no gates."""
    if not is_torch_file(gates):
        return describe(gates)
    with TorchFile(gates) as opened:
        layered = isinstance(opened.content, dict) and "module" in opened.content
    if layered:
        return {"method": fast_kvzip.METHOD} | fast_kvzip.gate_sizes(gates)._asdict()
    return {"method": "wgkv"} | wgkv.gate_sizes(gates)._asdict() | wgkv.PUBLISHED


def of_method(folders: Sequence[str], method: str) -> tuple[str, ...]:
    """Return those of the folders (or files) whose gates are of a method."""
    return tuple(folder for folder in folders if described(folder).get("method") == method)


def by_lambda(folders: Sequence[str]) -> dict[float, str]:
    """Return the folders by the λ that they were trained with.

    Raises UserError for a folder that does not say its λ, and for two of one λ.
    """
    found: dict[float, str] = {}
    for folder in folders:
        said = described(folder).get("lambda")
        if not isinstance(said, int | float):
            raise UserError(f"--gates {folder}: nothing there says with which lambda they were trained")
        name = float(said)
        if name in found:
            raise UserError(
                f"--gates {found[name]} and {folder} have both λ {name:g}, by which wgkv tells gates apart"
            )
        found[name] = folder
    return found


def most_selective(folders: Sequence[str], ratio: float, tokens: int) -> str:
    """Return the gates for a method that keeps, or reads, `ratio` of the entries out of what gates let in.

    Of those that let in as much of contexts of `tokens` tokens, by the rates that they were exported with, the most
    selective; if none does, those that let in most. Gates that do not say their rates count as letting in everything.
    """

    def size(folder: str) -> float:
        said = described(folder)
        window, rate = int(said["window"]), float(np.mean(said.get("rate", 1.0)))
        return (window + rate * max(0, tokens - window)) / max(window, tokens)

    sizes = {folder: size(folder) for folder in folders}
    enough = {folder: own for folder, own in sizes.items() if own >= ratio}
    return min(enough, key=enough.__getitem__) if enough else max(sizes, key=sizes.__getitem__)
