"""Policies at a budget: an evaluation fills in what a policy string leaves open, and refuses impossible budgets.

Gates, chunks and the number of last tokens that SnapKV observes come from the evaluation's options.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from kvjax.errors import UserError
from kvjax.evaluate.calibrated import SINKS, narrowest, sink_and_window, whole_heads
from kvjax.evaluate.compared import Compared, answers_contests, budget_argument, compared
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.gates import described, gates_for, most_selective, own_gates_by_lambda
from kvjax.evaluate.sized_tasks import SizedTask
from kvjax.models.decoder import Decoder
from kvjax.models.folder import load_tokenizer
from kvjax.policies import (
    WGKV,
    FastKVzip,
    HeadPattern,
    Policy,
    RandomEviction,
    SnapKV,
    StreamingLLM,
    make_policy,
)
from kvjax.policies.admission.pattern_folder import read_pattern
from kvjax.policies.make import takes_tokenizer
from kvjax.policies.numbers import head_table
from kvjax.policies.registry import is_method, role, trained
from kvjax.tasks.registry import TASKS, check_data, suite_of
from kvjax.tasks.suite import TURNS


@dataclass(frozen=True)
class Sizing:
    """A budget, the contexts that it is for, and the options that fill in a policy string."""

    model: Decoder
    """The model, on its mesh. Its weights may be shapes only."""
    ratio: float
    """The budget: the share of the entries that the policy keeps, or reads."""
    tokens: int
    """The approximate number of tokens of a context."""
    shortest: int
    """Tokens of the shortest context."""
    chunk: int
    """Tokens of a chunk."""
    observed: int
    """The number of last tokens that SnapKV observes."""
    gates: str | None = None
    """The folder or file of the gates to take."""
    seed: int = 0
    """Seed of random choices."""
    force: bool = False
    """True to accept gates that were made for another model."""
    tokenizer: Callable[[], Any] = lambda: None
    """Loads the model's tokenizer."""

    @property
    def entries(self) -> float:
        """The budget in entries of each kv head."""
        return self.ratio * self.tokens

    @property
    def shape(self) -> tuple[int, int]:
        """Layers × kv heads."""
        return self.model.config.num_full_layers, self.model.config.num_kv_heads


def policy_of(one: Compared, sizing: Sizing) -> Policy:
    """Return the policy at a budget. A calibrated policy is fitted later; here it is the plainest of its kind."""
    if one.calibrated:
        return _plainest(one, sizing)
    arguments = {name: dict(own) for name, own in one.described.items()}
    window = sizing.observed
    for name in sorted(arguments, key=lambda name: role(one.kinds[name])):  # admissions first
        kind, own = one.kinds[name], arguments[name]
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
        elif role(kind) == "admission" and is_method(kind) and len(arguments) > 1:
            alone = make_policy({name: own}, model=sizing.model, force=sizing.force)
            # the tokens that SnapKV observes must still be in the window
            window = window if alone.stores_all else min(window, alone.window)
    tokenizer = sizing.tokenizer() if takes_tokenizer(arguments) else None
    return make_policy(arguments, model=sizing.model, tokenizer=tokenizer, force=sizing.force)


def _learned_heads(own: dict[str, Any], sizing: Sizing) -> dict[str, Any]:
    """Return a head pattern's arguments at a budget: the most whole heads, in its order, that leave the others its
    sinks and its window, which is then widened."""
    folder = own.pop("gates", own.get("pattern"))
    if not isinstance(folder, str | Path):
        raise UserError(
            "head_pattern without a sparsity: got no gates to order heads by; calibrated measures an order"
        )
    learned = read_pattern(folder)
    if np.isin(learned.weights, (0, 1)).all():
        raise UserError(
            f"{folder}: a pattern of 0 and 1 has no order of its heads for --budgets; as it is it is "
            f"head_pattern:sparsity={1 - learned.weights.mean():g}"
        )
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


def _plainest(one: Compared, sizing: Sizing) -> Policy:
    (kind,) = one.kinds.values()
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
    """Return the worth of heads that is known without a measurement, by the orders' names, and the smallest window of
    streaming heads: the gates', if there are any."""
    orders, window = {}, narrowest(sizing.tokens)
    if sizing.gates is not None:
        description = described(sizing.gates)
        window = int(description.get("window", window))
        if "rate" in description:
            orders["the gates' rates"] = head_table("--gates", "rate", description["rate"], *sizing.shape)
    return orders, window


def _check_holds(entries: float, least: int, what: str) -> None:
    if entries < least:
        raise UserError(f"a budget of {entries:.1f} entries of each kv head does not hold {what}")


