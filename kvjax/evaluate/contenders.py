"""The methods that are compared, by name: how each is made for a budget. One line adds one."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from kvjax.errors import UserError
from kvjax.evaluate.fixed import SINKS, Choice, Rivals, narrowest, sink_and_window, whole_heads
from kvjax.models.decoder import Decoder
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.head_pattern import read_pattern
from kvjax.policies.admission.wgkv import load_gates
from kvjax.policies.policy import head_table


@dataclass(frozen=True)
class Sizing:
    """What a policy is made for: `ratio` of the entries of contexts of about `tokens` tokens, read in chunks of
    `chunk`.

    shortest: tokens of the shortest of them. observed: last tokens that observers look back at. gates, pattern:
    folders. seed: of what is random.
    """

    model: Decoder
    ratio: float
    tokens: int
    shortest: int
    chunk: int
    observed: int
    gates: str | Path | None = None
    pattern: Path | None = None
    seed: int = 0

    @property
    def entries(self) -> float:
        return self.ratio * self.tokens

    @property
    def shape(self) -> tuple[int, int]:
        """Layers × kv heads."""
        return self.model.config.num_layers, self.model.config.num_kv_heads


@dataclass(frozen=True)
class Contender:
    """make: the policy of a size. fixed: it has one size, whatever the budget. reads_once: contexts are read the same
    way at every budget. calibrated: its size follows from τ, which is searched for (see `calibration`). chosen: the
    best of its kind on calibration contexts, for so many entries; `make` then gives any of them."""

    make: Callable[[Sizing], Policy]
    fixed: bool = False
    reads_once: bool = False
    calibrated: bool = False
    chosen: Callable[[Rivals, float], Choice] | None = None


def _full(sizing: Sizing) -> Policy:
    return make_policy("full", model=sizing.model)


def _streaming(sizing: Sizing) -> Policy:
    _check_holds(sizing, SINKS[0], f"{SINKS[0]} sinks")
    return sink_and_window(sizing.shape, entries=sizing.entries, sink=SINKS[0]).policy(sizing.model)


def _head_pattern(sizing: Sizing) -> Policy:
    _check_holds(sizing, SINKS[0], f"{SINKS[0]} sinks")
    orders, window = known_orders(sizing)
    weights = next(iter(orders.values()), np.zeros(sizing.shape))
    sizes = {"entries": sizing.entries, "context": sizing.tokens, "window": window, "sink": SINKS[0]}
    return whole_heads(weights, **sizes).policy(sizing.model)


def known_orders(sizing: Sizing) -> tuple[dict[str, Float[np.ndarray, "l k"]], int]:
    """What heads are worth as far as it need not be measured, by the orders' names, and the smallest window of
    streaming heads: the gates', if there are any."""
    orders, window = {}, narrowest(sizing.tokens)
    if sizing.pattern is not None:
        weights = read_pattern(sizing.pattern)[0]
        orders["the pattern's"] = head_table("--pattern", "its table", weights, *sizing.shape, shares=False)
    if sizing.gates is not None:
        described = load_gates(sizing.gates, sizing.model)[1]
        orders["the gates' rates"], window = np.array(described["rate"]), int(described["window"])
    return orders, window


def _evicting(name: str, **arguments) -> Contender:
    """An eviction once the prompt was read."""
    return Contender(lambda s: make_policy(name, model=s.model, ratio=s.ratio, **arguments), reads_once=True)


def _looking_back(name: str) -> Contender:
    """The same for methods over SnapKV's scores."""
    return Contender(
        lambda s: make_policy(name, model=s.model, ratio=s.ratio, observed=s.observed), reads_once=True
    )


def _by_chunk(name: str, when: str) -> Contender:
    """An eviction after every chunk."""
    return Contender(
        lambda s: make_policy(
            name, model=s.model, ratio=s.ratio, observed=s.observed, when=when, chunk=s.chunk
        )
    )


def _gated(sizing: Sizing, **arguments) -> Policy:
    if sizing.gates is None:
        raise UserError("wgkv needs --gates, a folder that training exported")
    return make_policy("wgkv", model=sizing.model, gates=sizing.gates, **arguments)


def _calibrated_gates(sizing: Sizing) -> Policy:
    policy = _gated(sizing)
    _check_holds(sizing, policy.window, f"its window of {policy.window}")
    return policy


def _check_holds(sizing: Sizing, least: int, what: str) -> None:
    if sizing.entries < least:
        raise UserError(f"a budget of {sizing.entries:.1f} entries of each kv head does not hold {what}")


def _gates_then_snapkv(sizing: Sizing) -> Policy:
    # what SnapKV looks back at must still be in the window
    observed = min(sizing.observed, _gated(sizing).window - 1)
    largest = {"group": "max", "pooling": "max"}  # as in WG-KV's code
    # heads differ in what the gates let in, so the budget is that of all together
    return _gated(sizing, eviction="snapkv", ratio=sizing.ratio, observed=observed, over="model", **largest)


CONTENDERS = {
    "full": Contender(_full, fixed=True),
    "streaming_llm": Contender(_streaming, chosen=Rivals.sink_and_window),
    "head_pattern": Contender(_head_pattern, chosen=Rivals.head_pattern),
    "snapkv": _looking_back("snapkv"),
    "pyramidkv": _by_chunk("pyramidkv", "chunk"),
    "pyramidkv_patched": _by_chunk("pyramidkv", "patched"),
    "adakv": _looking_back("adakv"),
    "critical_kv": _looking_back("critical_kv"),
    "expected_attention": _evicting("expected_attention"),
    "h2o": _evicting("h2o"),
    "r_kv": _evicting("r_kv"),
    "tova": _evicting("tova"),
    "keydiff": _evicting("keydiff"),
    "knorm": _evicting("knorm"),
    "random_eviction": Contender(
        lambda s: make_policy("random_eviction", model=s.model, ratio=s.ratio, seed=s.seed), reads_once=True
    ),
    "quest": Contender(lambda s: make_policy("quest", model=s.model, ratio=s.ratio), reads_once=True),
    "wgkv": Contender(_calibrated_gates, calibrated=True),
    "wgkv+snapkv": Contender(_gates_then_snapkv, reads_once=True),
    "wgkv+quest": Contender(lambda s: _gated(s, selection="quest", ratio=s.ratio), reads_once=True),
}
"""What each means: docs of the functions of the same names in `kvjax.policies`, and README."""


def contender(name: str) -> Contender:
    """The one called `name`. Raises UserError with the nearest names."""
    if name not in CONTENDERS:
        near = difflib.get_close_matches(name, CONTENDERS) or list(CONTENDERS)
        raise UserError(f"--policies: unknown policy {name!r}; the nearest known: {', '.join(near)}")
    return CONTENDERS[name]


def sized(name: str, sizing: Sizing) -> Policy:
    """The policy, once it is sure that it can keep so much of such a context.

    Raises UserError naming it and the budget.
    """
    try:
        policy = contender(name).make(sizing)
        plan, layers = policy.plan, sizing.model.config.num_layers
        if plan is not None and plan.schedule.when == "prompt":
            kept = plan.kept([sizing.shortest], 1)
            plan.counts(policy.name, [sizing.shortest], kept, policy.window - 1, layers)
    except UserError as error:
        raise UserError(f"{name} at {sizing.ratio:g} of {sizing.tokens} tokens: {error}") from None
    return policy
