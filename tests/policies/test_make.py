"""Test policy strings and mappings against the objects that they stand for, and the errors for invalid ones."""

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
    CriticalKV,
    Entries,
    ExpectedAttention,
    Full,
    HeadPattern,
    KeyDiff,
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
from kvjax.policies.base import Eviction
from kvjax.policies.eviction.wrapper import Wrapper, innermost
from kvjax.policies.make import check_policy, format_policy, parse_policy
from kvjax.struct import static, struct
from tests.tasks.model_tokenizers import byte_tokenizer
from tests.tiny_models import TRAINED, tiny_gates, tiny_model, tiny_scorers


@struct
class Twice(Wrapper):
    """A wrapper that multiplies an eviction's scores."""

    times: float = static(default=2.0)

    def score(self, state, stored):
        return self.times * self.eviction.score(state, stored)


RATES = np.linspace(0, 1, 12).reshape(3, 4)
POLICIES_BY_TEXT = {
    "full": lambda: Policy(),
    "full:window=9": lambda: Policy(Full(), window=9),
    "streaming_llm:sink=2,window=8": lambda: Policy(StreamingLLM(sink=2), window=8),
    "random:ratio=0.5,window=8": lambda: Policy(Random(ratio=0.5), window=8),
    "quest:ratio=.25": lambda: Policy(selection=Quest(ratio=0.25)),
    "snapkv:observed=6,pool=7,pooling=max,group=max,ratio=0.3": lambda: Policy(
        eviction=SnapKV(6, pool=7, pooling="max", group="max"), schedule=Schedule(Ratio(0.3))
    ),
    "snapkv:observed=6,size=1KiB": lambda: Policy(eviction=SnapKV(6), schedule=Schedule(Size("1KiB"))),
    "snapkv:observed=6,ratio=0.3,when=prompt,adakv": lambda: Policy(
        eviction=Adaptive(SnapKV(6)), schedule=Schedule(Ratio(0.3), Trigger())
    ),
    "knorm:entries=9,when=chunk,chunk=16,pyramidkv.beta=4": lambda: Policy(
        eviction=Pyramid(KNorm(), beta=4.0), schedule=Schedule(Entries(9), Trigger("chunk", chunk=16))
    ),
    "snapkv:observed=6,ratio=0.4,pyramidkv.beta=2.0,adakv": lambda: Policy(
        eviction=Adaptive(Pyramid(SnapKV(6), 2.0)), schedule=Schedule(Ratio(0.4))
    ),
    "snapkv:observed=6,ratio=0.4,adakv,pyramidkv.beta=2.0": lambda: Policy(
        eviction=Pyramid(Adaptive(SnapKV(6)), 2.0), schedule=Schedule(Ratio(0.4))
    ),
    "expected_attention:epsilon=0.5,critical_kv.epsilon=0.25,ratio=0.4": lambda: Policy(
        eviction=CriticalKV(ExpectedAttention(epsilon=0.5), epsilon=0.25), schedule=Schedule(Ratio(0.4))
    ),
    "expected_attention:ratio=0.4,critical_kv": lambda: Policy(
        eviction=CriticalKV(ExpectedAttention(values=False)), schedule=Schedule(Ratio(0.4))
    ),
    "tova:ratio=0.4,adakv.pinned=0.1 + streaming_llm:window=8": lambda: Policy(
        StreamingLLM(), 8, Adaptive(TOVA(), over="layer", pinned=0.1), Schedule(Ratio(0.4))
    ),
    f"knorm:{__name__}:Twice.times=3.0,ratio=0.4": lambda: Policy(
        eviction=Twice(KNorm(), times=3.0), schedule=Schedule(Ratio(0.4))
    ),
    "keydiff:threshold=-0.5,adakv.over=model,adakv.pinned=0.0,protected.first=4,protected.last=2": lambda: Policy(
        eviction=Protected(Adaptive(KeyDiff(), over="model", pinned=0.0), first=4, last=2),
        schedule=Schedule(Threshold(-0.5)),
    ),
    "random:ratio=0.5,window=8+knorm:ratio=0.25": lambda: Policy(
        Random(ratio=0.5), 8, KNorm(), Schedule(Ratio(0.25))
    ),
    "h2o:recent=0.2,entries=64,when=every,every=16+quest:tokens=32": lambda: Policy(
        eviction=H2O(recent=0.2), schedule=Schedule(Entries(64), Trigger("every", every=16)), selection=Quest(tokens=32)
    ),
    "quest:tokens=32,skip=1+streaming_llm:window=8+r_kv:sink=4,entries=64,when=overflow,drop=0.2": lambda: Policy(
        StreamingLLM(), 8, RKV(sink=4), Schedule(Entries(64), Trigger("overflow", drop=0.2)), Quest(tokens=32, skip=1)
    ),
}  # fmt: skip


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("text", POLICIES_BY_TEXT)
def test_strings_and_mappings_make_the_same_policies_as_objects(text):
    composed = POLICIES_BY_TEXT[text]()
    for policy in (make_policy(text), make_policy(parse_policy(text)), make_policy(composed)):
        assert repr(composed) == repr(policy)
        assert (composed.name, composed.schedule) == (policy.name, policy.schedule)
        assert jax.tree.structure(composed) == jax.tree.structure(policy)
        for one, other in zip(leaves(composed), leaves(policy), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_mapping_takes_arrays():
    arguments = {"random": {"rates": RATES, "seed": 3, "window": 8}, "head_pattern": {"sink": 1, "window": 3}}
    composed = Policy(Random(rates=RATES, seed=3), window=8)
    named = make_policy({"random": arguments["random"]})
    np.testing.assert_array_equal(named.admission.rates, composed.admission.rates)
    assert repr(named) == repr(composed)
    composed = Policy(HeadPattern(RATES, sparsity=0.5, sink=1), window=3)
    assert repr(composed) == repr(
        make_policy({"head_pattern": arguments["head_pattern"] | {"sparsity": 0.5}}, gates=RATES)
    )


def test_values_are_numbers_words_lists_and_quoted_texts():
    text = (
        'x:a=.2,b=2.,c=-1e-3,d=1E+3,e=4,f=true,g=null,h=max,i=1.2.3,j=[1, 2],k=a b,l="a, b+c",m=x=y,n.o=1,p'
    )
    (arguments,) = parse_policy(text).values()
    assert arguments == {
        "a": 0.2, "b": 2.0, "c": -0.001, "d": 1000.0, "e": 4, "f": True, "g": None, "h": "max", "i": "1.2.3",
        "j": [1, 2], "k": "a b", "l": "a, b+c", "m": "x=y", "n": {"o": 1}, "p": {},
    }  # fmt: skip
    assert type(arguments["e"]) is int
    assert parse_policy(format_policy({"x": arguments})) == {"x": arguments}
    arguments = {"y": {"a": "1", "b": "true", "c": " z", "d": '"', "e": [], "f": "", "g": "a+b", "h": "1+2"}}
    assert parse_policy(format_policy(arguments)) == arguments


def test_wrappers_of_a_mapping_may_have_no_arguments():
    wanted = repr(make_policy("snapkv:ratio=0.5,adakv"))
    for empty in ({}, None, True):
        assert repr(make_policy({"snapkv": {"ratio": 0.5, "adakv": empty}})) == wanted
    assert repr(make_policy({"full": None})) == repr(make_policy({"full": {}})) == repr(Policy())


REQUIRED = {
    "full": {},
    "streaming_llm": {},
    "wgkv": {"window": 8},
    "head_pattern": {"pattern": RATES, "window": 8, "sink": 2},
    "random": {"rates": RATES, "window": 8},
    "kvpop": {},
    "kvzap": {"threshold": -4.0},
    "kvzip": {"ratio": 0.5, "instruction": [9], "resumption": [8]},
    "oraclekv": {"ratio": 0.5, "guidance": [9]},
    "quest": {"tokens": 32},
}
"""The required arguments of each policy, besides gates; other evictions need only a budget."""


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_made_without_a_model_compiles_the_same(model, name):
    arguments = REQUIRED.get(name, {"ratio": 0.5}) | (TRAINED[name](model) if name in TRAINED else {})
    without_model, made = make_policy({name: arguments}), make_policy({name: arguments}, model=model)
    assert repr(without_model) == repr(made)
    hosts = [policy.compile(model).host for policy in (without_model, made)]
    assert jax.tree.structure(hosts[0]) == jax.tree.structure(hosts[1])
    for one, other in zip(*map(jax.tree.leaves, hosts), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)


def test_methods_that_read_texts_get_the_tokenizer(model):
    """Without a tokenizer the policy is only parsed."""
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=258)
    for text in ("kvzip:ratio=0.5", "kvzip:ratio=0.5,prefix=3,adakv"):
        check_policy(text)
        check_policy(text, model.config, tokenizer=tokenizer)
        policy = make_policy(text, model=model, tokenizer=tokenizer)
        (first, *_) = innermost(policy.eviction).passes(np.arange(9))
        assert tokenizer.decode(first.tokens).startswith("\n\nRepeat the previous")
        with pytest.raises(UserError, match="kvzip needs tokenizer="):
            make_policy(text, model=model)
    for text in ("oraclekv:ratio=0.5", "oraclekv:ratio=0.5,adakv", "tova:ratio=0.5,guidance=T1"):
        check_policy(text)
        policy = make_policy(text, tokenizer=tokenizer)
        assert tokenizer.decode(policy.schedule.trigger.guidance).startswith("\n\nNext, you will be")
    # other methods do not use it
    assert repr(make_policy("knorm:ratio=0.5", tokenizer=tokenizer)) == repr(make_policy("knorm:ratio=0.5"))


