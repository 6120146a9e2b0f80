"""Policies at a budget: fill in the arguments that a policy string leaves out, and refuse impossible budgets.

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
from kvjax.evaluate.calibrated import SINKS, sink_and_window, smallest_window, whole_heads
from kvjax.evaluate.compared import Compared, budget_argument, compared_policies, has_contests
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.gates import describe_gates, gates_by_lambda, gates_for, most_selective
from kvjax.evaluate.sized_tasks import SizedTask
from kvjax.models.decoder import Decoder
from kvjax.models.folder import load_tokenizer
from kvjax.models.rope import inverse_frequencies
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
    """A budget, the size of the contexts, and the options that complete a policy string."""

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
    """The folder or file of the gates."""
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


def policy_of(compared: Compared, sizing: Sizing) -> Policy:
    """Return the policy at a budget. For a calibrated policy, which is fitted later, return its default."""
    if compared.calibrated:
        return _before_calibration(compared, sizing)
    described = {name: dict(arguments) for name, arguments in compared.described.items()}
    observed = sizing.observed
    for name in sorted(described, key=lambda name: role(compared.methods[name])):  # admissions first
        method, arguments = compared.methods[name], described[name]
        if compared.gated_method == name and sizing.gates is not None:
            arguments[trained(method)] = sizing.gates
        argument = budget_argument(method, arguments, compared.roles)
        if method is StreamingLLM and argument:
            sink = int(arguments.setdefault("sink", SINKS[0]))
            _check_holds(sizing.entries, sink, f"{sink} sinks")
            arguments["window"] = sink_and_window(sizing.shape, entries=sizing.entries, sink=sink).window
        elif method is HeadPattern and argument:
            arguments |= _learned_heads(arguments, sizing)
        elif argument:
            arguments[argument] = sizing.ratio if argument == "ratio" else round(sizing.entries)
        if role(method) == "eviction":
            if arguments.get("when", "chunk" if method is FastKVzip else "prompt") == "chunk":
                arguments.setdefault("chunk", sizing.chunk)
            if method is SnapKV and "guidance" not in arguments:
                arguments.setdefault("observed", observed)
            if method is RandomEviction:
                arguments.setdefault("seed", sizing.seed)
        elif role(method) == "admission" and is_method(method) and len(described) > 1:
            alone = make_policy({name: arguments}, model=sizing.model, force=sizing.force)
            # the tokens that SnapKV observes must still be in the window
            observed = observed if alone.stores_all else min(observed, alone.window)
    tokenizer = sizing.tokenizer() if takes_tokenizer(described) else None
    return make_policy(described, model=sizing.model, tokenizer=tokenizer, force=sizing.force)


def _learned_heads(arguments: dict[str, Any], sizing: Sizing) -> dict[str, Any]:
    """Return a head pattern's arguments at a budget.

    As many heads as possible are whole, in the pattern's order, while the others keep its sinks and its window. Their
    window is then widened to fill the budget.
    """
    folder = arguments.pop("gates", arguments.get("pattern"))
    if not isinstance(folder, str | Path):
        raise UserError(
            "head_pattern without a sparsity: got no gates that order the heads; calibrated measures an order"
        )
    learned = read_pattern(folder)
    if np.isin(learned.weights, (0, 1)).all():
        raise UserError(
            f"{folder}: a pattern of 0 and 1 does not order its heads, so it has no --budgets; use it as "
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
    pattern = whole_heads(weights, **sizes)
    return {"pattern": pattern.whole.astype(float), "sink": pattern.sink, "window": pattern.window}


def _before_calibration(compared: Compared, sizing: Sizing) -> Policy:
    """Return a calibrated policy with default values, to check its budget."""
    (method,) = compared.methods.values()
    if method is WGKV:
        policy = make_policy(compared.described, model=sizing.model, gates=sizing.gates, force=sizing.force)
        _check_holds(sizing.entries, policy.window, f"its window of {policy.window}")
        return policy
    _check_holds(sizing.entries, SINKS[0], f"{SINKS[0]} sinks")
    if method is StreamingLLM:
        return sink_and_window(sizing.shape, entries=sizing.entries, sink=SINKS[0]).policy(sizing.model)
    orders, window = known_orders(sizing)
    weights = next(iter(orders.values()), np.zeros(sizing.shape))
    sizes = {"entries": sizing.entries, "context": sizing.tokens, "window": window, "sink": SINKS[0]}
    return whole_heads(weights, **sizes).policy(sizing.model)


def known_orders(sizing: Sizing) -> tuple[dict[str, Float[np.ndarray, "l k"]], int]:
    """Return the orders of heads that need no measurement, as the importance of each head by the order's name, and the
    smallest window of streaming heads. Both come from the gates, if there are any."""
    orders, window = {}, smallest_window(sizing.tokens)
    if sizing.gates is not None:
        description = describe_gates(sizing.gates)
        window = int(description.get("window", window))
        if "rate" in description:
            orders["the gates' rates"] = head_table("--gates", "rate", description["rate"], *sizing.shape)
    return orders, window


def _check_holds(entries: float, least: int, description: str) -> None:
    if entries < least:
        raise UserError(f"a budget of {entries:.1f} entries of each kv head does not hold {description}")


def budget_policy(compared: Compared, sizing: Sizing) -> Policy:
    """Return the policy at a budget.

    Raises UserError, naming the policy and the budget, if the budget is below what the policy always keeps.
    """
    try:
        policy = policy_of(compared, sizing)
        if policy.schedule is not None:
            _check_holds(sizing.ratio * sizing.shortest, policy.window - 1, f"its window of {policy.window}")
            # budgets are not in bytes here
            policy.schedule.check_bound(policy.name, policy.window - 1, entry_bytes=1)
    except UserError as error:
        raise UserError(f"{compared.label} at {sizing.ratio:g} of {sizing.tokens} tokens: {error}") from None
    return policy


tokenizer_of = functools.cache(load_tokenizer)
"""Load a model's tokenizer, once for each model."""


