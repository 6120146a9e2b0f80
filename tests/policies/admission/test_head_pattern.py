"""Test head patterns: which heads keep everything, and which patterns are refused."""

import os
from typing import Any

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.policies import HeadPattern, make_policy
from kvjax.policies.admission.head_pattern import choose_heads, whole_count
from kvjax.policies.admission.pattern_folder import write_pattern
from tests.policies.admission.admitted import kept
from tests.policies.steps import step

PUBLISHED = os.environ.get("KVJAX_DUO_ATTENTION", "")
WEIGHTS = np.array([[0.9, 0.1, 0.5, 0.0], [0.2, 1.0, 0.3, 0.6], [0.0, 0.0, 0.7, 0.1]])


def pattern_of(pattern, **arguments):
    made: Any = HeadPattern(pattern, **{"sink": 2, "window": 5} | arguments)
    return made.pattern


def test_head_pattern_keeps_whole_heads_and_sinks(tmp_path, model):
    write_pattern(tmp_path, WEIGHTS, 2, 5)
    policy = make_policy({"head_pattern": {"pattern": tmp_path}}, model=model)
    assert policy.window == 5
    np.testing.assert_array_equal(
        kept(policy, step([[1, 2]]), 1)[0], [[True, False], [True, True], [True, False], [True, True]]
    )


def test_the_heads_of_lowest_weight_stream_in_any_layer():
    """A third of the twelve heads keep everything: those of weight 1.0, 0.9, 0.7 and 0.6."""
    expected = np.zeros((3, 4), bool)
    expected[[1, 0, 2, 1], [1, 0, 2, 3]] = True
    np.testing.assert_array_equal(pattern_of(WEIGHTS, sparsity=2 / 3), expected)
    np.testing.assert_array_equal(pattern_of(WEIGHTS), WEIGHTS >= 0.5)
    assert pattern_of(WEIGHTS, sparsity=0).all()
    assert not pattern_of(WEIGHTS, sparsity=1).any()


def test_heads_of_equal_weight_are_chosen_in_order():
    np.testing.assert_array_equal(choose_heads(np.zeros((2, 2)), 2), [[True, True], [False, False]])
    tied = np.array([[0.5, 0.9], [0.5, 0.5]])
    np.testing.assert_array_equal(pattern_of(tied, sparsity=0.5), [[True, True], [False, False]])


def test_the_number_of_heads_has_no_binary_rounding_error():
    """The count equals `int(heads · (1 − sparsity))` in exact arithmetic, for every share in thousandths."""
    for heads in (10, 12, 90, 256, 1000):
        for share in range(1001):
            assert whole_count(heads, share / 1000) == heads * (1000 - share) // 1000
    assert whole_count(256, 0.7) == 76
    assert whole_count(10, 0.9) == 1, "10 · (1 − 0.9) is below 1 in binary"
    assert whole_count(10, float(np.float32(0.1))) == 9


def test_log_alphas_rank_heads_by_the_folders_sparsity(tmp_path):
    """All weights are below 0 or above 1, so weights clipped to [0, 1] could not be ranked."""
    weights = np.array([[-4.5, -3.0, 9.5, 1.2], [4.0, -5.0, 7.0, -0.5]])
    write_pattern(tmp_path, weights, 2, 5, sparsity=0.5)
    made: Any = HeadPattern(tmp_path)
    assert (made.sparsity, made.window, int(made.sink)) == (0.5, 5, 2)
    np.testing.assert_array_equal(made.pattern, [[False, False, True, True], [True, False, True, False]])
    np.testing.assert_array_equal(
        pattern_of(tmp_path, sparsity=0.25), np.isin(weights, (-4.5, -5.0), invert=True)
    )


def test_a_table_of_0_and_1_fixes_its_sparsity(tmp_path):
    r"""The file has PruLong's published form: whole numbers, and lines that end in \r\n."""
    (tmp_path / "config.json").write_text('{"sink_size": 128, "recent_size": 1024}\n')
    (tmp_path / "full_attention_heads.tsv").write_bytes(b"1\t0\t0\t0\r\n0\t0\t1\t0\r\n0\t0\t0\t1\r\n")
    expected = np.zeros((3, 4), bool)
    expected[[0, 1, 2], [0, 2, 3]] = True
    # int(12 · 0.3) and int(12 · 0.25) are both 3
    for sparsity in (None, 0.7, 0.75):
        np.testing.assert_array_equal(pattern_of(tmp_path, sparsity=sparsity), expected)
    with pytest.raises(UserError) as caught:
        HeadPattern(tmp_path, sparsity=0.5)
    assert str(caught.value) == (
        "head_pattern: a pattern of 0 and 1 has a fixed sparsity, here 0.75 (3 of 12 heads keep everything), got "
        "sparsity=0.5"
    )
    assert pattern_of(np.ones((3, 4)), sparsity=0).all()


@pytest.mark.skipif(not PUBLISHED, reason="KVJAX_DUO_ATTENTION is not set")
def test_the_published_pattern_of_llama_31_8b():
    """The pattern is mit-han-lab/duo-attention's for Llama-3.1-8B-Instruct: of its 256 heads 234 have at least 0.5, 57
    have 1."""
    made: Any = HeadPattern(PUBLISHED)
    assert (made.pattern.shape, made.pattern.sum(), int(made.sink), made.window) == ((32, 8), 234, 128, 256)
    weights = np.loadtxt(f"{PUBLISHED}/full_attention_heads.tsv")
    for sparsity, count in ((0.5, 128), (0.7, 76), (0.9, 25)):
        chosen = pattern_of(PUBLISHED, sparsity=sparsity)
        assert chosen.sum() == count
        assert weights[chosen].min() >= weights[~chosen].max()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pattern": "nowhere"}, "nowhere is no head pattern"),
        ({"pattern": np.zeros((3, 4)), "sink": None}, "needs sink and window"),
        ({"pattern": np.zeros((3, 5))}, "made for 3 layers × 5 kv heads"),
        ({"pattern": WEIGHTS, "sparsity": 2.0}, "sparsity must be a finite number, at least 0 and at most 1, got 2.0"),
        ({"pattern": WEIGHTS, "sparsity": -0.1}, "sparsity must be a finite number, at least 0 and at most 1"),
        ({"pattern": WEIGHTS, "ratio": 0.3}, "head_pattern has no argument 'ratio'"),
        ({"pattern": WEIGHTS - 3}, "without a sparsity weights must be from 0 to 1, got -3 to -2: give"),
    ],
)  # fmt: skip
def test_invalid_arguments_give_one_line_errors(model, arguments, message):
    with pytest.raises(UserError, match=message):
        make_policy({"head_pattern": {"sink": 1, "window": 3} | arguments}, model=model)