def budget_policy(one: Compared, sizing: Sizing) -> Policy:
    """Return the policy at a budget, if the budget holds what the policy always keeps of such a context.

    Raises UserError, which names the policy and the budget, if it does not.
    """
    try:
        policy = policy_of(one, sizing)
        if policy.schedule is not None:
            _check_holds(sizing.ratio * sizing.shortest, policy.window - 1, f"its window of {policy.window}")
            # budgets are not in bytes here
            policy.schedule.check_bound(policy.name, policy.window - 1, entry_bytes=1)
    except UserError as error:
        raise UserError(f"{one.label} at {sizing.ratio:g} of {sizing.tokens} tokens: {error}") from None
    return policy


tokenizer_of = functools.cache(load_tokenizer)
"""Loads a model's tokenizer once."""


def sizing_of(
    config: EvaluateConfig, model: Decoder, tokens: int, shortest: int, one: Compared, budget: float
) -> Sizing:
    """Return the sizing of a policy at a budget, for contexts of about `tokens` tokens and at least `shortest`."""
    assert config.chunk is not None
    assert config.observed is not None
    own = gates_for(config, one)
    gates = own[0] if own else None
    if one.own_tau:
        gates, budget = own_gates_by_lambda(own)[budget], 1.0
    elif one.over_gates and own:
        gates = most_selective(own, budget, tokens)
    return Sizing(
        model, budget, tokens, shortest, config.chunk, config.observed, gates, config.seed, config.force,
        tokenizer=functools.partial(tokenizer_of, config.model),
    )  # fmt: skip


def possible_policies(
    config: EvaluateConfig, one: Compared, sizing: Sizing, *, any_gates: bool = False
) -> dict[str, Policy]:
    """Return the policy of a size by the folder of its gates. If τ is searched for, or the policy evicts from what
    gates admit and `any_gates` is True, there is one with each of the gates that can meet the size.

    Raises UserError if there is none.
    """
    if not (one.searched or (any_gates and one.over_gates and sizing.gates is not None)):
        return {str(sizing.gates or ""): budget_policy(one, sizing)}
    found, errors = {}, []
    for gates in gates_for(config, one) or (sizing.gates,):
        try:
            found[gates or ""] = budget_policy(one, dataclasses.replace(sizing, gates=gates))
        except UserError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def check_lengths(config: EvaluateConfig, model: Decoder) -> None:
    """Raise UserError if no context of one of the --context lengths can hold a budget, before there are contexts. The
    error names the policy and the budget. `model`: its weights may be shapes only."""
    for length, (policy, budget) in itertools.product(config.context, pairs(config)):
        sizing = sizing_of(config, model, length, length, policy, budget)
        possible_policies(config, policy, sizing, any_gates=True)


def check_contexts(config: EvaluateConfig, model: Decoder, tasks: Sequence[SizedTask]) -> None:
    """Raise UserError if the real contexts cannot hold a budget. The error names the policy, the budget, the task and
    the length asked for."""
    for own, (policy, budget) in itertools.product(tasks, pairs(config)):
        try:
            sizing = sizing_of(config, model, own.tokens, own.shortest, policy, budget)
            possible_policies(config, policy, sizing)
        except UserError as error:
            raise UserError(f"{own.name} at --context {own.length}: {error}") from None


def pairs(config: EvaluateConfig) -> list[tuple[Compared, float]]:
    """Return the policies with their budgets: 1 for a policy with a size of its own, λ for gates at their own τ."""
    return [(one, budget) for one in compared(config) for budget in _budgets(one, config)]


def _budgets(one: Compared, config: EvaluateConfig) -> tuple[float, ...]:
    if one.own_tau:
        return tuple(own_gates_by_lambda(gates_for(config, one)))
    return config.budgets if one.takes_budget else (1.0,)


def check_policies(config: EvaluateConfig) -> None:
    """Raise UserError for invalid policies, policies that the tasks cannot measure, unknown names in --data, --dense
    without contests, and --turns without SCBench."""
    drawn = answers_contests(config)
    check_data(list(config.files))
    if config.dense is not None and not drawn:
        raise UserError(f"--dense is for contests, which {config.tasks[0]} is none of")
    if config.turns != TURNS[0] and not any(suite_of(task).takes_turns for task in config.tasks):
        raise UserError(f"--turns is for SCBench's tasks, which {config.tasks[0]} is none of")
    for one in compared(config):
        if not (one.on_contests if drawn else not one.decodes):
            raise UserError(
                f"--policies {one.label}: its cache grows with an answer, whatever the budget; {config.tasks[0]} is "
                "for those that evict while they answer (when=position), and for full, streaming_llm, wgkv and kvpop"
                if drawn
                else f"--policies {one.label} evicts while it answers at length, which is measured on contests: "
                f"{', '.join(task for task, suite in TASKS.items() if suite.drawn)}"
            )
