"""Names and flat arguments of `make_policy` against the objects they stand for, and what it refuses."""

import jax
import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.policies import (
    H2O,
    POLICIES,
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
)
from kvjax.policies.eviction.wrapper import Wrapper
from kvjax.policies.interfaces import Eviction
from kvjax.policies.make import check_names, make_ahead
from kvjax.struct import static, struct
from tests.tasks.model_tokenizers import byte_tokenizer
from tests.tiny_models import TRAINED, tiny_gates, tiny_model


@struct
class Twice(Wrapper):
    """An eviction's scores, several times as large."""

    times: float = static(default=2.0)

    @property
    def traced(self):
        return self

    def score(self, state, stored):
        return self.times * self.eviction.score(state, stored)


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
        lambda: Policy(HeadPattern(RATES, sparsity=0.5, sink=1), window=3),
        lambda: make_policy("head_pattern", pattern=RATES, sparsity=0.5, sink=1, window=3),
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
        lambda: make_policy("adakv", eviction="snapkv:observed=6", ratio=0.3),
    ),
    "adakv over others": (
        lambda: Policy(eviction=Adaptive(ExpectedAttention(epsilon=0.01), pinned=0.5), budget=Ratio(0.3)),
        lambda: make_policy("adakv", eviction="expected_attention:epsilon=0.01", pinned=0.5, ratio=0.3),
    ),
    "adakv whose shares are named again": (
        lambda: Policy(eviction=Adaptive(TOVA(), pinned=0.3), budget=Ratio(0.3)),
        lambda: make_policy("adakv:eviction=tova,over=model,pinned=0.3", over="layer", ratio=0.3),
    ),
    "pyramidkv": (
        lambda: Policy(eviction=Pyramid(KNorm(), beta=4.0), budget=Entries(9), when=EveryChunk(16)),
        lambda: make_policy("pyramidkv", eviction=KNorm(), beta=4.0, entries=9, when="chunk", chunk=16),
    ),
    "adakv of a pyramid": (
        lambda: Policy(eviction=Adaptive(Pyramid(SnapKV(6), 2.0)), budget=Ratio(0.4)),
        lambda: make_policy("adakv:eviction=(pyramidkv:eviction=snapkv:observed=6,beta=2.0)", ratio=0.4),
    ),
    "critical_kv": (
        lambda: Policy(eviction=CriticalKV(SnapKV()), budget=Ratio(0.4)),
        lambda: make_policy("critical_kv", ratio=0.4),
    ),
    "adakv of critical_kv": (
        lambda: Policy(eviction=Adaptive(CriticalKV(TOVA(), first_stage=0.2)), budget=Ratio(0.4)),
        lambda: make_policy("adakv", eviction="critical_kv:eviction=tova,first_stage=0.2", ratio=0.4),
    ),
    "arguments of one name, inside and outside": (
        lambda: Policy(eviction=CriticalKV(ExpectedAttention(epsilon=0.5), epsilon=0.25), budget=Ratio(0.4)),
        lambda: make_policy("critical_kv", eviction="expected_attention:epsilon=0.5", epsilon=0.25, ratio=0.4),
    ),
    "adakv of tova over a window": (
        lambda: Policy(StreamingLLM(), 8, Adaptive(TOVA(), over="layer", pinned=0.1), Ratio(0.4)),
        lambda: make_policy("streaming_llm", window=8, eviction="adakv:eviction=tova,pinned=0.1", ratio=0.4),
    ),
    "another package's around an eviction": (
        lambda: Policy(name=f"{__name__}:Twice", eviction=Twice(KNorm(), times=3.0), budget=Ratio(0.4)),
        lambda: make_policy(f"{__name__}:Twice", eviction="knorm", times=3.0, ratio=0.4),
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
    "two ratios": (
        lambda: Policy(Random(ratio=0.5), 8, KNorm(), Ratio(0.25)),
        lambda: make_policy("random:ratio=0.5", window=8, eviction="knorm", ratio=0.25),
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


LEAST = {
    "full": {},
    "streaming_llm": {},
    "wgkv": {"window": 8},
    "head_pattern": {"pattern": RATES, "window": 8, "sink": 2},
    "random": {"rates": RATES, "window": 8},
    "kvpop": {},
    "kvzip": {"ratio": 0.5, "instruction": [9], "resumption": [8]},
    "oraclekv": {"ratio": 0.5, "guidance": [9]},
    "quest": {"tokens": 32},
}
"""The least that a policy must be told, beside gates; evictions a budget."""


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_is_made_without_a_model_waits_for_one(model, name):
    told = LEAST.get(name, {"ratio": 0.5}) | (TRAINED[name](model) if name in TRAINED else {})
    placed, made = make_policy(name, **told).for_model(model), make_policy(name, model=model, **told)
    assert repr(placed) == repr(made)
    assert jax.tree.structure(placed) == jax.tree.structure(made)
    for one, other in zip(jax.tree.leaves(placed), jax.tree.leaves(made), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)


def test_a_method_that_has_texts_read_is_given_the_tokenizer(model):
    """Wherever it stands; until there is one nothing is made ahead."""
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=258)
    for name, more in {
        "kvzip": {},
        "adakv": {"eviction": "kvzip:prefix=3"},
        "critical_kv": {"eviction": "kvzip"},
    }.items():
        assert make_ahead(name, ratio=0.5, **more) is None
        policy = make_ahead(name, ratio=0.5, tokenizer=tokenizer, **more)
        made = make_policy(name, ratio=0.5, model=model, tokenizer=tokenizer, **more)
        for one in (policy, made):
            (first, *_) = one.eviction.passes(np.arange(9))
            assert tokenizer.decode(first.tokens).startswith("\n\nRepeat the previous")
        with pytest.raises(UserError, match="kvzip needs tokenizer="):
            make_policy(name, ratio=0.5, model=model, **more)
    for name, more in {"oraclekv": {}, "tova": {"guidance": "T1"}}.items():
        assert make_ahead(name, ratio=0.5, **more) is None
        policy = make_ahead(name, ratio=0.5, tokenizer=tokenizer, **more)
        assert tokenizer.decode(policy.when.guidance).startswith("\n\nNext, you will be")
    # others have no use for it
    assert repr(make_policy("knorm", ratio=0.5, tokenizer=tokenizer)) == repr(make_policy("knorm", ratio=0.5))


def test_streaming_llm_has_the_paper_s_size():
    """Table 1 of arXiv:2309.17453: 4 + 1020."""
    policy = make_policy("streaming_llm")
    assert policy.expected_entries(5000, 1).item() == 4 + 1020 - 1  # the window has the query's own token
    assert make_policy("streaming_llm", window=9).window == 9


def test_gates_are_an_admission_whose_window_is_the_policy_s(model):
    gates = tiny_gates(model)
    composed = Policy(WGKV(gates, tau=0.2, window=7), eviction=KNorm(), budget=Entries(30))
    named = make_policy(admission=WGKV(gates, tau=0.2), window=7, eviction="knorm", entries=30)
    assert composed.name == named.name == "wgkv+knorm"
    assert composed.window == named.window == 7
    assert jax.tree.structure(composed.traced) == jax.tree.structure(named.traced)
    assert make_policy("wgkv", gates=gates, window=7, eviction="knorm", entries=30).name == "wgkv+knorm"


def test_another_package_s_method_is_a_class_by_its_module_and_name():
    path = "kvjax.policies.eviction.snapkv:SnapKV"
    assert repr(make_policy(f"{path}:pool=3", ratio=0.5)) == repr(make_policy("snapkv", pool=3, ratio=0.5))
    beside = make_policy("streaming_llm", window=70, eviction=f"{path}:observed=9", entries=80)
    assert beside.plan is not None
    assert beside.plan.observed == 9


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: make_policy("snapkv:pool", ratio=0.5), "snapkv: pool: expected NAME=VALUE"),
        (lambda: make_policy("snapkv:pool=3", pool=5, ratio=0.5), "snapkv is given pool twice"),
        (
            lambda: make_policy("adakv:eviction=tova", eviction="knorm", ratio=0.5),
            "adakv is given eviction twice",
        ),
        (
            lambda: make_policy("adakv", observed=16, ratio=0.5),
            "adakv has no argument 'observed'; it has eviction, over, pinned, ratio, entries, size, threshold, when, "
            "chunk, every, drop, observers, guidance, first, last; the nearest: observers",
        ),
        (
            lambda: make_policy("full", selection="quest:tokenz=5"),
            "quest has no argument 'tokenz'; it has tokens, ratio, skip; the nearest: tokens",
        ),
        (
            lambda: make_policy("wgkv", gates="builtin", eviction="snapkv", observed=8, ratio=0.5),
            "wgkv has no argument 'observed'; it has gates, tau, rate, window, ratio, entries, size, threshold, when, "
            "chunk, every, drop, observers, guidance, over, pinned, first, last; the nearest: observers",
        ),
        (lambda: make_policy("full", ratio=0.5), "full has no argument 'ratio'; it has window"),
        (
            lambda: make_policy("snapkv", compression_ratio=0.5),
            "snapkv has no argument 'compression_ratio'; kvpress's share that goes is here the share that stays, ratio "
            "= 1 − compression_ratio",
        ),
        (
            lambda: make_policy("streaming_llm", compression_ratio=0.5),
            "streaming_llm has no argument 'compression_ratio'; it has sink, streaming, window",
        ),
        (
            lambda: make_policy("snapkv", window=32, ratio=0.5),
            "snapkv has no argument 'window'; last tokens that are always visible are window, those that an eviction "
            "looks back at observed",
        ),
        (lambda: make_policy("SnapKVPress"), "unknown policy 'SnapKVPress'; the nearest known: snapkv"),
        (
            lambda: make_policy("DuoAttentionPress"),
            "unknown policy 'DuoAttentionPress'; here it is head_pattern, whose pattern= may be a folder of "
            "DuoAttention's",
        ),
        (
            lambda: make_policy("prulong"),
            "unknown policy 'prulong'; here it is head_pattern, whose pattern= may be a folder that kvjax.train "
            "--method prulong leaves",
        ),
        (
            lambda: make_policy("observed_attention", ratio=0.5),
            "unknown policy 'observed_attention'; here the nearest is h2o, which sums the attention that "
            "ObservedAttention averages over the queries that see an entry, and leaves half of its budget to the "
            "newest (none with recent=0)",
        ),
        (lambda: make_policy("", ratio=0.5), f"unknown policy ''; the nearest known: {', '.join(POLICIES)}"),
        (
            lambda: check_names("adakv", eviction="tova:obs=3", ratio=0.5),
            "tova has no argument 'obs'; it has none",
        ),
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


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("wgvk", {}, "unknown policy 'wgvk'; the nearest known: wgkv"),
        ("streaming_llm", {"window": 4, "sinks": 3}, "no argument 'sinks'"),
        ("wgkv", {}, "wgkv needs gates"),
    ],
)  # fmt: skip
def test_mistakes_are_named_in_one_line(model, name, arguments, says):
    with pytest.raises(UserError, match=says) as caught:
        make_policy(name, model=model, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "snapkv"}, "snapkv needs a budget: one of ratio, entries, size, threshold"),
        (
            {"name": "snapkv", "ratio": 0.5, "entries": 8},
            "a budget is one of ratio, entries, size, threshold, got",
        ),
        (
            {"name": "snapkv", "ratio": 1.5},
            "budget: ratio must be a finite number, above 0 and at most 1, got 1.5",
        ),
        ({"name": "snapkv", "entries": 0}, "entries must be a whole number of at least 1, got 0"),
        ({"name": "snapvk", "ratio": 0.5}, "unknown policy 'snapvk'; the nearest known: snapkv"),
        (
            {"name": "adakv", "eviction": "knrm", "ratio": 0.5},
            "unknown eviction 'knrm'; the nearest known: knorm",
        ),
        (
            {"name": "adakv", "pinned": 2.0, "ratio": 0.5},
            "budget: pinned must be a finite number, at least 0 and at most 1, got 2.0",
        ),
        (
            {"name": "pyramidkv", "beta": 0.5, "ratio": 0.5},
            "pyramidkv: beta must be a finite number, above 1, got 0.5",
        ),
        (
            {"name": "random", "eviction": "knorm", "ratio": 0.5, "window": 9},
            "random: give either ratio (one number) or rates (layers × kv heads)",
        ),
        (
            {"name": "random", "eviction": "knorm", "ratio": 0.5, "window": 9},
            "; ratio=0.5 is the eviction's here, its own goes behind its name: random:ratio=…",
        ),
        (
            {"name": "quest", "eviction": "knorm", "ratio": 0.5},
            "; ratio=0.5 is the eviction's here, its own goes behind its name: quest:ratio=…",
        ),
        (
            {"name": "adakv", "eviction": "tova", "beta": 4.0, "ratio": 0.5},
            "adakv has no argument 'beta'; it has eviction, over, pinned, ratio, entries",
        ),
        (
            {"name": "adakv", "eviction": "critical_kv:over=model", "ratio": 0.5},
            "critical_kv has no argument 'over'; it has eviction, first_stage, epsilon",
        ),
        ({"name": "snapkv", "over": "row", "ratio": 0.5}, "over is one of head, layer, model, got 'row'"),
        ({"name": "snapkv", "ratio": 0.5, "window": 9}, "snapkv has no argument 'window'"),
        (
            {"name": "streaming_llm", "eviction": "snapkv", "window": 9, "ratio": 0.5},
            "snapkv looks back at the last 64 tokens, which must still be in the window: window must be at "
            "least 64, got 9",
        ),
        (
            {"name": "wgkv", "eviction": "adavk", "ratio": 0.5},
            "unknown eviction 'adavk'; the nearest known: adakv",
        ),
        ({"name": "knorm", "ratio": 0.5, "last": -1}, "last must be a whole number of at least 0, got -1"),
        (
            {"name": "knorm", "admission": "random", "eviction": "snapkv", "ratio": 0.5},
            "knorm is an eviction itself, got eviction='snapkv' beside it",
        ),
        (
            {"name": "full", "admission": "random"},
            "full is an admission itself, got admission='random' beside it",
        ),
        (
            {"name": "snapkv", "admission": "streaming_llm", "window": 1, "ratio": 0.5},
            "must still be in the window: window must be at least 64, got 1",
        ),
    ],
)
def test_bad_policies_are_one_line(model, arguments, says):
    with pytest.raises(UserError) as error:
        make_policy(model=model, **arguments)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_policy_is_called_by_all_its_methods():
    """As the objects' is; a wrapper stands for what it holds."""
    gates = {"gates": "builtin"}
    assert make_policy("wgkv", eviction="knorm", ratio=0.5, **gates).name == "wgkv+knorm"
    assert make_policy("full", eviction="snapkv", ratio=0.5).name == "snapkv"
    assert make_policy("adakv", eviction="tova", selection="quest:tokens=9", ratio=0.5).name == "adakv+quest"
    assert make_policy(admission="streaming_llm", window=9).name == "streaming_llm"


class Unfinished(Eviction):
    """An eviction without a score."""


class Bare(KNorm):
    """A method without @struct."""

    power: float = 1.0


@pytest.mark.parametrize(
    ("brought", "says"),
    [
        (f"{__name__}:Unfinished", "Unfinished does not define score"),
        (f"{__name__}:Bare", "Bare needs @struct (kvjax.struct) above its class"),
        ("kvjax.policies.interfaces:Method", "Method must be an Admission, an Eviction or a Selection"),
        (
            "builtins:dict",
            "expected a method's class, a function that makes a policy, or a recipe, got <class 'dict'>",
        ),
        (
            f"{__name__}:RATES",
            "expected a method's class, a function that makes a policy, or a recipe, got array",
        ),
    ],
)
def test_what_another_package_brings_unfinished_is_one_line(brought, says):
    with pytest.raises(UserError) as error:
        make_policy(brought, ratio=0.5)
    assert says in str(error.value)
    assert str(error.value).startswith(f"policy {brought}: ")
    assert "\n" not in str(error.value)
