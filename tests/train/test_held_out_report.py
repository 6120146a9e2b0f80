"""Test the report of a user's own model: its measurements on held-out text, against one dense attention."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.mesh import use_mesh
from kvjax.policies import make_policy
from kvjax.tasks.text import continuation
from kvjax.train.distillation import distillation
from kvjax.train.held_out_report import TEXT, compare, report, task_samples
from kvjax.train.recipes.wgkv import WriteGates, held_out_gates
from kvjax.train.thresholds import SHARES
from kvjax.train.update import TrainState
from kvjax.train.validation import make_validate
from tests.tiny_models import tiny_gates, tiny_model
from tests.train.recipes.whole_model import WholeModel

LENGTHS = 64, 64, 96


@pytest.fixture(scope="module")
def held_out():
    random = np.random.default_rng(3)
    return [random.integers(0, 61, length).astype(np.int32) for length in LENGTHS]


def squeezed(model, config):
    """Return gates between 0.4 and 0.6, whose quantiles lie close together."""
    gates = tiny_gates(model)
    values = held_out_gates(gates, model, [np.arange(61, dtype=np.int32)])
    logits = np.log(values / (1 - values))
    narrow, middle = 0.4 / np.ptp(logits), np.median(logits)
    gates.w2[...] = gates.w2[...] * narrow
    gates.b2[...] = (gates.b2[...] - middle) * narrow
    return gates


def measured(folder, held_out, lines):
    """Return the rows of squeezed gates on held-out text, the written report, the validation's numbers, and the
    report's text."""
    model, config = tiny_model(), WriteGates(window=5, tau=0.4999)
    gates = squeezed(model, config)
    with use_mesh(model):
        validate = make_validate(config, jax.sharding.get_mesh(), held_out)
        validation = validate(TrainState(gates, None), model)
    table = report(model, gates, config, folder, held_out, validation, "use them: so", lines.append)
    written = json.loads((folder / "report.json").read_text())
    return [SimpleNamespace(**row) for row in written["rows"]], written, validation.numbers, table


@pytest.mark.slow
def test_rows_cover_the_shares_and_the_full_cache(held_out, tmp_path):
    lines = []
    rows, written, numbers, table = measured(tmp_path, held_out[:2], lines)
    sizes = [row.kv_ratio for row in rows]
    assert sizes == sorted(sizes)
    assert (rows[-1].policy, sizes[-1], rows[-1].distillation) == ("full", 1.0, 0.0)
    by_tau = {float(row.policy.removeprefix("wgkv:tau=")): row for row in rows[:-1]}
    assert len(lines) == len(by_tau) == len(SHARES) + 1
    deployed = by_tau.pop(0.4999)
    assert deployed.distillation == pytest.approx(numbers["hard_distillation"], rel=1e-3)
    assert all(0.4 < tau < 0.6 for tau in by_tau)
    falling = [by_tau[tau] for tau in sorted(by_tau, reverse=True)]
    local_window = 4 / (LENGTHS[0] - LENGTHS[0] // 8 - 1)
    for row, share in zip(falling, SHARES, strict=True):
        assert row.kv_ratio == pytest.approx(local_window + (1 - local_window) * share, abs=0.04), row
    lost = [row.distillation for row in falling]
    assert lost[0] > 2 * lost[-1] > 0
    assert written["soft_distillation"] == numbers["distillation"] != deployed.distillation
    assert f"| {TEXT} | soft, as trained | | | | | {numbers['distillation']:.4g} | |" in table
    text = (tmp_path / "report.md").read_text()
    assert table in text
    assert "use them: so" in text
    assert f"| {TEXT} | full | 1.000 | 1.000 | 100.0% |" in text
    assert np.shape(written["rates"]) == (3, 4)
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in ("heads.png", "tradeoff.png"))


def test_an_eviction_has_no_distillation_loss():
    model = tiny_model()
    policies = {"one": make_policy("snapkv:ratio=0.5"), "other": make_policy("quest:ratio=0.5")}
    assert distillation(model, policies, [np.arange(40, dtype=np.int32)]) == {"one": None, "other": None}


@pytest.mark.thorough
def test_perplexity_and_agreement_match_dense_attention(held_out):
    """This holds for the full cache and for a window so wide that it keeps everything; streaming heads agree less."""
    model, samples = tiny_model(), [continuation(tokens) for tokens in held_out]
    errors = []
    for tokens in held_out:
        with use_mesh(model):
            logits = model.logits(model.hidden(jnp.asarray(tokens[None])))[0].astype(np.float32)
        likely = jax.nn.log_softmax(logits)[np.arange(len(tokens) - 1), tokens[1:]]
        errors += [-float(x) for x in likely[-(len(tokens) // 8) :]]
    policies = {
        "wide": make_policy("streaming_llm:sink=1,window=200", model=model),
        "narrow": make_policy("streaming_llm:sink=1,window=8", model=model),
    }
    rows, rates = compare(model, policies, {TEXT: samples}, {}, shards=1, say=print)
    rows_by_policy = {row.policy: row for row in rows}
    for name in ("full", "wide"):
        assert rows_by_policy[name].perplexity == pytest.approx(np.exp(np.mean(errors)), rel=1e-4)
        assert (rows_by_policy[name].score, rows_by_policy[name].kv_ratio) == (1.0, 1.0)
        assert rows_by_policy[name].answers == sum(length // 8 for length in LENGTHS)
    assert rows_by_policy["narrow"].score < 1
    assert rates.shape == (3, 4)


def test_a_continuation_has_at_most_the_predicted_tokens():
    tokens = np.arange(64, dtype=np.int32)
    default, limited = continuation(tokens), continuation(tokens, most=3)
    assert (len(default.questions[0].answer), len(default.context)) == (8, 55)
    assert limited.questions[0].answer.tolist() == [61, 62, 63]
    assert (limited.questions[0].prompt.tolist(), len(limited.context)) == ([60], 60)
    assert len(continuation(tokens, most=100).questions[0].answer) == 8
    assert continuation(tokens[:7]).questions[0].answer.tolist() == [6], "an eighth is a token at least"


def test_a_recipe_without_a_sweep_has_its_deployed_policy():
    model = tiny_model()
    ((arguments, policy),) = WholeModel().sweep({}, model, []).items()
    assert (arguments, policy.name) == ("", "streaming_llm")


def test_an_unknown_task_is_refused_before_the_start():
    with pytest.raises(UserError, match="unknown task 'no_such'"):
        task_samples(WriteGates(tasks=("no_such",)), 1)
    with pytest.raises(UserError, match="--tasks qa_1 is made of files, which kvjax.evaluate takes"):
        task_samples(WriteGates(tasks=("qa_1",)), 1)