def test_streaming_llm_has_the_papers_size():
    """The size is that of Table 1 of arXiv:2309.17453: 4 + 1020."""
    policy = make_policy("streaming_llm")
    assert (
        policy.expected_entries(5000, 1).item() == 4 + 1020 - 1
    )  # the query's own token is part of the window
    assert make_policy("streaming_llm:window=9").window == 9


def test_gates_go_to_the_method_without_gates(model):
    gates, scorers = tiny_gates(model), tiny_scorers(model)
    composed = Policy(WGKV(gates, tau=0.2, window=7), eviction=KNorm(), schedule=Schedule(Entries(30)))
    named = make_policy("wgkv:tau=0.2,window=7+knorm:entries=30", gates=gates)
    assert composed.name == named.name == "wgkv+knorm"
    assert composed.window == named.window == 7
    views = [policy.compile(model).read for policy in (composed, named)]
    assert jax.tree.structure(views[0]) == jax.tree.structure(views[1])
    assert make_policy("kvpop", gates=scorers).admission.scorers is scorers
    assert make_policy({"kvpop": {"gates": scorers}}).admission.scorers is scorers
    for text, given in (
        ("snapkv:ratio=0.5", gates),
        ("wgkv+fast_kvzip:ratio=0.5", gates),
        ("wgkv:gates=builtin", gates),
    ):
        with pytest.raises(
            UserError, match="^gates: got .*, expected one method that takes gates and has none in"
        ):
            make_policy(text, gates=given)
    with pytest.raises(UserError, match="^gates: got .* with a Policy object, expected None"):
        make_policy(named, gates=gates)


