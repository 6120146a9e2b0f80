"""Test H2O against its formula in float64: the attention it counts for a prompt and an answer, and the kept entries."""

import numpy as np
import pytest

from kvjax import inference
from kvjax.errors import UserError
from kvjax.policies import make_policy
from kvjax.sampling_params import SamplingParams
from tests.policies import published
from tests.policies.captured import PAGE, captured_layers, entries
from tests.policies.eviction.kept_sets import RATIO, assert_published


def test_scores_and_kept_sets_are_the_published_ones(model, prompts, captured):
    policy = make_policy({"h2o": {"ratio": RATIO}}, model=model)
    assert_published(policy, lambda c, kept: published.h2o(c), model, prompts, captured, recent=0.5)


def test_h2o_counts_all_attention_in_chunks_and_in_decoding(model, prompts):
    """The counts for the prompt's and the answer's queries are compared with the columns' sums in float64."""
    policy = make_policy("h2o:entries=1000,when=every,every=4", model=model)
    prompt = prompts[0]
    sampling = SamplingParams(max_new_tokens=9, ignore_eos=True)
    options = {"chunk": 30, "block": 4, "page_size": PAGE, "capacity": 100}
    blocks = list(inference.stream(model, [prompt], sampling, policy=policy, **options))
    answer, cache = np.concatenate([block.tokens[0] for block in blocks]), blocks[-1].cache
    for layer, c in enumerate(captured_layers(model, np.concatenate([prompt, answer[:8]]))):
        want = published.h2o(c)
        for head in range(4):
            pages = np.asarray(cache.layers.page_table)[layer, 0, head, : -(-68 // PAGE)]
            got = np.asarray(cache.pages.metadata["attention"])[pages].reshape(-1)[:68]
            np.testing.assert_allclose(got, want[head], atol=1e-4)


@pytest.mark.thorough
def test_counted_attention_moves_with_its_entry(model, prompts):
    policy = make_policy("h2o:entries=20,when=every,every=64", model=model)
    cache = inference.prefill(model, prompts[:1], policy=policy, page_size=PAGE)
    c = captured_layers(model, prompts[0])[0]
    for head, score in enumerate(published.h2o(c)):
        stays = published.best(np.where(np.arange(60) >= 50, np.inf, score), 20)
        np.testing.assert_allclose(entries(cache, 0, 0, head), c.k[head][stays], atol=1e-4)
        pages = np.asarray(cache.layers.page_table)[0, 0, head, : 20 // PAGE]
        np.testing.assert_allclose(
            np.asarray(cache.pages.metadata["attention"])[pages].reshape(-1), score[stays], atol=1e-5
        )


@pytest.mark.thorough
def test_only_pages_that_were_read_are_counted(model, prompts):
    """Under Quest, every query's counted attention adds up to one."""
    policy = make_policy("h2o:entries=1000,when=every,every=64+quest:tokens=16", model=model)
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    options = {"block": 1, "page_size": PAGE, "capacity": 100}
    *_, last = inference.stream(model, prompts, sampling, policy=policy, **options)
    cache = last.cache
    table, pool = np.asarray(cache.layers.page_table), cache.pages.pool.shape[0]
    counted = np.append(np.asarray(cache.pages.metadata["attention"]).sum(1), 0)[np.minimum(table, pool)].sum(
        -1
    )
    np.testing.assert_allclose(
        counted, np.broadcast_to(np.asarray(cache.seen)[:, None], (3, 2, 4)), rtol=1e-5
    )


def test_an_admissions_window_is_refused(model):
    with pytest.raises(
        UserError, match="h2o counts the attention that an entry gets from its first query on"
    ):
        make_policy("streaming_llm:window=9+h2o:ratio=0.5", model=model)
