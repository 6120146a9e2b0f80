"""The methods that are compared, by name: how each is made for a budget. One line adds one."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from kvjax.errors import UserError, nearest
from kvjax.evaluate.config import FIXED_TAU
from kvjax.evaluate.gates import described
from kvjax.evaluate.static_heads import SINKS, Choice, Rivals, narrowest, sink_and_window, whole_heads
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.pattern_folder import PatternFolder, read_pattern
from kvjax.policies.make import parse_policy, takes_tokenizer
from kvjax.policies.numbers import head_table
from kvjax.policies.registry import POLICIES, WRAPPERS, find_from_package, role

UNTRAINED = {"KeyDiff": "keydiff", "H2O": "h2o", "Expected Attention": "expected_attention"}
"""The evictions that do best on the built-in model without training, as training's report calls them."""


@dataclass(frozen=True)
class Sizing:
    """What a policy is made for."""

    model: Decoder
    """On its mesh."""
    ratio: float
    """Of the entries that it keeps, or reads."""
    tokens: int
    """Of a context, about."""
    shortest: int
    """Tokens of the shortest context."""
    chunk: int
    """Tokens of a chunk."""
    observed: int
    """Last tokens that observers look back at."""
    gates: str | Path | None = None
    """A folder."""
    patterns: tuple[Path, ...] = ()
    """Folders with orders of heads."""
    seed: int = 0
    """Of what is random."""
    force: bool = False
    """Take gates that were made for another model."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the policy, in place of those that it is given here."""
    tokenizer: Callable[[], Any] = lambda: None
    """What loads the model's, for methods that have it read texts."""

    @property
    def entries(self) -> float:
        return self.ratio * self.tokens

    @property
    def shape(self) -> tuple[int, int]:
        """Layers × kv heads."""
        return self.model.config.num_layers, self.model.config.num_kv_heads


@dataclass(frozen=True)
class Contender:
    """A way to make a policy for a budget, and how it is measured."""

    make: Callable[[Sizing], Policy]
    """The policy of a budget."""
    one_size: bool = False
    """It has one size, whatever the budget."""
    reads: str = ""
    """Contexts are read the same way at every budget and by all that have this word (and the same gates), so they are
    read once for all of them."""
    calibrated: bool = False
    """Its size follows from τ, which is searched for."""
    own_tau: bool = False
    """It has a cell for each folder of gates, at their own τ, and its budget is λ."""
    over_gates: Literal["", "eviction", "selection"] = ""
    """What it is of what gates let in, which are those of `gates.most_selective`."""
    gates: str | None = "wgkv"
    """The method whose gates it takes of those that are named; None: of its own name, or any."""
    method: str = ""
    """The method whose arguments may follow its name; none: it takes none."""
    choose: Callable[[Rivals, float], Choice] | None = None
    """The best of its kind on calibration contexts, for so many entries; `make` then gives any of them. For contests,
    which have none, it is the one of `make`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Those of its policy that followed its name."""
    taken: Mapping[str, str] = field(default_factory=dict)
    """Arguments that the evaluation gives it, beside `OWN_WORDS`, and what they come of."""
    on: Literal["contexts", "contests", "both"] = "contexts"
    """What it is measured on: contexts that are read and then asked about, or contests, whose cache grows with the
    answer and keeps the budget all along."""

    @property
    def needs_gates(self) -> bool:
        return self.gates in (self.method, *LEARNED) or bool(self.over_gates)


def _full(sizing: Sizing) -> Policy:
    return make_policy("full", model=sizing.model)


def _streaming(sizing: Sizing) -> Policy:
    _check_holds(sizing.entries, SINKS[0], f"{SINKS[0]} sinks")
    return sink_and_window(sizing.shape, entries=sizing.entries, sink=SINKS[0]).policy(
        sizing.model, **sizing.arguments
    )


def _head_pattern(sizing: Sizing) -> Policy:
    _check_holds(sizing.entries, SINKS[0], f"{SINKS[0]} sinks")
    orders, window = known_orders(sizing)
    weights = next(iter(orders.values()), np.zeros(sizing.shape))
    sizes = {"entries": sizing.entries, "context": sizing.tokens, "window": window, "sink": SINKS[0]}
    return whole_heads(weights, **sizes).policy(sizing.model, **sizing.arguments)


def _told_pattern(sizing: Sizing) -> Policy:
    if (count := len(sizing.patterns)) != 1:
        raise UserError(
            f"head_pattern with a sparsity is a pattern as it is: --pattern must name one folder, got {count}"
        )
    return _policy("head_pattern", sizing, pattern=sizing.patterns[0])


