"""A short run of the test-size model, and its logged numbers."""

import json

from kvjax.builtin import builtin_model
from kvjax.train.update import make_update

ARGS = [
    *("--model", str(builtin_model("test_model")), "--data", "builtin", "--lengths", "64", "--shares", "1"),
    *("--batch", "8", "--window", "8", "--lambda", "0.3", "--lr", "1e-2", "--sequences", "48"),
    *("--checkpoint-every", "2", "--report", "none", "--dtype", "float32"),
]


def written(folder):
    """Return the lines of metrics.jsonl: those of steps, and the validations by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    validations = {line["step"]: line["validation"] for line in lines if "validation" in line}
    return [line for line in lines if "validation" not in line], validations


def losses(folder):
    steps, _ = written(folder)
    assert [line["step"] for line in steps] == list(range(6))
    return [line["loss"] for line in steps]


def stopping_after(count, error):
    """Return a `make_update` that raises `error` in place of update `count` + 1."""
    done = []

    def stopping(*args, **options):
        update = make_update(*args, **options)

        def stopped(*args):
            if len(done) == count:
                raise error
            done.append(1)
            return update(*args)

        stopped.lower = update.lower
        return stopped

    return stopping
