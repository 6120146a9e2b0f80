"""`--dry-run` of an evaluation: check its options against the model's shape, and say how much it would measure."""

import dataclasses
from pathlib import Path

from kvjax.builtin import BUILTIN, GATES
from kvjax.evaluate.compared import Compared, answers_contests, compared
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.gates import of_method, with_gates
from kvjax.evaluate.run import reading_of
from kvjax.evaluate.sizing import budget_policy, check_lengths, check_policies, pairs, sizing_of
from kvjax.models.decoder import Decoder
from kvjax.models.kinds import few
from kvjax.models.loading import model_shapes
from kvjax.models.shapes import find_shape, fit_mesh
from kvjax.policies.registry import is_method


def dry_run(config: EvaluateConfig) -> str:
    """Check an evaluation without weights, data or network, and return what it would measure.

    Gates that are not there yet are named. For policies that need them, only the arguments' names are checked.

    Raises:
        UserError: a task, a policy, a budget or a mesh that the evaluation would refuse, or a model of no known shape.
    """
    name, longest = config.model, max(config.context)
    shape = find_shape(name, longest, config.weights, config.kv_cache_dtype).config
    fit_mesh(config.mesh, shape)
    missing = [gates for gates in config.gates if not _is_there(gates)]
    there = tuple(gates for gates in config.gates if gates not in missing)
    # the built-in model's tokenizer stands in for the model's, which may not be here
    config = with_gates(dataclasses.replace(config, gates=there, model=BUILTIN), print)
    check_policies(config)
    policies = dict(zip(config.policies, compared(config), strict=True))
    waiting = [text for text, one in policies.items() if _waits(one, config, bool(missing))]
    ready = dataclasses.replace(config, policies=tuple(text for text in policies if text not in waiting))
    model = model_shapes(shape)
    check_lengths(ready, model)

    later = sum(_results(policies[text], config, len(missing)) for text in waiting)
    results, drawn = len(pairs(ready)) + later, answers_contests(config)
    read = [results if drawn else _readings(ready, model, length) + later for length in config.context]
    tokens = (
        config.samples * len(config.tasks) * sum(a * b for a, b in zip(config.context, read, strict=True))
    )
    lengths = ", ".join(f"{length:,}" for length in config.context)
    contexts = config.samples * len(config.tasks) * len(config.context)
    calibrated = any(one.calibrated for one in policies.values())
    amount = "to draw" if drawn else f"to read, each of at most {contexts:,} contexts up to {max(read)} times"
    lines = [
        f"{name}: {shape.num_full_layers} layers × {shape.num_kv_heads} KV heads; weights and data were not read",
        f"{len(policies)} policies, {results} with their budgets, × {len(config.tasks)} tasks × lengths of {lengths} "
        f"tokens: {results * len(config.tasks) * len(config.context):,} results of {config.samples:,} answers",
        f"at most {tokens:,} tokens {amount}" + (", besides those for calibration" if calibrated else ""),
    ]
    if waiting:
        named = [path for text in waiting for path in policies[text].own_gates if not _is_there(path)]
        wanted = few(dict.fromkeys([*missing, *named]))
        labels = few(policies[text].label for text in waiting)
        lines.append(
            f"gates not there yet: {wanted}; until then only the arguments' names are checked for {labels}"
        )
    return "\n".join(lines)


def _is_there(path: str) -> bool:
    return path in GATES or Path(path).expanduser().exists()


def _waits(one: Compared, config: EvaluateConfig, missing: bool) -> bool:
    """Return True if a policy's gates are not there yet."""
    if any(not _is_there(path) for path in one.own_gates):
        return True
    name = one.takes_gates
    return missing and name is not None and is_method(one.kinds[name]) and not of_method(config.gates, name)


def _results(one: Compared, config: EvaluateConfig, gates: int) -> int:
    """Return the number of budgets at which a policy is measured whose gates are not there yet."""
    return gates if one.own_tau else len(config.budgets) if one.takes_budget else 1


def _readings(config: EvaluateConfig, model: Decoder, length: int) -> int:
    """Return the number of times a context is read to measure all policies. Methods that read alike share a reading."""
    found = []
    for index, (one, budget) in enumerate(pairs(config)):
        sizing = sizing_of(config, model, length, length, one, budget)
        reading = None if one.calibrated else reading_of(one, budget_policy(one, sizing), sizing.gates)
        found.append(index if reading is None else ("together", reading))
    return len(set(found))