def _learned_heads(sizing: Sizing) -> Policy:
    assert sizing.gates is not None  # the command line is refused without
    learned = ranked(f"--gates {sizing.gates}", read_pattern(sizing.gates))
    _check_holds(sizing.entries, learned.sink, f"{learned.sink} sinks")
    sizes = {
        "entries": sizing.entries,
        "context": sizing.tokens,
        "window": learned.recent,
        "sink": learned.sink,
    }
    weights = head_table("--gates", "its table", learned.weights, *sizing.shape, shares=False)
    return whole_heads(weights, **sizes).policy(sizing.model, **sizing.arguments)


def ranked(where: str, pattern: PatternFolder) -> PatternFolder:
    """A pattern that has an order of the heads for any budget. Raises UserError for one of 0 and 1 alone."""
    if np.isin(pattern.weights, (0, 1)).all():
        raise UserError(
            f"{where}: a pattern of 0 and 1 has no order of its heads for --budgets; as it is it is "
            f"head_pattern:sparsity={1 - pattern.weights.mean():g} with --pattern"
        )
    return pattern


def known_orders(sizing: Sizing) -> tuple[dict[str, Float[np.ndarray, "l k"]], int]:
    """What heads are worth as far as it need not be measured, by the orders' names, and the smallest window of
    streaming heads: the gates', if there are any."""
    orders, window = {}, narrowest(sizing.tokens)
    for folder in sizing.patterns:
        weights = ranked(f"--pattern {folder}", read_pattern(folder)).weights
        orders[str(folder)] = head_table("--pattern", "its table", weights, *sizing.shape, shares=False)
    if sizing.gates is not None:
        said = described(sizing.gates)
        window = int(said.get("window", window))
        if "rate" in said:
            orders["the gates' rates"] = head_table("--gates", "rate", said["rate"], *sizing.shape)
    return orders, window


GATED = "gates"
"""What reads alike with the same gates: methods over what gates let in."""


EVERY = 128
"""Tokens between two compactions while an answer is written, as of R-KV and Fast KVzip."""


def _eviction(
    name: str, when: str = "prompt", observers: str = "own", *, constant: bool = False
) -> Contender:
    """An eviction once the prompt was read, or after every chunk of it, looked at by its own end or by the prompt's; or
    at its end and whenever a sequence has a multiple of `EVERY` tokens. What stays is the budget's share of what was
    read so far, or, `constant`, of a whole context."""
    decoding = when == "position"

    def make(sizing: Sizing) -> Policy:
        told: dict[str, Any] = {"when": when, "observers": observers}
        told |= {"entries": round(sizing.entries)} if constant or decoding else {"ratio": sizing.ratio}
        if decoding:
            told["every"] = EVERY
        if when == "chunk":
            told["chunk"] = sizing.chunk
        if name == "snapkv" or name in WRAPPERS:
            told["observed"] = sizing.observed
        return _policy(name, sizing, **told)

    reads, on = "all" if when == "prompt" else "", "contests" if decoding else "contexts"
    return Contender(make, reads=reads, method=name, on=on)


def _policy(name: str, sizing: Sizing, **arguments: Any) -> Policy:
    told: dict[str, Any] = {name: arguments | dict(sizing.arguments)}
    if name in WRAPPERS:
        told = {"snapkv": arguments | {name: dict(sizing.arguments)}}
    return _made(sizing, told)


def _made(sizing: Sizing, told: dict[str, Any]) -> Policy:
    tokenizer = sizing.tokenizer() if takes_tokenizer(told) else None
    return make_policy(told, model=sizing.model, tokenizer=tokenizer, force=sizing.force)


def _gated(sizing: Sizing, **arguments: Any) -> Policy:
    assert sizing.gates is not None  # the command line is refused without
    return _policy("wgkv", sizing, gates=sizing.gates, **arguments)


def _fast_kvzip(sizing: Sizing) -> Policy:
    assert sizing.gates is not None  # the command line is refused without
    return _policy("fast_kvzip", sizing, gates=sizing.gates, ratio=sizing.ratio, chunk=sizing.chunk)


def _fast_kvzip_decoding(sizing: Sizing) -> Policy:
    assert sizing.gates is not None  # the command line is refused without
    told = {"entries": round(sizing.entries), "when": "position", "every": EVERY}
    return _policy("fast_kvzip", sizing, gates=sizing.gates, **told)


def _kvpop(sizing: Sizing) -> Policy:
    assert sizing.gates is not None  # the command line is refused without
    return _policy("kvpop", sizing, gates=sizing.gates, budget=round(sizing.entries))


