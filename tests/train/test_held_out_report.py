"""The report of a user's own model: what it measures of held-out text, against one dense attention."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.mesh import use_mesh
from kvjax.policies import make_policy
from kvjax.tasks.text import continuation
from kvjax.train.held_out_report import TEXT, compare, report, task_samples
from kvjax.train.recipes.wgkv import TAUS, WriteGates
from tests.tiny_models import tiny_gates, tiny_model
from tests.train.recipes.whole_model import WholeModel

LENGTHS = 64, 64, 96


@pytest.fixture(scope="module")
def held_out():
    random = np.random.default_rng(3)
    return [random.integers(0, 61, length).astype(np.int32) for length in LENGTHS]


def measured(folder, held_out, said=None):
    model = tiny_model()
    config = WriteGates(window=5, tau=0.4)
    say = print if said is None else said.append
    return report(model, tiny_gates(model), config, folder, held_out, "use them: so", say)


def test_a_row_for_every_threshold_and_the_full_cache_by_size(held_out, tmp_path):
    said = []
    rows = measured(tmp_path, held_out, said)
    assert {row.policy for row in rows} == {"full", *(f"wgkv tau={tau:g}" for tau in (0.4, *TAUS))}
    sizes = [row.kv_ratio for row in rows]
    assert sizes == sorted(sizes)
    assert (rows[-1].policy, sizes[-1]) == ("full", 1.0)
    by_tau = {float(row.policy.split("=")[1]): row.kv_ratio for row in rows[:-1]}
    falling = [by_tau[tau] for tau in sorted(by_tau)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] < 0.5 < falling[0]
    assert len(said) == len(by_tau)
    written = (tmp_path / "report.md").read_text()
    assert "use them: so" in written
    assert f"| {TEXT} | full | 1.000 | 1.000 | 100.0% |" in written
    heads = json.loads((tmp_path / "report.json").read_text())["rates"]
    assert np.shape(heads) == (3, 4)
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in ("heads.png", "tradeoff.png"))


def test_perplexity_and_agreement_are_what_whole_sequences_say(held_out, tmp_path):
    """Of the full cache, and of a window so wide that it keeps everything; and of streaming heads, less agreement."""
    model, samples = tiny_model(), [continuation(tokens) for tokens in held_out]
    errors = []
    for tokens in held_out:
        with use_mesh(model):
            logits = model.logits(model.hidden(jnp.asarray(tokens[None])))[0].astype(np.float32)
        likely = jax.nn.log_softmax(logits)[np.arange(len(tokens) - 1), tokens[1:]]
        errors += [-float(x) for x in likely[-(len(tokens) // 8) :]]
    policies = {
        "wide": make_policy("streaming_llm", model=model, sink=1, window=200),
        "narrow": make_policy("streaming_llm", model=model, sink=1, window=8),
    }
    rows, rates = compare(model, policies, {TEXT: samples}, shards=1, say=print)
    found = {row.policy: row for row in rows}
    for name in ("full", "wide"):
        assert found[name].perplexity == pytest.approx(np.exp(np.mean(errors)), rel=1e-4)
        assert (found[name].score, found[name].kv_ratio) == (1.0, 1.0)
        assert found[name].answers == sum(length // 8 for length in LENGTHS)
    assert found["narrow"].score < 1
    assert rates.shape == (3, 4)


def test_the_end_of_a_long_sequence_is_cut_to_what_the_report_predicts():
    tokens = np.arange(64, dtype=np.int32)
    whole, some = continuation(tokens), continuation(tokens, most=3)
    assert (len(whole.questions[0].answer), len(whole.context)) == (8, 55)
    assert some.questions[0].answer.tolist() == [61, 62, 63]
    assert (some.questions[0].prompt.tolist(), len(some.context)) == ([60], 60)
    assert len(continuation(tokens, most=100).questions[0].answer) == 8


def test_a_recipe_without_a_sweep_has_its_deployed_policy():
    model = tiny_model()
    ((told, policy),) = WholeModel().sweep({}, model).items()
    assert (told, policy.name) == ("", "streaming_llm")


def test_a_task_that_is_none_is_refused_before_the_start():
    with pytest.raises(UserError, match="unknown task 'no_such'"):
        task_samples(WriteGates(tasks=("no_such",)), 1)
