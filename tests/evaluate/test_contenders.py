"""The methods that are compared: each can be made for a budget, and budgets share programs."""

import dataclasses
import itertools
import re
from typing import Any

import jax
import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.evaluate.config import ANSWERING, POLICIES, parse
from kvjax.evaluate.contenders import CONTENDERS, LEARNED, Sizing, budget_policy, contender
from kvjax.evaluate.measuring import measured_alone
from kvjax.evaluate.run import with_gates
from kvjax.models.chat import encode
from kvjax.policies import Policy, make_policy
from kvjax.policies.admission.kvpop import save_scorers
from kvjax.policies.admission.pattern_folder import write_pattern
from kvjax.policies.admission.wgkv import save_gates
from kvjax.policies.eviction import fast_kvzip
from tests.tasks.model_tokenizers import byte_tokenizer
from tests.tiny_models import tiny_gates, tiny_model, tiny_scorers, tiny_sink_gates


class Tokenizer:
    """Every text in three tokens."""

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
    """The folder of gates that a contender takes."""
    folder = tmp_path_factory.mktemp("fast_kvzip")
    fast_kvzip.save_gates(folder, tiny_sink_gates(model), {"opening": [1, 2, 3, 4, 5]})
    scorers = tmp_path_factory.mktemp("kvpop")
    save_scorers(scorers, tiny_scorers(model), {"budget": 99, "sink": 2, "window": 9})
    heads = tmp_path_factory.mktemp("heads")
    write_pattern(heads, np.linspace(-5, 5, 12).reshape(3, 4), 4, 16, sparsity=0.7)
    own = {"fast_kvzip": str(folder), "kvpop": str(scorers)} | dict.fromkeys(LEARNED, str(heads))
    return lambda name: own.get(name.removesuffix("_decoding"), gates)


def sizing_of(name, model, ratio, gates_of):
    """Of a context, or of a contest's longer answers."""
    tokens, shortest = (1024, 1024) if contender(name).on == "contests" else (128, 120)
    return Sizing(model, ratio, tokens, shortest, 32, 4, gates_of(name), tokenizer=Tokenizer)


@pytest.mark.parametrize("name", CONTENDERS)
def test_a_budget_is_met_and_another_is_the_same_program(name, model, gates_of):
    policies: list[Any] = [
        budget_policy(name, sizing_of(name, model, ratio, gates_of)) for ratio in (0.25, 0.5)
    ]
    small, large = policies
    if name in ("streaming_llm", "head_pattern", *LEARNED):
        # the budget is a window's width
        means = [p.expected_entries(128, 1).mean() for p in policies]
        assert means == pytest.approx([32, 64], abs=1)
        return
    shapes = [jax.tree.map(jax.typeof, jax.tree.leaves(policy.traced)) for policy in policies]
    assert shapes[0] == shapes[1]
    assert jax.tree.structure(small.traced) == jax.tree.structure(large.traced)
    if small.plan is not None and contender(name).on == "contests":
        assert [policy.plan.budget.entries for policy in policies] == [256, 512]
        assert (small.plan.moment.when, small.plan.moment.every) == ("position", 128)
    elif small.plan is not None:
        way = name.rpartition("_")[2]
        budgets = [policy.plan.budget for policy in policies]
        if way == "constant":
            assert [budget.entries for budget in budgets] == [32, 64]
        else:
            assert [budget.ratio for budget in budgets] == [0.25, 0.5]
        schedule = small.plan.moment
        by_chunk = way in ("chunked", "patched", "constant") or name == "fast_kvzip"
        assert schedule.when == ("chunk" if by_chunk else "prompt")
        assert schedule.patched == (way == "patched")
        assert schedule.chunk == (32 if schedule.in_chunks else 0)
    elif small.most_stored is not None:
        assert [policy.admission.budget for policy in policies] == [32, 64]
    elif small.selection is not None:
        assert [float(policy.selection.ratio[0]) for policy in policies] == [0.25, 0.5]
    else:
        assert contender(name).one_size or contender(name).calibrated or contender(name).own_tau


