"""Objects that hold objects, and the names that `make_policy` has for them."""

import dataclasses

import jax
import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.mesh import use_mesh
from kvjax.policies import (
    H2O,
    RKV,
    TOVA,
    WGKV,
    Adaptive,
    AtPrompt,
    CriticalKV,
    Entries,
    Every,
    EveryChunk,
    ExpectedAttention,
    Full,
    HeadPattern,
    KeyDiff,
    KNorm,
    Overflow,
    Policy,
    Protected,
    Pyramid,
    Quest,
    Random,
    Ratio,
    Size,
    SnapKV,
    StreamingLLM,
    Threshold,
    make_policy,
)  # fmt: skip
from kvjax.policies.registry import ADMISSIONS, EVICTIONS, SELECTIONS
from kvjax.step import Shape
from tests.tiny_models import tiny_gates, tiny_model

RATES = np.linspace(0, 1, 12).reshape(3, 4)
SAME = {
    "full": (lambda: Policy(), lambda: make_policy()),
    "full, named": (lambda: Policy(Full(), window=9), lambda: make_policy("full", window=9)),
    "streaming_llm": (
        lambda: Policy(StreamingLLM(sink=2), window=8),
        lambda: make_policy("streaming_llm", sink=2, window=8),
    ),
    "random": (
        lambda: Policy(Random(rates=RATES, seed=3), window=8),
        lambda: make_policy("random", rates=RATES, seed=3, window=8),
    ),
    "random by ratio": (
        lambda: Policy(Random(ratio=0.5), window=8),
        lambda: make_policy(admission="random:ratio=0.5", window=8),
    ),
    "head_pattern": (
        lambda: Policy(HeadPattern(RATES, ratio=0.5, sink=1), window=3),
        lambda: make_policy("head_pattern", pattern=RATES, ratio=0.5, sink=1, window=3),
    ),
    "quest": (lambda: Policy(selection=Quest(ratio=0.25)), lambda: make_policy("quest", ratio=0.25)),
    "snapkv": (
        lambda: Policy(eviction=SnapKV(6, pool=7, pooling="max", group="max"), budget=Ratio(0.3)),
        lambda: make_policy("snapkv", observed=6, pool=7, pooling="max", group="max", ratio=0.3),
    ),
    "snapkv's strings": (
        lambda: Policy(eviction=SnapKV(6, group="max"), budget=Size("1KiB")),
        lambda: make_policy(eviction="snapkv:observed=6,group=max", size=1024),
    ),
    "adakv": (
        lambda: Policy(eviction=Adaptive(SnapKV(6)), budget=Ratio(0.3), when=AtPrompt()),
        lambda: make_policy("adakv", observed=6, ratio=0.3),
    ),
    "adakv over others": (
        lambda: Policy(eviction=Adaptive(ExpectedAttention(epsilon=0.01), pinned=0.5), budget=Ratio(0.3)),
        lambda: make_policy("adakv", eviction="expected_attention:epsilon=0.01", pinned=0.5, ratio=0.3),
    ),
    "pyramidkv": (
        lambda: Policy(eviction=Pyramid(KNorm(), beta=4.0), budget=Entries(9), when=EveryChunk(16)),
        lambda: make_policy("pyramidkv", eviction=KNorm(), pyramid=4.0, entries=9, when="chunk", chunk=16),
    ),
    "adakv of a pyramid": (
        lambda: Policy(eviction=Adaptive(Pyramid(SnapKV(6), 2.0)), budget=Ratio(0.4)),
        lambda: make_policy("adakv", observed=6, pyramid=2.0, ratio=0.4),
    ),
    "critical_kv": (
        lambda: Policy(eviction=CriticalKV(SnapKV()), budget=Ratio(0.4)),
        lambda: make_policy("critical_kv", ratio=0.4),
    ),
    "adakv of critical_kv": (
        lambda: Policy(eviction=Adaptive(CriticalKV(TOVA(), first_stage=0.2)), budget=Ratio(0.4)),
        lambda: make_policy("adakv", eviction="tova", critical=True, first_stage=0.2, ratio=0.4),
    ),
    "critical_kv of expected attention": (
        lambda: Policy(eviction=CriticalKV(ExpectedAttention(values=False)), budget=Ratio(0.4)),
        lambda: make_policy("critical_kv", eviction="expected_attention", ratio=0.4),
    ),
    "over the model, protected": (
        lambda: Policy(
            eviction=Protected(Adaptive(KeyDiff(), over="model", pinned=0.0), first=4, last=2), budget=Threshold(-0.5)
        ),
        lambda: make_policy("keydiff", over="model", first=4, last=2, threshold=-0.5),
    ),
    "h2o": (
        lambda: Policy(eviction=H2O(recent=0.2), budget=Entries(64), when=Every(16), selection=Quest(tokens=32)),
        lambda: make_policy(
            "h2o", recent=0.2, entries=64, when="every", every=16, selection="quest:tokens=32"
        ),
    ),
    "three methods": (
        lambda: Policy(
            StreamingLLM(), 8, RKV(sink=4), Entries(64), Overflow(drop=0.2), Quest(tokens=32, skip=1)
        ),
        lambda: make_policy(
            admission="streaming_llm", window=8, eviction="r_kv:sink=4", entries=64, when="overflow", drop=0.2,
            selection="quest:tokens=32,skip=1",
        ),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", SAME)
def test_objects_are_what_names_and_flat_arguments_make(name):
    composed, named = (make() for make in SAME[name])
    assert repr(composed) == repr(named)
    assert (composed.name, composed.plan) == (named.name, named.plan)
    assert jax.tree.structure(composed) == jax.tree.structure(named)
    for one, other in zip(leaves(composed), leaves(named), strict=True):
        np.testing.assert_array_equal(one, other)


def test_gates_are_an_admission_whose_window_is_the_policy_s(model):
    gates = tiny_gates(model)
    composed = Policy(WGKV(gates, tau=0.2, window=7), eviction=KNorm(), budget=Entries(30))
    named = make_policy(admission=WGKV(gates, tau=0.2), window=7, eviction="knorm", entries=30)
    assert composed.name == named.name == "wgkv+knorm"
    assert composed.window == named.window == 7
    assert jax.tree.structure(composed.traced) == jax.tree.structure(named.traced)
    assert make_policy("wgkv", gates=gates, window=7, eviction="knorm", entries=30).name == "wgkv"


@pytest.mark.parametrize(
    ("policy", "written"),
    [
        (Policy(), "Policy()"),
        (Policy(StreamingLLM(sink=1), 8), "Policy(StreamingLLM(sink=1), window=8)"),
        (Policy(Random(ratio=0.25), 8), "Policy(Random(rates=0.25), window=8)"),
        (Policy(Random(rates=RATES), 8), "Policy(Random(rates=float32[3, 4]), window=8)"),
        (
            Policy(StreamingLLM(), 80, Adaptive(SnapKV()), Entries(100)),
            "Policy(StreamingLLM(), window=80, eviction=Adaptive(SnapKV()), budget=Entries(100))",
        ),
        (
            Policy(eviction=Protected(RKV(balance=0.1), first=2), budget=Ratio(0.5), when=Every(every=9)),
            "Policy(eviction=Protected(RKV(balance=0.1), first=2), budget=Ratio(0.5), when=Every(every=9))",
        ),
        (Policy(selection=Quest(tokens=64, skip=2)), "Policy(selection=Quest(tokens=64, skip=2))"),
    ],
)
def test_a_policy_is_shown_as_it_is_written(policy, written):
    assert repr(policy) == written
    with use_mesh():
        assert repr(policy.placed(3, 4)) == written


def test_a_method_s_numbers_do_not_fill_the_screen(model):
    gated = Policy(
        WGKV(tiny_gates(model), tau=0.5, window=16), eviction=KNorm(), budget=Size("2MiB"), when=Overflow()
    )
    assert repr(gated) == ("Policy(WGKV(tau=0.5), eviction=KNorm(), budget=Size(2097152), when=Overflow())")


NEEDED = {
    "wgkv": {"gates": "builtin"},
    "head_pattern": {"pattern": RATES, "sink": 1},
    "random": {"ratio": 0.5},
    "quest": {"tokens": 8},
}


@pytest.mark.parametrize("name", [*ADMISSIONS, *EVICTIONS, *SELECTIONS])
def test_every_method_is_made_without_a_model_and_made_again_alike(name):
    """Its name is that of the registry, and a copy is what it was."""
    kind = (ADMISSIONS | EVICTIONS | SELECTIONS)[name]
    method = kind(**NEEDED.get(name, {}))
    assert method.label == name
    if name in SELECTIONS:
        return
    again = dataclasses.replace(method)
    for one, other in zip(leaves(method), leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)
    # the memory of two kv heads is as large as twice that of one, or does not depend on them
    one, two = (
        jax.eval_shape(lambda heads=heads: method.init(Shape(3, heads, 2, 8, np.float32))) for heads in (1, 2)
    )
    for small, large in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert large.size in (small.size, 2 * small.size)
        assert small.shape[0] == large.shape[0] == 3


def test_budgets_moments_and_who_shares_are_not_compiled():
    """One program for all of them: it sees the method within, without what the host reads."""
    policies = [
        Policy(eviction=SnapKV(6), budget=Ratio(0.5)),
        Policy(eviction=Adaptive(SnapKV(6), pinned=0.4), budget=Entries(40)),
        Policy(eviction=Protected(Pyramid(SnapKV(6)), last=9), budget=Size(4096), when=EveryChunk(64)),
        Policy(eviction=SnapKV(6), budget=Entries(50), when=Overflow(drop=0.3)),
    ]
    assert len({jax.tree.structure(policy.traced) for policy in policies}) == 1
    for one, other in ((H2O(), H2O(recent=0.1)), (RKV(), RKV(sink=4, balance=0.1))):
        assert jax.tree.structure(one.traced) == jax.tree.structure(other.traced)
    assert policies[2].plan is not None
    assert (policies[2].plan.last, policies[2].plan.first, policies[2].plan.shares.pyramid) == (9, 0, 20.0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Policy(eviction=SnapKV()), "a budget is one of ratio, entries, size and threshold, got none"),
        (lambda: Policy(budget=Ratio(0.5)), "full: budget=Ratio(0.5) is for an eviction, and there is none"),
        (lambda: Policy(StreamingLLM()), "streaming_llm: window must be a whole number of at least 1, got None"),
        (
            lambda: Policy(StreamingLLM(), 9, SnapKV(), Ratio(0.5)),
            "streaming_llm+snapkv looks back at the last 64 tokens, which must still be in the window: window must be "
            "at least 64, got 9",
        ),
        (
            lambda: Policy(eviction=Adaptive(KNorm()), budget=Entries(9), when=Overflow()),
            "when='overflow' takes a share of every head's own entries: over, pinned, pyramid say nothing",
        ),
        (
            lambda: Policy(eviction=Adaptive(CriticalKV(KNorm())), budget=Threshold(0.0)),
            "adakv: critical_kv shares out the places of a budget, and a threshold has none",
        ),
        (lambda: Adaptive(KNorm(), over="row"), "budget: over is one of head, layer, model, got 'row'"),
        (lambda: Pyramid(KNorm(), beta=1.0), "budget: pyramid must be a finite number, above 1, got 1.0"),
        (lambda: Protected(KNorm(), first=-1), "eviction: first must be a whole number of at least 0, got -1"),
        (lambda: Size("2GiG"), "budget: size must be a whole number of at least 1, got '2GiG'"),
        (lambda: make_policy("snapkv:pool", ratio=0.5), "snapkv: pool: expected NAME=VALUE"),
        (lambda: make_policy("snapkv:pool=3", pool=5, ratio=0.5), "snapkv is given pool twice"),
        (
            lambda: make_policy("full", selection="quest:tokenz=5"),
            "quest has no argument 'tokenz'; it has tokens, ratio, skip",
        ),
        (
            lambda: make_policy("wgkv", gates="builtin", eviction="snapkv", observed=8, ratio=0.5),
            "wgkv has no argument 'observed'; it has gates, tau, rate, window, ratio, entries, size, threshold, when, "
            "chunk, every, drop, observers, over, pinned, pyramid, critical, first_stage, first, last",
        ),
        (lambda: make_policy("full", ratio=0.5), "full has no argument 'ratio'; it has window"),
        (
            lambda: make_policy("quest", tokens=8, selection=Quest(tokens=9)),
            "quest is a selection itself, got selection=Quest(tokens=9) beside it",
        ),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused_in_one_line(make, says):
    with pytest.raises(UserError) as error:
        make()
    assert str(error.value) == says


def test_another_package_s_method_is_a_class_by_its_module_and_name():
    path = "kvjax.policies.eviction.snapkv:SnapKV"
    assert repr(make_policy(f"{path}:pool=3", ratio=0.5)) == repr(make_policy("snapkv", pool=3, ratio=0.5))
    beside = make_policy("streaming_llm", window=70, eviction=f"{path}:observed=9", entries=80)
    assert beside.plan is not None
    assert beside.plan.observed == 9
