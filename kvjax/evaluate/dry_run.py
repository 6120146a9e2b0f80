"""`--dry-run` of an evaluation: check its options against the model's shape, and report how much it would measure."""

import dataclasses
from pathlib import Path

from kvjax.builtin import BUILTIN, GATES
from kvjax.evaluate.compared import Compared, compared_policies, has_contests
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.gates import choose_default_policies, gates_of_method
from kvjax.evaluate.run import reading_key
from kvjax.evaluate.sizing import budget_policy, check_lengths, check_policies, pairs, sizing_of
from kvjax.models.decoder import Decoder
from kvjax.models.kinds import few
from kvjax.models.loading import model_shapes
from kvjax.models.shapes import find_shape, fit_mesh
from kvjax.policies.registry import is_method


def dry_run(config: EvaluateConfig) -> str:
    """Check an evaluation without weights, data or network, and return what it would measure.

    The result names gates that do not exist yet. For policies that need them, only the arguments' names are checked.

    Raises:
        UserError: the evaluation would refuse a task, a policy, a budget or the mesh, or the model's shape is unknown.
    """
    name, longest = config.model, max(config.context)
    shape = find_shape(name, longest, config.weights, config.kv_cache_dtype).config
    fit_mesh(config.mesh, shape)
    missing = [gates for gates in config.gates if not _exists(gates)]
    existing = tuple(gates for gates in config.gates if gates not in missing)
    # the built-in model's tokenizer stands in for the model's, which may not be here
    config = choose_default_policies(dataclasses.replace(config, gates=existing, model=BUILTIN), print)
    check_policies(config)
    policies = dict(zip(config.policies, compared_policies(config), strict=True))
    incomplete = [text for text, policy in policies.items() if _lacks_gates(policy, config, bool(missing))]
    ready = dataclasses.replace(config, policies=tuple(text for text in policies if text not in incomplete))
    model = model_shapes(shape)
    check_lengths(ready, model)

    incomplete_results = sum(_budget_count(policies[text], config, len(missing)) for text in incomplete)
    results, contests = len(pairs(ready)) + incomplete_results, has_contests(config)
    readings = [
        results if contests else _reading_count(ready, model, length) + incomplete_results
        for length in config.context
    ]
    tokens = (
        config.samples * len(config.tasks) * sum(a * b for a, b in zip(config.context, readings, strict=True))
    )
    lengths = ", ".join(f"{length:,}" for length in config.context)
    contexts = config.samples * len(config.tasks) * len(config.context)
    calibrated = any(policy.calibrated for policy in policies.values())
    amount = (
        "to sample"
        if contests
        else f"to read, each of at most {contexts:,} contexts up to {max(readings)} times"
    )
    lines = [
        f"{name}: {shape.num_full_layers} layers × {shape.num_kv_heads} KV heads; weights and data were not read",
        f"{len(policies)} policies, {results} with their budgets, × {len(config.tasks)} tasks × lengths of {lengths} "
        f"tokens: {results * len(config.tasks) * len(config.context):,} results of {config.samples:,} answers",
        f"at most {tokens:,} tokens {amount}" + (", plus those for calibration" if calibrated else ""),
    ]
    if incomplete:
        named = [path for text in incomplete for path in policies[text].named_gates if not _exists(path)]
        absent = few(dict.fromkeys([*missing, *named]))
        labels = few(policies[text].label for text in incomplete)
        lines.append(
            f"gates that do not exist yet: {absent}; until they do, only the arguments' names are checked for {labels}"
        )
    return "\n".join(lines)


def _exists(path: str) -> bool:
    return path in GATES or Path(path).expanduser().exists()


def _lacks_gates(policy: Compared, config: EvaluateConfig, missing: bool) -> bool:
    """Return True if a policy needs gates that do not exist yet."""
    if any(not _exists(path) for path in policy.named_gates):
        return True
    name = policy.gated_method
    return (
        missing
        and name is not None
        and is_method(policy.methods[name])
        and not gates_of_method(config.gates, name)
    )


def _budget_count(policy: Compared, config: EvaluateConfig, gates: int) -> int:
    """Return the number of budgets at which a policy without its gates will be measured."""
    return gates if policy.at_exported_tau else len(config.budgets) if policy.takes_budget else 1


def _reading_count(config: EvaluateConfig, model: Decoder, length: int) -> int:
    """Return the number of times a context is read to measure all policies. Methods that read alike share a reading."""
    keys = []
    for index, (policy, budget) in enumerate(pairs(config)):
        sizing = sizing_of(config, model, length, length, policy, budget)
        reading = (
            None if policy.calibrated else reading_key(policy, budget_policy(policy, sizing), sizing.gates)
        )
        keys.append(index if reading is None else ("together", reading))
    return len(set(keys))