def test_the_prefix_is_the_chat_templates_or_what_gates_were_trained_behind_unless_one_is_named(
    model, gates_of
):
    sizing = Sizing(model, 0.5, 128, 120, 32, 4, gates_of("fast_kvzip"), tokenizer=byte_tokenizer)
    opening = encode(byte_tokenizer(), "", "beginning")
    for name, prefix in {"fast_kvzip": len(opening), "fast_kvzip:prefix=3": 3}.items():
        eviction = budget_policy(name, sizing).eviction
        assert eviction.prefix_of(np.array([*opening, 7])) == prefix
    without = dataclasses.replace(sizing, tokenizer=lambda: None)
    assert budget_policy("fast_kvzip", without).eviction.prefix_of(np.arange(1, 9)) == 5


def test_behind_gates_no_more_is_observed_than_their_window_has(model, gates):
    for observed, expected in ((4, 4), (9, 9), (32, 9)):
        sizing = Sizing(model, 0.25, tokens=128, shortest=120, chunk=64, observed=observed, gates=gates)
        plan = budget_policy("wgkv+snapkv", sizing).plan
        assert plan is not None
        assert plan.observed == expected


def test_what_is_read_together_reads_alike(model, gates):
    """But for what looks at tokens or counts: the same window and admission, at every budget."""
    alike: dict[str, list[Any]] = {}
    for name, ratio in itertools.product(CONTENDERS, (0.25, 0.5)):
        if contender(name).reads:
            sizes = {"tokens": 128, "shortest": 120, "chunk": 32, "observed": 4}
            sizing = Sizing(model, ratio, **sizes, gates=gates, tokenizer=Tokenizer)
            policy = budget_policy(name, sizing)
            assert not measured_alone(policy), name
            alike.setdefault(contender(name).reads, []).append(policy.reading)
    assert set(alike) == {"all", "gates"}
    for first, *others in alike.values():
        for other in others:
            assert other.window == first.window
            assert jax.tree.structure(other.admission) == jax.tree.structure(first.admission)
            same = [jax.tree.leaves(policy.admission) for policy in (first, other)]
            assert all(np.array_equal(one, two) for one, two in zip(*same, strict=True))


def test_those_compared_by_default_exist_and_are_the_papers():
    """WG-KV's, PruLong's and KVzip's rivals; by chunk as PruLong compares them."""
    assert set(POLICIES) <= set(CONTENDERS)
    at_the_end = {
        "full",
        "streaming_llm",
        "head_pattern",
        "snapkv",
        "expected_attention",
        "keydiff",
        "r_kv",
        "oraclekv",
        "quest",
        "kvzip",
    }
    by_chunk = {"snapkv", "adakv", "pyramidkv", "expected_attention", "keydiff", "h2o"}
    patched = {"snapkv_patched", "pyramidkv_patched"}
    own = {"wgkv", "wgkv_fixed_tau", "wgkv+snapkv", "wgkv+quest", "fast_kvzip", "kvpop", *LEARNED}
    assert at_the_end | {f"{name}_chunked" for name in by_chunk} | patched | own == set(POLICIES)


def test_contests_are_compared_with_what_keeps_a_budget_while_it_answers():
    assert all(contender(name).on in ("both", "contests") for name in ANSWERING)
    assert {contender(name).on for name in POLICIES} == {"both", "contexts"}
    told = "--out", "out", "--tasks", "aime_2024", "hmmt_feb_2025"
    assert with_gates(parse(told)).policies == tuple(name for name in ANSWERING if name != "kvpop")
    own = with_gates(parse([*told, "--policies", "full", "wgkv"])).policies
    assert own == ("full", "wgkv"), "said to be wrong only later"


def test_what_always_stays_is_no_more_than_the_budget_of_an_answer(model, gates_of):
    sizing = Sizing(model, 0.25, 528, 528, 32, 4, gates_of("fast_kvzip"))
    assert budget_policy("fast_kvzip_decoding", sizing).plan.budget.entries == 132
    message = "fast_kvzip_decoding at 0.25 of 524 tokens: .* of 131 entries per kv head is below the 132 that"
    with pytest.raises(UserError, match=message):
        budget_policy("fast_kvzip_decoding", dataclasses.replace(sizing, tokens=524, shortest=524))


