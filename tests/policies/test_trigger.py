"""Test the errors for options of triggers, budgets and observers."""

import pytest

from kvjax.errors import UserError
from kvjax.policies import make_policy

ENTRIES = 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"when": "every"}, "eviction: every must be a whole number of at least 1, got 0"),
        ({"every": 8}, "every=8 needs when='every'"),
        ({"drop": 0.5}, "drop=0.5 needs when='overflow'"),
        (
            {"when": "overflow", "drop": 0.0},
            "drop must be a finite number, above 0 and at most 1",
        ),
        (
            {"when": "overflow", "entries": None, "ratio": 0.5},
            "when='overflow' needs a budget in entries or size",
        ),
        ({"when": "overflow", "adakv": {}}, "when='overflow' drops a share of every head's own entries"),
        (
            {"when": "overflow", "protected": {"last": 2}},
            "when='overflow' looks back at the last 6 tokens at every compaction, so they must stay: last must be at",
        ),
        ({"pooling": "median"}, "snapkv: pooling is one of average, max, got 'median'"),
        ({"group": "sum"}, "snapkv: group is one of mean, max, got 'sum'"),
        ({"entries": None, "threshold": float("nan")}, "threshold must be a finite number, got nan"),
    ],
)
def test_invalid_triggers_and_budgets_give_one_line_errors(model, options, message):
    options = {"entries": ENTRIES, "observed": 6} | options
    with pytest.raises(UserError) as error:
        make_policy({"snapkv": {k: v for k, v in options.items() if v is not None}}, model=model)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observers": [61]}, "snapkv: observers have token id 61, the model's vocabulary is 0 … 60"),
        ({"observers": []}, "eviction: observers must be at least one token id, got none"),
        ({"observers": b"ab"}, "eviction: observers is one of own, got b'ab'"),
        ({"observers": [0.5]}, "eviction: a token id of observers must be a whole number of at least 0"),
        ({"observers": [1], "when": "every", "every": 4}, "observers=.* needs when='prompt' or 'chunk'"),
        (
            {"observers": [1], "name": "knorm"},
            "observers=.* is for methods that look back at the last tokens",
        ),
    ],
)
def test_invalid_observers_give_one_line_errors(model, options, message):
    options = {"ratio": 0.5} | options
    name = options.pop("name", "snapkv")
    with pytest.raises(UserError, match=message):
        make_policy({name: options}, model=model)