def sizing_of(
    config: EvaluateConfig, model: Decoder, tokens: int, shortest: int, compared: Compared, budget: float
) -> Sizing:
    """Return the sizing of a policy at a budget, for contexts of about `tokens` tokens and at least `shortest`."""
    assert config.chunk is not None
    assert config.observed is not None
    folders = gates_for(config, compared)
    gates = folders[0] if folders else None
    if compared.at_exported_tau:
        gates, budget = gates_by_lambda(folders)[budget], 1.0
    elif compared.combines_gates and folders:
        gates = most_selective(folders, budget, tokens)
    return Sizing(
        model, budget, tokens, shortest, config.chunk, config.observed, gates, config.seed, config.force,
        tokenizer=functools.partial(tokenizer_of, config.model),
    )  # fmt: skip


def possible_policies(
    config: EvaluateConfig, compared: Compared, sizing: Sizing, *, any_gates: bool = False
) -> dict[str, Policy]:
    """Return the policies that can meet a budget, by the folder of their gates.

    There is one for each of the gates if τ is searched for, or if the policy combines gates with another method and
    `any_gates` is True. Otherwise there is one policy, with the gates of `sizing`.

    Raises UserError if no policy can meet the budget.
    """
    if not (compared.searches_tau or (any_gates and compared.combines_gates and sizing.gates is not None)):
        return {str(sizing.gates or ""): budget_policy(compared, sizing)}
    policies, errors = {}, []
    for gates in gates_for(config, compared) or (sizing.gates,):
        try:
            policies[gates or ""] = budget_policy(compared, dataclasses.replace(sizing, gates=gates))
        except UserError as error:
            errors.append(error)
    if not policies:
        raise errors[0]
    return policies


def check_lengths(config: EvaluateConfig, model: Decoder) -> None:
    """Raise UserError if contexts of a --context length cannot hold a budget, or if the model rotates positions
    differently for these lengths. Needs no real contexts.

    An error about a budget names it and its policy. `model`: its weights may be shapes only.
    """
    rope, head_dim = model.config.rope, model.config.head_dim
    shortest = dataclasses.replace(rope, length=min(config.context))
    if not np.array_equal(inverse_frequencies(rope, head_dim), inverse_frequencies(shortest, head_dim)):
        raise UserError(
            f"--context {' '.join(map(str, config.context))}: the model's RoPE ({rope.type}) depends on the longest of "
            f"these lengths if it is above {rope.original_length}; evaluate one length at a time"
        )
    for length, (compared, budget) in itertools.product(config.context, pairs(config)):
        sizing = sizing_of(config, model, length, length, compared, budget)
        possible_policies(config, compared, sizing, any_gates=True)


def check_contexts(config: EvaluateConfig, model: Decoder, tasks: Sequence[SizedTask]) -> None:
    """Raise UserError if the real contexts cannot hold a budget. The error names the policy, the budget, the task and
    the length asked for."""
    for task, (compared, budget) in itertools.product(tasks, pairs(config)):
        try:
            sizing = sizing_of(config, model, task.tokens, task.shortest, compared, budget)
            possible_policies(config, compared, sizing)
        except UserError as error:
            raise UserError(f"{task.name} at --context {task.length}: {error}") from None


def pairs(config: EvaluateConfig) -> list[tuple[Compared, float]]:
    """Return the policies with their budgets: λ for gates at their exported τ, 1 for a policy that takes no budget."""
    return [
        (compared, budget) for compared in compared_policies(config) for budget in _budgets(compared, config)
    ]


def _budgets(compared: Compared, config: EvaluateConfig) -> tuple[float, ...]:
    if compared.at_exported_tau:
        return tuple(gates_by_lambda(gates_for(config, compared)))
    return config.budgets if compared.takes_budget else (1.0,)


def check_policies(config: EvaluateConfig) -> None:
    """Raise UserError for invalid policies, policies that the tasks cannot measure, unknown names in --data, --dense
    without contests, and --turns without SCBench."""
    contests = has_contests(config)
    check_data(list(config.files))
    if config.dense is not None and not contests:
        raise UserError(f"--dense is for contests, got {config.tasks[0]}")
    if config.turns != TURNS[0] and not any(suite_of(task).takes_turns for task in config.tasks):
        raise UserError(f"--turns is for SCBench's tasks, got {config.tasks[0]}")
    for compared in compared_policies(config):
        if contests and not compared.runs_on_contests:
            raise UserError(
                f"--policies {compared.label}: its cache grows with the answer, whatever the budget; contests such as "
                f"{config.tasks[0]} need full, streaming_llm, wgkv, kvpop or an eviction with when=position"
            )
        if not contests and compared.evicts_while_decoding:
            raise UserError(
                f"--policies {compared.label} evicts while decoding, which is measured on contests: "
                f"{', '.join(task for task, suite in TASKS.items() if suite.is_contest)}"
            )