def test_a_class_of_another_package_is_named_by_module_and_name():
    path = "kvjax.policies.eviction.snapkv:SnapKV"
    assert repr(make_policy(f"{path}:pool=3,ratio=0.5")) == repr(make_policy("snapkv:pool=3,ratio=0.5"))
    policy = make_policy(f"streaming_llm:window=70+{path}:observed=9,entries=80")
    assert policy.schedule is not None
    assert policy.schedule.needs.observed == 9


BUDGETS = "ratio, entries, size, threshold"
OF_SNAPKV = (
    f"it has observed, pool, pooling, group, {BUDGETS}, when, chunk, every, drop, observers, guidance, positions, "
    "adakv, pyramidkv, critical_kv, protected, refit"
)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("snapkv", f"snapkv needs a budget: one of {BUDGETS}"),
        ("snapkv:ratio=0.5,entries=8", f"a budget is one of {BUDGETS}, got {{'entries': 8, 'ratio': 0.5}}"),
        ("snapkv:ratio=1.5", "budget: ratio must be a finite number, above 0 and at most 1, got 1.5"),
        ("snapkv:pool", "snapkv: got pool without a value, expected pool=VALUE"),
        ("snapkv:pool=", "snapkv: got 'pool=', expected field=value or a wrapper's name"),
        ("snapkv:pool=3,pool=5", "snapkv: got pool twice, expected each argument once"),
        ("snapkv:adakv.over=head,adakv.over=model", "snapkv: got adakv.over twice, expected each argument once"),
        ("snapkv:ratio=0.5+snapkv:ratio=0.4", "policy: got snapkv twice, expected each method once"),
        ("snapkv:ratio=0.5+tova:ratio=0.4", "policy: got snapkv and tova, expected one eviction"),
        ("full+random:ratio=0.5", "policy: got full and random, expected one admission"),
        ("snapkv:obsrved=16", f"snapkv has no argument 'obsrved'; {OF_SNAPKV}; the nearest: observed, observers"),
        ("snapkv:adkv,ratio=0.5", f"snapkv has no argument 'adkv'; {OF_SNAPKV}; the nearest: adakv, pyramidkv"),
        ("tova:ratio=0.5,adakv.beta=4", "adakv has no argument 'beta'; it has over, pinned"),
        ("tova:ratio=0.5,adakv.over=row", "budget: over is one of head, layer, model, got 'row'"),
        ("quest:tokenz=5", "quest has no argument 'tokenz'; it has tokens, ratio, skip; the nearest: tokens"),
        ("full:ratio=0.5", "full has no argument 'ratio'; it has window, positions"),
        ("snapkv:window=32,ratio=0.5", "snapkv has no argument 'window': it is the admission's, full:window=32+snapkv"),
        ("adakv:ratio=0.5", "adakv wraps an eviction: write it among its arguments, snapkv:adakv"),
        ("wgkv:adakv", "adakv wraps an eviction, which wgkv is not: write snapkv:adakv"),
        ("wgvk", "unknown method 'wgvk'; the nearest known: wgkv"),
        ("SnapKVPress:ratio=0.5", "unknown method 'SnapKVPress'; the nearest known: snapkv"),
        ("", "unknown method '': expected METHOD:ARGUMENT=VALUE, such as kvzip:ratio=0.3, with one of the methods "
         f"{', '.join(POLICIES)}"),
        ("wgkv", "wgkv needs gates; gates=FOLDER, or gates=builtin for the built-in model"),
        ("random:window=9+knorm:ratio=0.5", "random: give either ratio (one number) or rates (layers × kv heads)"),
        ("streaming_llm:window=9+snapkv:ratio=0.5", "snapkv looks back at the last 64 tokens, which must "
         "still be in the window: window must be at least 64, got 9"),
        ("knorm:ratio=0.5,protected.last=-1", "eviction: last must be a whole number of at least 0, got -1"),
        ("snapkv:ratio=0.5,every=4", "every=4 needs when='every' or 'position'"),
    ],
)  # fmt: skip
def test_invalid_policies_give_one_line_errors(model, policy, message):
    with pytest.raises(UserError) as error:
        make_policy(policy, model=model)
    assert str(error.value) == message


def test_a_policys_name_lists_its_methods_and_wrappers():
    for text, name in {
        "wgkv:gates=builtin+knorm:ratio=0.5": "wgkv+knorm",
        "full+snapkv:ratio=0.5": "snapkv",
        "quest:tokens=9+tova:ratio=0.5,critical_kv,adakv": "tova:critical_kv,adakv+quest",
        "streaming_llm:window=9": "streaming_llm",
    }.items():
        assert make_policy(text).name == name


class Unfinished(Eviction):
    """An eviction without a score."""


class Bare(KNorm):
    """A method without @struct."""

    power: float = 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{__name__}:Unfinished", "Unfinished does not define score"),
        (f"{__name__}:Bare", "Bare needs @struct (kvjax.struct) above its class"),
        ("kvjax.policies.base:Method", "Method must be an Admission, an Eviction or a Selection"),
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
def test_invalid_methods_of_other_packages_give_one_line_errors(name, message):
    with pytest.raises(UserError) as error:
        make_policy({name: {"ratio": 0.5}})
    assert message in str(error.value)
    assert str(error.value).startswith(f"policy {name}: ")
