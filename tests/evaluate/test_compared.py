"""Tests of the policies that are compared: each can be made for a budget, and budgets share programs."""

import dataclasses
import itertools
import re
from typing import Any

import jax
import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.evaluate.compared import compared_policies, parse_compared
from kvjax.evaluate.config import ANSWERING, POLICIES, parse
from kvjax.evaluate.gates import choose_default_policies
from kvjax.evaluate.run import reading_key
from kvjax.evaluate.sizing import Sizing, budget_policy, policy_of
from kvjax.models.chat import encode
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.kvpop import save_scorers
from kvjax.policies.admission.pattern_folder import write_pattern
from kvjax.policies.admission.wgkv import save_gates
from kvjax.policies.eviction import fast_kvzip
from tests.tasks.model_tokenizers import byte_tokenizer
from tests.tiny_models import tiny_gates, tiny_model, tiny_scorers, tiny_sink_gates


class Tokenizer:
    """A tokenizer that encodes every text in three tokens."""

    def __call__(self, text, **options):
        return {"input_ids": [1, 2, 3]}

    def decode(self, tokens):
        return ""


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def gates(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gates")
    described = {"tau": 0.5, "window": 9, "rate": np.linspace(0, 1, 12).reshape(3, 4).tolist()}
    save_gates(folder, tiny_gates(model), described)
    return str(folder)


@pytest.fixture(scope="module")
def gates_of(model, gates, tmp_path_factory):
    """Return a function that returns the folder of the gates that a policy takes."""
    folder = tmp_path_factory.mktemp("fast_kvzip")
    fast_kvzip.save_gates(folder, tiny_sink_gates(model), {"opening": [1, 2, 3, 4, 5]})
    scorers = tmp_path_factory.mktemp("kvpop")
    save_scorers(scorers, tiny_scorers(model), {"max_entries": 99, "sink": 2, "window": 9})
    folders = {"fast_kvzip": str(folder), "kvpop": str(scorers)}
    return lambda compared: folders.get(compared.gated_method, gates)


GATED = POLICIES[-2]
EVERY = (
    *dict.fromkeys((*POLICIES, *ANSWERING)),
    *(
        "snapkv:adakv",
        "snapkv:critical_kv",
        "tova",
        "h2o",
        "knorm",
        "random_eviction",
        "snapkv:when=position",
    ),
)


def sizing_of(compared, model, ratio, gates_of):
    """Return the sizing for a context, or for a contest's longer answers."""
    tokens, shortest = (1024, 1024) if compared.evicts_while_decoding else (128, 120)
    return Sizing(model, ratio, tokens, shortest, 32, 4, gates_of(compared), tokenizer=Tokenizer)


@pytest.mark.parametrize("text", EVERY)
def test_a_budget_is_met_and_another_budget_shares_its_program(text, model, gates_of):
    compared = parse_compared(text)
    policies: list[Any] = [
        budget_policy(compared, sizing_of(compared, model, ratio, gates_of)) for ratio in (0.25, 0.5)
    ]
    small = policies[0]
    if text.startswith(("streaming_llm", "head_pattern")):
        # the budget sets the width of the window
        means = [p.expected_entries(128, 1).mean() for p in policies]
        assert means == pytest.approx([32, 64], abs=1)
        return
    compiled = [policy.compile(model) for policy in policies]
    views = [
        (views_of_policy.read, views_of_policy.extend, views_of_policy.decode, views_of_policy.compact)
        for views_of_policy in compiled
    ]
    shapes = [jax.tree.map(jax.typeof, jax.tree.leaves(views_of_policy)) for views_of_policy in views]
    assert shapes[0] == shapes[1]
    assert jax.tree.structure(views[0]) == jax.tree.structure(views[1])
    if small.schedule is not None and compared.evicts_while_decoding:
        assert [policy.schedule.budget.entries for policy in policies] == [256, 512]
        assert (small.schedule.trigger.when, small.schedule.trigger.every) == ("position", 128)
    elif small.schedule is not None:
        assert [policy.schedule.budget.ratio for policy in policies] == [0.25, 0.5]
        trigger = small.schedule.trigger
        assert trigger.when == ("chunk" if "when=chunk" in text or text == "fast_kvzip" else "prompt")
        assert trigger.patched == ("observers=prompt" in text)
        assert trigger.chunk == (32 if trigger.in_chunks else 0)
    elif small.max_entries is not None:
        assert [policy.admission.max_entries for policy in policies] == [32, 64]
    elif small.selection is not None:
        assert [float(policy.selection.ratio) for policy in policies] == [0.25, 0.5]
    else:
        assert not compared.takes_budget or compared.searches_tau


@pytest.mark.parametrize("text", [x for x in EVERY if not x.endswith(":calibrated")])
def test_the_evaluation_completes_policy_strings(text, model, gates_of):
    compared = parse_compared(text)
    policy = budget_policy(compared, dataclasses.replace(sizing_of(compared, model, 0.25, gates_of), seed=7))
    assert policy.name.partition("+")[0].partition(":")[0] == re.split("[+:]", text)[0]
    if "snapkv" in text:
        assert policy.schedule.needs.observed == 4
    if text == "random_eviction":
        assert int(policy.eviction.seed) == 7
    if text == GATED:
        assert policy.schedule.shares.over == "model"
        assert (policy.eviction.eviction.group, policy.eviction.eviction.pooling) == ("max", "max")


@pytest.mark.parametrize(
    "text",
    [
        "snapkv:ratio=0.3",
        "h2o:when=chunk,entries=40",
        "quest:tokens=9",
        "streaming_llm:window=30",
        "full:window=9",
    ],
)
def test_a_policy_with_its_own_budget_is_measured_once(text, model):
    compared = parse_compared(text)
    assert not compared.takes_budget
    policies = [budget_policy(compared, Sizing(model, ratio, 128, 120, 32, 4)) for ratio in (0.5, 1.0)]
    assert repr(policies[0]) == repr(policies[1])


def test_policies_may_be_mappings_with_labels(tmp_path, model):
    file = tmp_path / "compared.yaml"
    file.write_text(
        "policies:\n"
        "  SnapKV in AdaKV: {snapkv: {observed: 9, adakv: {pinned: 0.3}}}\n"
        "  Quest: quest:ratio=0.5\n"
        "  full: {full: null}\n"
        "  τ searched: {wgkv: {calibrated: true}}\n"
    )
    found = compared_policies(parse(["--config", str(file), "--out", str(tmp_path)]))
    assert {one.label: one.text for one in found} == {
        "SnapKV in AdaKV": "snapkv:observed=9,adakv.pinned=0.3",
        "Quest": "quest:ratio=0.5",
        "full": "full",
        "τ searched": "wgkv:calibrated",
    }
    policy = budget_policy(found[0], Sizing(model, 0.25, 128, 120, 32, 4))
    assert (policy.schedule.needs.observed, policy.schedule.shares.pinned) == (9, 0.3)
    file.write_text("budgets: {a: 0.3}\n")
    with pytest.raises(UserError, match="budgets must be a value or a list of values"):
        parse(["--config", str(file), "--out", str(tmp_path)])


def test_the_prefix_comes_from_the_string_the_chat_template_or_the_gates(model, gates_of):
    sizing = Sizing(
        model, 0.5, 128, 120, 32, 4, gates_of(parse_compared("fast_kvzip")), tokenizer=byte_tokenizer
    )
    opening = encode(byte_tokenizer(), "", "beginning")
    for text, prefix in {"fast_kvzip": len(opening), "fast_kvzip:prefix=3": 3}.items():
        schedule = budget_policy(parse_compared(text), sizing).schedule
        assert schedule.needs.prefix_of(np.array([*opening, 7])) == prefix
    without = dataclasses.replace(sizing, tokenizer=lambda: None)
    assert budget_policy(parse_compared("fast_kvzip"), without).schedule.needs.prefix_of(np.arange(1, 9)) == 5


def test_no_more_tokens_are_observed_than_the_gates_window_has(model, gates):
    for observed, expected in ((4, 4), (9, 9), (32, 9)):
        sizing = Sizing(model, 0.25, tokens=128, shortest=120, chunk=64, observed=observed, gates=gates)
        schedule = budget_policy(parse_compared("wgkv+snapkv"), sizing).schedule
        assert schedule is not None
        assert schedule.needs.observed == expected


def test_policies_that_share_a_reading_read_alike(model, gates_of):
    """Policies that are read together have the same window and admission at every budget. Only observation and counts
    may differ."""
    alike: dict[object, list[Any]] = {}
    names: dict[object, set[str]] = {}
    for text, ratio in itertools.product(EVERY, (0.25, 0.5)):
        compared = parse_compared(text)
        sizing = sizing_of(compared, model, ratio, gates_of)
        policy = budget_policy(compared, sizing)
        if not compared.calibrated and (reading := reading_key(compared, policy, sizing.gates)):
            alike.setdefault(reading, []).append(policy.compile(model).read)
            names.setdefault(reading, set()).add(text)
    apart = {"streaming_llm", "oraclekv", "kvpop", "wgkv"}
    assert [*names.values()] == [
        {x for x in EVERY if not x.endswith("calibrated") and "when=" not in x and "wgkv" not in x}
        - {*apart, "fast_kvzip"},
        {GATED, "wgkv+quest"},
    ]
    for first, *others in alike.values():
        for other in others:
            assert other.window == first.window
            assert jax.tree.structure(other.admission) == jax.tree.structure(first.admission)
            same = [jax.tree.leaves(policy.admission) for policy in (first, other)]
            assert all(np.array_equal(compared, two) for compared, two in zip(*same, strict=True))


def test_default_policies_of_contests_keep_a_budget_while_decoding():
    assert all(parse_compared(text).runs_on_contests for text in ANSWERING)
    assert not any(parse_compared(text).evicts_while_decoding for text in POLICIES)
    arguments = "--out", "out", "--tasks", "aime_2024", "hmmt_feb_2025"
    assert choose_default_policies(parse(arguments)).policies == tuple(
        text for text in ANSWERING if text != "kvpop"
    )
    policies = choose_default_policies(parse([*arguments, "--policies", "full", "wgkv"])).policies
    assert policies == ("full", "wgkv"), "said to be wrong only later"


def test_a_budget_below_the_protected_entries_is_refused(model, gates_of):
    compared = parse_compared("fast_kvzip:when=position")
    sizing = Sizing(model, 0.25, 528, 528, 32, 4, gates_of(compared))
    assert budget_policy(compared, sizing).schedule.budget.entries == 132
    message = (
        "fast_kvzip:when=position at 0.25 of 524 tokens: .* of 131 entries per kv head is below the 132 that"
    )
    with pytest.raises(UserError, match=message):
        budget_policy(compared, dataclasses.replace(sizing, tokens=524, shortest=524))


def test_default_policies_without_gates_are_left_out():
    def left_out(*args):
        config = parse(["--out", "out", *args])
        return set(config.policies) - set(choose_default_policies(config).policies)

    gated = {"wgkv:calibrated", "wgkv", GATED, "wgkv+quest"}
    assert left_out() == {"kvpop"}, "its models are trained for it"
    lines = []
    policies = choose_default_policies(parse(["--out", "out"]), lines.append).policies
    assert lines == ["not compared, since --gates has no gates for them: kvpop"]
    assert len([text for text in policies if text.startswith("head_pattern:gates=")]) == 2
    assert left_out("--model", "a/model") == {*gated, "fast_kvzip", "kvpop"}
    assert left_out("--model", "a/model", "--gates", "builtin:fast_kvzip", "--policies", "wgkv") == set()
    assert left_out("--model", "a/model", "--gates", "builtin:fast_kvzip") == {*gated, "kvpop"}


def test_a_budget_is_checked_against_the_shortest_context(model, gates):
    # 0.25 · 40 entries hold the window's 8 entries, 0.25 · 20 do not
    compared = parse_compared("wgkv+snapkv")
    budget_policy(compared, Sizing(model, 0.25, 128, 40, 32, 4, gates))
    with pytest.raises(UserError, match="does not hold its window of 9"):
        budget_policy(compared, Sizing(model, 0.25, 128, 20, 32, 4, gates))


def test_learned_heads_are_whole_in_order_up_to_the_budget(model, tmp_path):
    """Streaming heads have the folder's sinks, and a window of at least the folder's."""
    weights = np.random.default_rng(0).permutation(12).reshape(3, 4) - 6.0
    write_pattern(tmp_path, weights, 3, 9, sparsity=0.7)
    compared, counts = parse_compared(f"head_pattern:gates={tmp_path}"), []
    assert compared.takes_budget
    for ratio in (0.25, 0.5, 0.75):
        policy = budget_policy(compared, Sizing(model, ratio, 128, 120, 32, 4))
        whole = np.asarray(policy.admission.pattern)
        counts.append(int(whole.sum()))
        assert weights[whole].min() > weights[~whole].max()
        assert (np.asarray(policy.admission.sink) == 3).all()
        assert policy.window >= 9
    assert 0 < counts[0] < counts[1] < counts[2] < 12


def test_a_pattern_with_a_sparsity_ignores_the_budget(model, tmp_path):
    """The order, sinks and window of the pattern are used, whatever the budget."""
    shape = model.config.num_layers, model.config.num_kv_heads
    weights = np.arange(float(np.prod(shape))).reshape(shape)
    write_pattern(tmp_path, weights, 3, 9, sparsity=0.5)
    compared = parse_compared(f"head_pattern:sparsity=.75,gates={tmp_path}")
    assert not compared.takes_budget
    policy = policy_of(compared, Sizing(model, 0.5, 128, 120, 32, 4))
    np.testing.assert_array_equal(policy.admission.pattern, weights >= 0.75 * weights.size)
    assert (np.asarray(policy.admission.sink) == 3).all()
    assert policy.window == 9


def test_a_binary_pattern_is_refused_for_a_budget(model, tmp_path):
    write_pattern(tmp_path, np.eye(3, 4), 4, 16)
    with pytest.raises(UserError, match="0 and 1 does not order .* use it as head_pattern:sparsity=0.75"):
        budget_policy(parse_compared(f"head_pattern:gates={tmp_path}"), Sizing(model, 0.5, 128, 120, 32, 4))


def brought(*, model: Any = None, pool: int = 5) -> Policy:
    """Return a policy, as a function of another package would."""
    return make_policy("full", model=model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snap:pool=7", "--policies snap:pool=7: unknown method 'snap'"),
        ("snapkv:pool", "--policies snapkv:pool: snapkv: got pool without a value"),
        ("snapkv:pol=7", "--policies snapkv:pol=7: snapkv has no argument 'pol'"),
        ("snapkv:adakv.observed=7", "adakv has no argument 'observed'; it has over, pinned"),
        (
            "snapkv:calibrated",
            "got calibrated in snapkv, expected it in streaming_llm, head_pattern or wgkv, alone",
        ),
        (
            "wgkv:calibrated+quest",
            "got calibrated in wgkv+quest, expected it in streaming_llm, head_pattern or wgkv",
        ),
        ("head_pattern:calibrated,sink=3", "got sink with calibrated, which chooses it"),
        ("wgkv:tau=.9,calibrated", "got tau with calibrated, which chooses it"),
        ("{1", "--policies {1: "),
        ('{"a": "snapkv", "b": "h2o"}', "expected one label and its policy, got 2: give each its own object"),
        (f"{__name__}:brought:pol=5", "has no argument 'pol'; it has pool"),
    ],
)
def test_invalid_policies_are_refused_in_one_line(text, message):
    """The policy is refused before there is a model."""
    with pytest.raises(UserError) as caught:
        parse_compared(text)
    assert message in str(caught.value)
