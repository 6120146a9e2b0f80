"""Test how a policy is composed, shown, compiled and sized, and which parts do not go together."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.inference import prefill
from kvjax.mesh import HEADS, P, make_mesh, use_mesh
from kvjax.policies import (
    H2O,
    RKV,
    WGKV,
    Adaptive,
    CriticalKV,
    Entries,
    KNorm,
    Policy,
    Protected,
    Pyramid,
    Quest,
    Random,
    Ratio,
    Schedule,
    Size,
    SnapKV,
    StreamingLLM,
    Threshold,
    Trigger,
    make_policy,
)
from kvjax.policies.compiled import compile_policy, on_mesh
from kvjax.struct import changed
from tests.inference.counting import START, admitted, counting
from tests.inference.delayed import delayed
from tests.tiny_models import tiny_gates

RATES = np.linspace(0, 1, 12).reshape(3, 4)


@pytest.mark.parametrize(
    ("policy", "written"),
    [
        (Policy(), "Policy()"),
        (Policy(StreamingLLM(sink=1), 8), "Policy(StreamingLLM(sink=1), window=8)"),
        (Policy(Random(ratio=0.25), 8), "Policy(Random(rates=0.25), window=8)"),
        (Policy(Random(rates=RATES), 8), "Policy(Random(rates=float32[3, 4]), window=8)"),
        (
            Policy(StreamingLLM(), 80, Adaptive(SnapKV()), Schedule(Entries(100))),
            "Policy(StreamingLLM(), window=80, eviction=Adaptive(SnapKV()), schedule=Schedule(Entries(100)))",
        ),
        (
            Policy(
                eviction=Protected(RKV(balance=0.1), first=2),
                schedule=Schedule(Ratio(0.5), Trigger("every", every=9)),
            ),
            "Policy(eviction=Protected(RKV(balance=0.1), first=2), "
            "schedule=Schedule(Ratio(0.5), trigger=Trigger(when='every', every=9)))",
        ),
        (Policy(selection=Quest(tokens=64, skip=2)), "Policy(selection=Quest(tokens=64, skip=2))"),
    ],
)
def test_the_repr_is_the_constructor_call(policy, written):
    assert repr(policy) == written
    with use_mesh():
        assert repr(on_mesh(policy, 3, 4)) == written


def test_the_repr_omits_a_methods_arrays(model):
    gated = Policy(
        WGKV(tiny_gates(model), tau=0.5, window=16),
        eviction=KNorm(),
        schedule=Schedule(Size("2MiB"), Trigger("overflow")),
    )
    assert repr(gated) == (
        "Policy(WGKV(tau=0.5), eviction=KNorm(), "
        "schedule=Schedule(Size(2097152), trigger=Trigger(when='overflow', drop=0.1)))"
    )


def test_policies_with_different_schedules_share_programs():
    """All of these policies share one program: it sees only the method within, without the fields that the host
    reads."""
    policies = [
        Policy(eviction=SnapKV(6), schedule=Schedule(Ratio(0.5))),
        Policy(eviction=Adaptive(SnapKV(6), pinned=0.4), schedule=Schedule(Entries(40))),
        Policy(
            eviction=Protected(Pyramid(SnapKV(6)), last=9),
            schedule=Schedule(Size(4096), Trigger("chunk", chunk=64)),
        ),
        Policy(eviction=SnapKV(6), schedule=Schedule(Entries(50), Trigger("overflow", drop=0.3))),
    ]
    with use_mesh():
        compiled = [compile_policy(policy, 3, 4) for policy in policies]
    assert len({jax.tree.structure((views.read, views.compact)) for views in compiled}) == 1
    for one, other in ((H2O(), H2O(recent=0.1)), (RKV(), RKV(sink=4, balance=0.1))):
        assert jax.tree.structure(one.traced) == jax.tree.structure(other.traced)
    schedule = policies[2].schedule
    assert schedule is not None
    assert (schedule.needs.last, schedule.needs.first, schedule.shares.pyramid) == (9, 0, 20.0)


def test_evictions_that_observe_no_tokens_share_the_full_caches_program(model):
    """Both share one compiled program; KeyDiff scores the stored entries, while SnapKV must observe queries."""
    full, keydiff, snapkv = (
        make_policy({name: arguments}, model=model).compile(model).read
        for name, arguments in (("full", {}), ("keydiff", {"ratio": 0.5}), ("snapkv", {"ratio": 0.5}))
    )
    assert jax.tree.structure(keydiff) == jax.tree.structure(full)
    assert jax.tree.structure(snapkv) != jax.tree.structure(full)


def test_expected_entries_count_sinks_and_window(model):
    assert make_policy("full").expected_entries(100, 1).item() == 100
    streaming = make_policy("streaming_llm:window=11,sink=4", model=model).compile(model).host
    np.testing.assert_array_equal(streaming.expected_entries(100, 1), np.full((3, 4), 14))
    np.testing.assert_array_equal(streaming.expected_entries(8, 1), np.full((3, 4), 8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Policy(schedule=Schedule(Ratio(0.5))),
            "full: schedule=Schedule(Ratio(0.5)) is for an eviction, and there is none",
        ),
        (lambda: Policy(Random(ratio=0.5)), "random needs window: how many of the last tokens are always visible"),
        (
            lambda: Policy(eviction=Adaptive(KNorm()), schedule=Schedule(Entries(9), Trigger("overflow"))),
            "when='overflow' drops a share of every head's own entries, so over, pinned and pyramid have no effect",
        ),
        (
            lambda: Policy(eviction=Adaptive(CriticalKV(KNorm())), schedule=Schedule(Threshold(0.0))),
            "knorm:critical_kv,adakv divides the places of a budget, and a threshold has none",
        ),
    ],
)  # fmt: skip
def test_parts_that_cannot_be_combined_give_one_line_errors(make, message):
    with pytest.raises(UserError) as error:
        make()
    assert str(error.value) == message


def test_a_window_shorter_than_the_observed_tokens_is_refused(model):
    make_policy("streaming_llm:sink=4,window=64+snapkv:ratio=0.5", model=model)
    with pytest.raises(UserError, match="window must be at least 64, got 63"):
        make_policy("streaming_llm:sink=4,window=63+snapkv:ratio=0.5", model=model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_entries": np.float32(8)}, "max_entries must be an array of whole numbers"),
        ({"max_entries": 8}, "max_entries must be an array of whole numbers, got 8"),
        ({"max_entries": np.array(-1)}, "max_entries must be at least 0"),
    ],
)
def test_invalid_max_entries_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        Policy(changed(delayed(window=6, max_entries=8).admission, **changes), window=6)


@pytest.mark.parametrize(
    ("start", "more"),
    [(START, 2.0), (START, 2), (START, np.float32(2)), (START, jnp.int32(2)), (jnp.asarray(START), 2)],
    ids=["float", "int", "NumPy's", "JAX's", "JAX's table"],
)
def test_a_methods_numbers_may_be_python_numpy_or_jax_numbers(model, start, more):
    """They are placed as NumPy's are: a number per layer, and a table split with its heads."""
    policy = counting(window=3, start=start, more=more)
    with jax.set_mesh(make_mesh(tensor=4)):
        placed: Any = on_mesh(policy.admission, 3, 4)
    np.testing.assert_array_equal(placed.start, START)
    np.testing.assert_array_equal(placed.more, [2, 2, 2])
    assert (placed.start.sharding.spec, placed.more.sharding.spec) == (P(None, HEADS), P())
    cache = prefill(model, [np.arange(9)], policy=policy)
    np.testing.assert_array_equal(cache.layers.length[:, 0], admitted(9, window=3))


def test_a_field_that_is_no_number_is_refused(model):
    with pytest.raises(UserError) as error:
        prefill(model, [[1]], policy=counting(window=3, more="two"))
    assert str(error.value) == (
        "policy counting: more must be a number or an array of numbers, or be declared static, got 'two'"
    )


def test_a_table_of_another_model_is_refused(model):
    with pytest.raises(UserError, match="start is made for 4 layers × 3 kv heads, the model has 3 × 4"):
        prefill(model, [[1]], policy=counting(window=3, start=jnp.asarray(START.T)))


def test_gates_on_a_single_device_are_moved_to_the_mesh(model):
    gates = tiny_gates(model)
    alone = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[0]), gates)
    expected, found = (
        prefill(model, [np.arange(9)], policy=Policy(WGKV(x, tau=0.5, window=3))).layers.length
        for x in (gates, alone)
    )
    np.testing.assert_array_equal(found, expected)
    assert 0 < expected.min() < expected.max()