def test_of_those_compared_by_default_only_those_with_gates_are():
    def left_out(*args):
        config = parse(["--out", "out", *args])
        return set(config.policies) - set(with_gates(config).policies)

    gated = {"wgkv", "wgkv_fixed_tau", "wgkv+snapkv", "wgkv+quest"}
    assert left_out() == {"kvpop"}, "its models are trained for it"
    said = []
    with_gates(parse(["--out", "out"]), said.append)
    assert said == ["not compared, since --gates names nothing that was trained for them: kvpop"]
    assert left_out("--model", "a/model") == {*gated, "fast_kvzip", "kvpop", *LEARNED}
    assert left_out("--model", "a/model", "--gates", "builtin:fast_kvzip", "--policies", "wgkv") == set()
    assert left_out("--model", "a/model", "--gates", "builtin:fast_kvzip") == {*gated, "kvpop", *LEARNED}


@pytest.mark.parametrize("name", [n for n in CONTENDERS if n not in ("streaming_llm", "head_pattern")])
def test_each_is_the_method_of_its_name(name, model, gates_of):
    policy = budget_policy(name, dataclasses.replace(sizing_of(name, model, 0.25, gates_of), seed=7))
    method = re.sub("_(fixed_tau|chunked|constant|patched|decoding)$", "", name).partition("+")[0]
    named = policy.name.partition("+")[0].rpartition(":")[2]
    assert named == ("head_pattern" if method in LEARNED else method)
    if policy.plan is not None and method in ("snapkv", "pyramidkv", "adakv", "critical_kv"):
        assert policy.plan.observed == 4
    if contender(name).reads:  # read once, compacted at the end
        assert policy.plan is None or policy.plan.moment.when == "prompt"
    if name == "random_eviction":
        assert set(np.asarray(policy.eviction.seed).tolist()) == {7}
    if name == "wgkv+snapkv":
        assert policy.plan.shares.over == "model"
        assert (policy.eviction.eviction.group, policy.eviction.eviction.pooling) == ("max", "max")


def test_a_budget_is_checked_against_the_shortest_context(model, gates):
    # 0.25 · 40 hold a window's 8, 0.25 · 20 do not
    budget_policy("wgkv+snapkv", Sizing(model, 0.25, 128, 40, 32, 4, gates))
    with pytest.raises(UserError, match="does not hold its window of 9"):
        budget_policy("wgkv+snapkv", Sizing(model, 0.25, 128, 20, 32, 4, gates))


def test_a_name_may_be_followed_by_arguments(model, gates):
    sizing = Sizing(model, 0.25, 128, 120, 32, 4, gates)
    policy = budget_policy("snapkv:pool=7,group=max,observed=3", sizing)
    assert (policy.eviction.pool, policy.eviction.group, policy.plan.observed) == (7, "max", 3)
    assert policy.plan.budget.ratio == 0.25
    chunked = budget_policy("snapkv:when=chunk,chunk=16", sizing)
    assert (
        chunked.plan.moment
        == budget_policy("snapkv_chunked", dataclasses.replace(sizing, chunk=16)).plan.moment
    )
    assert not contender("snapkv:when=chunk,chunk=16").reads, (
        "it is read with others, and compacted at the end"
    )
    assert contender("wgkv+quest:skip=1").over_gates
    assert budget_policy("wgkv+snapkv:pool=9", sizing).eviction.eviction.pool == 9
    assert int(budget_policy("wgkv+quest:skip=1", sizing).selection.skip[0]) == 1
    repeating = budget_policy(
        "kvzip:adakv.over=layer,repeated=64", dataclasses.replace(sizing, tokenizer=Tokenizer)
    )
    assert (repeating.plan.shares.over, repeating.eviction.eviction.repeated) == ("layer", 64)
    assert repeating.eviction.eviction.tail == (1, 2, 3)