def _calibrated_gates(sizing: Sizing) -> Policy:
    policy = _gated(sizing)
    _check_holds(sizing.entries, policy.window, f"its window of {policy.window}")
    return policy


def _check_holds(entries: float, least: int, what: str) -> None:
    if entries < least:
        raise UserError(f"a budget of {entries:.1f} entries of each kv head does not hold {what}")


def _gates_then_snapkv(sizing: Sizing) -> Policy:
    # what SnapKV looks back at must still be in the window
    observed = min(sizing.observed, _gated(_without_arguments(sizing)).window)
    largest = {"group": "max", "pooling": "max"}  # as in WG-KV's code
    # heads differ in what the gates let in, so the budget is that of all together
    shared = {"ratio": sizing.ratio, "adakv": {"over": "model", "pinned": 0.0}}
    eviction = {"observed": observed, **largest} | dict(sizing.arguments) | shared
    return _made(sizing, {"wgkv": {"gates": sizing.gates}, "snapkv": eviction})


def _gates_then_quest(sizing: Sizing) -> Policy:
    selection = {"ratio": sizing.ratio} | dict(sizing.arguments)
    return _made(sizing, {"wgkv": {"gates": sizing.gates}, "quest": selection})


def _without_arguments(sizing: Sizing) -> Sizing:
    return dataclasses.replace(sizing, arguments={})


LEARNED = "prulong", "duo_attention"
"""Recipes that rank heads, whose folders are taken as gates are."""
CALIBRATED = "chosen for each budget"
CHOSEN = {"sink": CALIBRATED, "window": CALIBRATED}
OF_FOLDER = {"sparsity": "--budgets", "sink": "--gates", "window": "--gates"}
CONTENDERS = {
    "full": Contender(_full, one_size=True, reads="all", on="both"),
    "streaming_llm": Contender(
        _streaming, method="streaming_llm", choose=Rivals.sink_and_window, taken=CHOSEN, on="both"
    ),
    "head_pattern": Contender(_head_pattern, method="head_pattern", choose=Rivals.head_pattern, taken=CHOSEN),
    "snapkv": _eviction("snapkv"),
    "oraclekv": dataclasses.replace(_eviction("oraclekv"), reads=""),
    "snapkv_chunked": _eviction("snapkv", "chunk"),
    "snapkv_patched": _eviction("snapkv", "chunk", "prompt"),
    "pyramidkv": _eviction("pyramidkv"),
    "pyramidkv_chunked": _eviction("pyramidkv", "chunk"),
    "pyramidkv_patched": _eviction("pyramidkv", "chunk", "prompt"),
    "adakv": _eviction("adakv"),
    "adakv_chunked": _eviction("adakv", "chunk"),
    "critical_kv": _eviction("critical_kv"),
    "expected_attention": _eviction("expected_attention"),
    "expected_attention_chunked": _eviction("expected_attention", "chunk"),
    "h2o": _eviction("h2o"),
    "h2o_chunked": _eviction("h2o", "chunk"),
    "r_kv": _eviction("r_kv"),
    "tova": _eviction("tova"),
    "keydiff": _eviction("keydiff"),
    "keydiff_chunked": _eviction("keydiff", "chunk"),
    "knorm": _eviction("knorm"),
    "kvzip": dataclasses.replace(_eviction("kvzip"), reads=""),
    "fast_kvzip": Contender(_fast_kvzip, gates="fast_kvzip", method="fast_kvzip"),
    "kvpop": Contender(_kvpop, gates="kvpop", method="kvpop", on="both"),
    "random_eviction": Contender(
        lambda s: _policy("random_eviction", s, ratio=s.ratio, seed=s.seed),
        reads="all",
        method="random_eviction",
    ),
    **{
        name: Contender(_learned_heads, gates=name, method="head_pattern", taken=OF_FOLDER)
        for name in LEARNED
    },
    "quest": Contender(lambda s: _policy("quest", s, ratio=s.ratio), reads="all", method="quest"),
    "wgkv": Contender(
        _calibrated_gates, calibrated=True, method="wgkv", taken={"tau": "searched for each budget"}
    ),
    FIXED_TAU: Contender(_gated, own_tau=True, method="wgkv", on="both"),
    "wgkv+snapkv": Contender(_gates_then_snapkv, reads=GATED, over_gates="eviction", method="snapkv"),
    "wgkv+quest": Contender(_gates_then_quest, reads=GATED, over_gates="selection", method="quest"),
    **{f"{name}_constant": _eviction(name, "chunk", constant=True) for name in ("h2o", "r_kv", "tova")},
    **{
        f"{name}_decoding": _eviction(name, "position")
        for name in ("snapkv", "expected_attention", "h2o", "r_kv", "tova", "keydiff", "knorm")
    },
    "fast_kvzip_decoding": Contender(
        _fast_kvzip_decoding, gates="fast_kvzip", method="fast_kvzip", on="contests"
    ),
}
"""What each means: the docs of the methods in `kvjax.policies.registry`, and docs/evaluation.md. NAME evicts once, when
the prompt was read, NAME_chunked after every chunk, NAME_patched the same with each chunk observed by the prompt's end,
NAME_constant after every chunk to the size that others have in the end, NAME_decoding while it answers.
"""


