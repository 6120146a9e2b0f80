"""A whole evaluation of the test-size model, which the tests of several modules use."""

import json

from kvjax.builtin import builtin_model

POLICIES = ["full", "snapkv", "wgkv:calibrated"]
SMALL = [
    *("--model", str(builtin_model("test_model")), "--dtype", "float32", "--page-size", "4"),
    *("--context", "126", "--chunk", "32", "--observed", "4", "--samples", "48", "--batch", "4"),
]
"""Sizes with which all tasks run the same programs: batches of 4, and chunks the last of which is nearly full."""
TASKS = ["--budgets", "0.25", "0.5", "--tasks", "needle", "text"]
SPEEDS = {"prefill_tok_s", "decode_tok_s"}


def lines(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def without_speeds(results):
    return [{name: value for name, value in result.items() if name not in SPEEDS} for result in results]