@pytest.mark.parametrize("name", LEARNED)
def test_learned_heads_are_whole_in_their_order_as_far_as_the_budget_goes(name, model, tmp_path):
    """Of those that stream the sinks are the folder's, the window at least the folder's."""
    weights = np.random.default_rng(0).permutation(12).reshape(3, 4) - 6.0
    write_pattern(tmp_path, weights, 3, 9, sparsity=0.7)
    counts = []
    for ratio in (0.25, 0.5, 0.75):
        sizing = Sizing(model, ratio, 128, 120, 32, 4, str(tmp_path))
        policy = budget_policy(name, sizing)
        whole = np.asarray(policy.admission.pattern)
        counts.append(int(whole.sum()))
        assert weights[whole].min() > weights[~whole].max()
        assert (np.asarray(policy.admission.sink) == 3).all()
        assert policy.window >= 9
    assert 0 < counts[0] < counts[1] < counts[2] < 12


def test_a_pattern_with_a_sparsity_is_taken_as_it_is(model, tmp_path):
    """Its order, sinks and window, whatever the budget; and it takes one folder."""
    shape = model.config.num_layers, model.config.num_kv_heads
    weights = np.arange(float(np.prod(shape))).reshape(shape)
    write_pattern(tmp_path, weights, 3, 9, sparsity=0.5)
    sizing = Sizing(model, 0.5, 128, 120, 32, 4, patterns=(tmp_path,))
    own = contender("head_pattern:sparsity=.75")
    assert own.one_size
    policy = own.make(sizing)
    np.testing.assert_array_equal(policy.admission.pattern, weights >= 0.75 * weights.size)
    assert (np.asarray(policy.admission.sink) == 3).all()
    assert policy.window == 9
    for folders in ((), (tmp_path, tmp_path / "other")):
        with pytest.raises(UserError, match=f"--pattern must name one folder, got {len(folders)}"):
            own.make(dataclasses.replace(sizing, patterns=folders))


@pytest.mark.parametrize("name", ["head_pattern", "prulong"])
def test_a_table_of_0_and_1_is_ranked_for_no_budget(name, model, tmp_path):
    write_pattern(tmp_path, np.eye(3, 4), 4, 16)
    sizing = Sizing(model, 0.5, 128, 120, 32, 4, gates=str(tmp_path), patterns=(tmp_path,))
    with pytest.raises(
        UserError, match="0 and 1 has no order .* as it is it is head_pattern:sparsity=0.75 with"
    ):
        budget_policy(name, sizing)


def brought(*, model: Any = None, pool: int = 5) -> Policy:
    """Another package's."""
    return make_policy("full", model=model)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("snap:pool=7", "unknown policy 'snap'"),
        ("snapkv:pool", "--policies snapkv:pool: snapkv: got pool without a value"),
        ("snapkv:pol=7", "--policies snapkv:pol=7: snapkv has no argument 'pol'"),
        (
            "adakv:observed=7",
            "--policies adakv:observed=7: adakv has no argument 'observed'; it has over, pinned",
        ),
        ("full:window=3", "full takes no arguments here"),
        ("kvzip:tokenizer=x", "--policies kvzip:tokenizer=x: tokenizer is the evaluation's own (--model)"),
        (
            "head_pattern:sink=3",
            "head_pattern:sink=3: sink is the evaluation's own (chosen for each budget)",
        ),
        ("head_pattern:sparsity=.5,pattern=x", "pattern is the evaluation's own (--pattern)"),
        ("streaming_llm:window=9", "window is the evaluation's own (chosen for each budget)"),
        ("head_pattern:stream=exact", "head_pattern has no argument 'stream'"),
        ("snapkv:ratio=.5", "--policies snapkv:ratio=.5: ratio is the evaluation's own (--budgets)"),
        ("wgkv:tau=.9", "--policies wgkv:tau=.9: tau is the evaluation's own (searched for each budget)"),
        ("wgkv:gates=x", "--policies wgkv:gates=x: gates is the evaluation's own (--gates)"),
        ("snapkv:name=x", "name is the evaluation's own (--policies)"),
        ("wgkv+snapkv:tau=.5", "wgkv+snapkv:tau=.5: snapkv has no argument 'tau'; it has observed, pool"),
        ("wgkv+quest:when=chunk", "quest has no argument 'when'; it has tokens, ratio, skip"),
        (f"{__name__}:brought:pol=5", "has no argument 'pol'; it has pool"),
    ],
)
def test_arguments_that_mean_nothing_are_one_line(name, says):
    """Before there is a model."""
    with pytest.raises(UserError) as caught:
        contender(name)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
