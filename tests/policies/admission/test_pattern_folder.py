"""Test pattern folders: what they contain, and the errors for folders that are incomplete or of another kind."""

import json

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.policies.admission.pattern_folder import pattern_digest, read_pattern, write_pattern


def test_a_folder_survives_a_round_trip(tmp_path):
    weights = np.array([[-4.9, 9.7], [1 / 3, 0.0]])
    write_pattern(tmp_path, weights, 4, 16, sparsity=0.25)
    found = read_pattern(tmp_path)
    np.testing.assert_array_equal(found.weights, weights)
    assert found[1:] == (4, 16, 0.25, None)
    first = pattern_digest(tmp_path)
    write_pattern(tmp_path, weights - np.eye(2), 4, 16)
    assert pattern_digest(tmp_path) != first, "weights below 0 count"
    assert read_pattern(tmp_path).sparsity is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("full_attention_heads.tsv", "", "table of numbers"),
        ("full_attention_heads.tsv", "0.1\t0.2\n0.3\n", "table of numbers"),
        ("full_attention_heads.tsv", "0.1\tnan\n", "table of numbers"),
        ("full_attention_heads.tsv", "0.1\tyes\n", "table of numbers"),
        ("full_attention_heads.tsv", "0\t" * (9 << 20), "is larger than"),
        ("config.json", "{}", "sink_size"),
        ("config.json", '{"sink_size": Infinity, "recent_size": 1}', "sink_size must be a whole number"),
        ("config.json", '{"sink_size": 4, "recent_size": -1}', "recent_size must be a whole number"),
        ("config.json", "[" * 100_000, "describes no gates"),
    ],
)
def test_invalid_folders_are_refused(tmp_path, name, text, message):
    write_pattern(tmp_path, np.eye(2), 4, 16)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_pattern(tmp_path)


def test_a_missing_sparsity_is_none_and_others_must_be_numbers(tmp_path):
    write_pattern(tmp_path, np.eye(2), 4, 16)
    sizes = {"sink_size": 4, "recent_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"sparsity": None}))
    assert read_pattern(tmp_path).sparsity is None, "as in DuoAttention's folders"
    for wrong in (70, "a", True):
        (tmp_path / "config.json").write_text(json.dumps(sizes | {"sparsity": wrong}))
        with pytest.raises(
            UserError, match=r"config\.json: sparsity must be a finite number, at least 0 and at"
        ):
            read_pattern(tmp_path)