OWN_WORDS = {
    "ratio": "--budgets", "entries": "--budgets", "size": "--budgets", "threshold": "--budgets", "gates": "--gates",
    "scorers": "--gates", "budget": "--budgets",
    "model": "--model", "tokenizer": "--model", "force": "--force", "name": "--policies",
    "pattern": "--pattern",
}  # fmt: skip
"""Arguments that an evaluation gives its policies itself, and the options that they come of."""


TOLD_PATTERN = Contender(_told_pattern, one_size=True, method="head_pattern")
"""head_pattern where a sparsity follows its name: the folder's order of the heads at it, and its sinks and window, for
which nothing is chosen."""


def with_arguments(name: str) -> tuple[str, dict[str, Any] | None]:
    """The contender that is named, and the arguments behind it."""
    base, colon, told = name.partition(":")
    if base in CONTENDERS:
        return base, next(iter(parse_policy(f"full:{told}").values())) if colon else None
    ((base, own),) = parse_policy(name).items()
    return base, own or None


def contender(name: str) -> Contender:
    """The one called `name`, which may be followed by arguments of its policy: `snapkv:pool=7,group=max`. It then reads
    its contexts for itself.

    Raises UserError with the nearest names, and for arguments where they mean nothing.
    """
    base, own = with_arguments(name)
    found = CONTENDERS.get(base) or _from_package(base)
    if found is None:
        near = nearest(base, CONTENDERS) or CONTENDERS
        raise UserError(f"--policies: unknown policy {base!r}; the nearest known: {', '.join(near)}")
    if own is None:
        return found
    if base == "head_pattern" and "sparsity" in own:
        found = TOLD_PATTERN
    if not found.method:
        raise UserError(f"--policies {name}: {base} takes no arguments here")
    for word, of in {**OWN_WORDS, **found.taken}.items():
        if word in own:
            raise UserError(f"--policies {name}: {word} is the evaluation's own ({of})")
    try:
        takes_tokenizer({"snapkv": {found.method: own}} if found.method in WRAPPERS else {found.method: own})
    except UserError as error:
        raise UserError(f"--policies {name}: {error}") from None

    def make(sizing: Sizing) -> Policy:
        return found.make(dataclasses.replace(sizing, arguments=own))

    return dataclasses.replace(found, make=make, reads="", arguments=own)


def _from_package(name: str) -> Contender | None:
    """Another package's policy, told the budget by `ratio` or `entries` if it takes either, and the gates if it takes
    any."""
    make = None if name in POLICIES else find_from_package(name)
    if make is None:
        return None
    takes = {*inspect.signature(make).parameters, *(["ratio"] if role(make) == "eviction" else ())}

    def make_sized(sizing: Sizing) -> Policy:
        known = {"gates": sizing.gates, "ratio": sizing.ratio, "entries": round(sizing.entries)}
        given = {key: value for key, value in known.items() if key in takes and value is not None}
        if "ratio" in given:
            given.pop("entries", None)
        return _policy(name, sizing, **given)

    on = "both" if role(make) == "admission" else "contexts"
    return Contender(make_sized, one_size=not {"ratio", "entries"} & takes, gates=None, method=name, on=on)


def budget_policy(name: str, sizing: Sizing) -> Policy:
    """The policy, once it is sure that it can keep so much of such a context.

    Raises UserError naming it and the budget.
    """
    try:
        policy = contender(name).make(sizing)
        if policy.plan is not None:
            _check_holds(sizing.ratio * sizing.shortest, policy.window - 1, f"its window of {policy.window}")
            policy.plan.check_bound(
                policy.name, policy.window - 1, entry_bytes=1
            )  # budgets are no bytes here
    except UserError as error:
        raise UserError(f"{name} at {sizing.ratio:g} of {sizing.tokens} tokens: {error}") from None
    return policy
