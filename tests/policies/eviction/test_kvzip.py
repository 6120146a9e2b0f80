"""Test KVzip against its formula in float64: the scores of each pass, the kept entries, the cache after the passes, and
the texts of the passes."""

import dataclasses
import importlib

import jax
import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.inference import prefill, reconstruction
from kvjax.inference.footprint_log import footprint_log
from kvjax.inference.reconstruction import all_of
from kvjax.inference.reconstruction import reconstruct as passes_over
from kvjax.mesh import make_mesh
from kvjax.models import load_tokenizer
from kvjax.models.chat import encode
from kvjax.policies import KVzip, Policy, Ratio, Schedule, Trigger, make_policy
from tests.policies import published
from tests.policies.captured import LENGTHS, PAGE, captured_layers, entries, unnormed
from tests.tasks.model_tokenizers import byte_tokenizer, smol_tokenizer
from tests.tiny_models import tiny_model

IDS = {"instruction": (9, 8, 40), "resumption": (9, 7, 5, 33), "tail": (4,)}
PREFIX = 3
PARTS = {"prefix": PREFIX, "repeated": 16} | IDS
"""Arguments that make four parts of 60 tokens, the last of 9, and three of 41, the last of 6."""
LONGEST = 96
"""Number of tokens of the longest prompt with a pass."""


def policy_for(model, ratio, **arguments):
    return make_policy({"kvzip": {"ratio": ratio, **PARTS | arguments}}, model=model)


def scores_of(cache, lengths):
    """Return the scores of each sequence `[l k s]`, from a cache that has all of its tokens."""
    own = np.asarray(cache.pages.metadata["score"])[
        np.asarray(cache.layers.page_table).clip(max=len(cache.pages.free) - 1)
    ]
    own = own.reshape(*own.shape[:3], -1)
    return [own[:, b, :, :length] for b, length in enumerate(lengths)]


def formula(model, row, pass_, queries=slice(None), plus=False):
    """Return the scores of a pass's part by layer, `[l k s]`, computed with plain attention over the prompt followed by
    the pass."""
    sequence = np.concatenate([row, pass_.tokens])
    layers = captured_layers(model, np.pad(sequence, (0, LONGEST - len(sequence))))
    end = len(sequence)
    return np.array([published.kvzip(c, row.size, end, pass_, queries, plus) for c in layers])


@pytest.fixture(scope="module")
def whole(model, prompts):
    """Return a cache that keeps everything, after the passes."""
    return prefill(model, prompts, policy=policy_for(model, 1.0), page_size=PAGE)


def test_scores_are_the_published_ones(model, prompts, whole):
    """The prompts have several parts, the last a short one, and each sequence has as many passes as it needs. The
    softmax is over the prefix, the part and the pass's own tokens, and the maximum over all its queries."""
    scores_from_request = 0
    for row, found in zip(prompts, scores_of(whole, LENGTHS), strict=True):
        passes = KVzip(**PARTS).passes(row)
        assert (found[..., :PREFIX] == np.inf).all()
        for pass_ in passes:
            expected = formula(model, row, pass_)
            np.testing.assert_allclose(found[..., pass_.start : pass_.stop], expected, rtol=0, atol=1e-5)
            # the queries of the asking tokens count, too
            repeated = formula(model, row, pass_, slice(pass_.tokens.size - (pass_.stop - pass_.start), None))
            scores_from_request += (expected > repeated + 1e-4).sum()
        assert (passes[0].start, passes[-1].stop) == (PREFIX, row.size)
    assert scores_from_request > 0


def test_kvzip_plus_weighs_attention_by_norms(model, prompts):
    """Scores are multiplied by the norms of the values' outputs and divided by those of the queries' inputs."""
    cache = prefill(model, prompts, policy=policy_for(model, 1.0, plus=True), page_size=PAGE)
    for row, found in zip(prompts, scores_of(cache, LENGTHS), strict=True):
        for pass_ in KVzip(**PARTS).passes(row):
            expected = formula(model, row, pass_, plus=True)
            np.testing.assert_allclose(found[..., pass_.start : pass_.stop], expected, rtol=1e-4, atol=1e-7)


def test_sinks_replace_the_prefix_as_in_kvpress(model, prompts, monkeypatch):
    """The first part's pass sees at most the sinks that come before it; the rest of the prefix has no score, even in
    pages that an earlier sequence has used."""
    module = importlib.import_module("kvjax.inference.prefill")
    make = module.new_cache

    def used(*args):
        cache = make(*args)
        pages = dataclasses.replace(cache.pages, metadata={"score": cache.pages.metadata["score"] + 9})
        return dataclasses.replace(cache, pages=pages)

    monkeypatch.setattr(module, "new_cache", used)
    for prefix in (2, 5):
        policy = policy_for(model, 1.0, sink=4, prefix=prefix)
        cache = prefill(model, prompts, policy=policy, page_size=PAGE)
        for row, found in zip(prompts, scores_of(cache, LENGTHS), strict=True):
            passes = policy.eviction.passes(row)
            assert [pass_.first for pass_ in passes[:2]] == [min(4, prefix), 4]
            pass_ = passes[1]
            np.testing.assert_allclose(
                found[..., pass_.start : pass_.stop], formula(model, row, pass_), rtol=0, atol=1e-5
            )
            assert (found[..., 4:prefix] == 0).all()


def best_of_all(scores, count, axes):
    """Return a mask of the `count` best of scores `[l k s]` over these axes."""
    flat = np.moveaxis(scores, axes, range(-len(axes), 0))
    shape = flat.shape
    flat = flat.reshape(*shape[: 3 - len(axes)], -1)
    chosen = np.zeros(flat.shape, bool)
    np.put_along_axis(chosen, np.argsort(-flat, -1, kind="stable")[..., :count], True, -1)
    return np.moveaxis(chosen.reshape(shape), range(-len(axes), 0), axes)


@pytest.mark.parametrize(
    ("over", "axes", "rows"), [("model", (0, 1, 2), 12), ("layer", (1, 2), 4), ("head", (2,), 1)]
)
def test_the_prefix_and_the_best_entries_stay(model, prompts, whole, over, axes, rows):
    """The heads of the whole model compete unless `adakv` is given, and the number of kept entries is exactly the
    ratio's."""
    arguments = {} if over == "model" else {"adakv": {"over": over, "pinned": 0.0}}
    cache = prefill(model, prompts, policy=policy_for(model, 0.3, **arguments), page_size=PAGE)
    everything = prefill(model, prompts, page_size=PAGE)
    for b, scores in enumerate(scores_of(whole, LENGTHS)):
        kept = PREFIX + 0.3 * (LENGTHS[b] - PREFIX)
        stays = best_of_all(scores, int(rows * kept) if over == "model" else rows * int(kept), axes)
        assert stays[..., :PREFIX].all()
        for layer, head in np.ndindex(3, 4):
            keys = entries(everything, layer, b, head)[stays[layer, head]]
            np.testing.assert_array_equal(entries(cache, layer, b, head), keys)


@pytest.mark.parametrize(("tokens", "prefix", "ratio", "held"), [(60, 3, 0.1, 104), (41, 5, 0.4, 232)])
def test_the_prefix_stays_in_addition_to_the_budget(model, prompts, tokens, prefix, ratio, held):
    """The number over all 12 heads is exact: 36 for a prefix of 3 and int(68.4) for 57 other tokens; 60 and int(172.8)
    for 36. The authors' code keeps one entry fewer: those strictly above the score at the last place."""
    assert held == 12 * prefix + int(12 * ratio * (tokens - prefix) + 1e-9)
    row = prompts[0][:tokens]
    cache = prefill(model, [row, row], policy=policy_for(model, ratio, prefix=prefix), page_size=PAGE)
    length = np.asarray(cache.layers.length)
    assert (length >= prefix).all()
    np.testing.assert_array_equal(length.sum((0, 2)), held)


def test_budgets_of_contexts_that_are_nearly_all_prefix():
    """Each row is (tokens, prefix), for 24 heads: the authors keep 224 = 120 + int(105.6) − 1 of the first, and also
    accept the second."""
    schedule = make_policy({"kvzip": {"ratio": 0.4, **PARTS}}).schedule
    rows = [(16, 5), (6, 5), (5, 5), (3, 5)]
    tokens, prefix = zip(*rows, strict=True)
    kept = schedule.prompt_allowance(tokens, prefix, 1)
    counts = schedule.counts(tokens, kept, prefix, 0, 4, 6)
    assert counts.sum((0, 2)).tolist() == [120 + 105, 120 + 9, 120, 72]


@pytest.mark.thorough
def test_a_prompt_no_longer_than_the_prefix_is_kept_whole(model, prompts):
    """It is kept in every layer and head."""
    rows = [prompts[0], prompts[1][:4]]
    cache = prefill(model, rows, policy=policy_for(model, 0.1, prefix=6), page_size=PAGE)
    assert np.asarray(cache.layers.length)[:, 0].sum() == 12 * 6 + int(12 * 5.4)
    np.testing.assert_array_equal(np.asarray(cache.layers.length)[:, 1], 4)
    everything = prefill(model, rows, page_size=PAGE)
    for row in np.ndindex(3, 2, 4):
        np.testing.assert_array_equal(entries(cache, *row)[:6], entries(everything, *row)[:6])


def test_adakv_pins_each_heads_best_entries(model, prompts, whole):
    """AdaKV's safeguard applies also where all heads of the model compete."""
    policy = policy_for(model, 0.3, adakv={"over": "model", "pinned": 0.9})
    assert (policy.schedule.shares.over, policy.schedule.shares.pinned) == ("model", 0.9)
    cache = prefill(model, prompts, policy=policy, page_size=PAGE)
    everything = prefill(model, prompts, page_size=PAGE)
    for b, scores in enumerate(scores_of(whole, LENGTHS)):
        total = int(12 * (PREFIX + 0.3 * (LENGTHS[b] - PREFIX)))
        places = np.resize(total // 12 + (np.arange(12) < total % 12), (3, 4))
        rank = np.argsort(np.argsort(-scores, -1, kind="stable"), -1)
        pinned = rank < np.floor(0.9 * places)[..., None]
        stays = best_of_all(np.where(pinned, np.inf, scores), total, (0, 1, 2))
        assert (stays != best_of_all(scores, total, (0, 1, 2))).any()
        for layer, head in np.ndindex(3, 4):
            keys = entries(everything, layer, b, head)[stays[layer, head]]
            np.testing.assert_array_equal(entries(cache, layer, b, head), keys)


def reconstruct(*arguments):
    return all_of(passes_over(*arguments))


@pytest.mark.thorough
def test_a_parts_scores_do_not_depend_on_other_parts():
    """With one layer, a pass's queries do not depend on what they read: other keys and values of the second part change
    its own scores and no others."""
    model = tiny_model(num_layers=1)
    row = np.random.default_rng(0).permutation(61)[:51]
    policy = policy_for(model, 1.0)
    before = prefill(model, [row], policy=policy, page_size=1)
    (scores,) = scores_of(before, [51])
    pages_of_part = np.asarray(before.layers.page_table)[0, 0, :, PREFIX + 16 : PREFIX + 32]
    pool = np.array(before.pages.pool)
    pool[pages_of_part] = pool[pages_of_part][..., ::-1]
    pages = dataclasses.replace(before.pages, pool=jax.device_put(pool, before.pages.pool.sharding))
    (changed,) = scores_of(
        reconstruct(model, policy.compile(model), dataclasses.replace(before, pages=pages), [row]), [51]
    )
    same = (scores == changed).all((0, 1))
    np.testing.assert_array_equal(same, np.abs(np.arange(51) - PREFIX - 15.5 - 8) > 8)


def test_passes_past_the_models_length_give_one_warning(prompts, whole, monkeypatch):
    """A prompt of 60 tokens and a pass of 29 more give a warning before the first pass, and only once."""
    passed = []
    monkeypatch.setattr(reconstruction, "one_pass", lambda *args, **_: passed.append(1) or (args[3], None))
    fitting, short = (tiny_model(qk_norm=False, max_position=longest) for longest in (89, 88))
    reconstruct(fitting, policy_for(fitting, 1.0).compile(fitting), whole, prompts)
    message = "^60 tokens and up to 29 of a reconstruction pass are more than the 88 "
    with pytest.warns(UserWarning, match=message):
        reconstruct(short, policy_for(short, 1.0).compile(short), whole, prompts)
    reconstruct(short, policy_for(short, 1.0).compile(short), whole, prompts)
    assert len(passed) == 3 * 4


@pytest.mark.slow
def test_passes_leave_only_scores(model, prompts):
    """No entry, page or token is added, and the passes are in the footprint log."""
    policy = policy_for(model, 1.0)
    cache = prefill(model, prompts, policy=policy)
    scores = scores_of(cache, LENGTHS)
    nothing = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), cache.pages.metadata
    )
    cache = dataclasses.replace(cache, pages=dataclasses.replace(cache.pages, metadata=nothing))
    before = jax.tree.map(np.array, without_metadata(cache))
    with footprint_log() as log:
        cache = reconstruct(model, policy.compile(model), cache, prompts)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, without_metadata(cache)))
    for found, expected in zip(scores_of(cache, LENGTHS), scores, strict=True):
        np.testing.assert_array_equal(found, expected)
        assert (found > 0).all()
    held, seen, tokens = zip(*log, strict=True)
    # 3 or 4 + 8 tokens that ask, 1 that ends the turn, and the part
    np.testing.assert_array_equal(tokens, [[20, 20], [29, 29], [29, 19], [22, 0]])
    np.testing.assert_array_equal(held, [[60, 41]] * 4)
    np.testing.assert_array_equal(seen, [[60, 41]] * 4)


def without_metadata(cache):
    return dataclasses.replace(cache, pages=dataclasses.replace(cache.pages, metadata={}))


@pytest.mark.mesh
@pytest.mark.thorough
def test_scores_do_not_depend_on_mesh_and_batch(prompts, whole):
    """The batch of three sequences is padded on the mesh, and each sequence has as many passes as it needs."""
    with jax.set_mesh(make_mesh(fsdp=2, tensor=2)):
        split = tiny_model(qk_norm=False)
        policy = policy_for(split, 1.0)
        cache = prefill(split, [*prompts, prompts[0][:PREFIX]], policy=policy, page_size=8)
        table, scores = np.asarray(cache.layers.page_table), np.asarray(cache.pages.metadata["score"])
        shards = scores.reshape(2, 2, -1, 8)
        for b, (length, expected) in enumerate(zip(LENGTHS, scores_of(whole, LENGTHS), strict=True)):
            for layer, head in np.ndindex(3, 4):
                own = shards[b // 2, head // 2][table[layer, b, head, : -(-length // 8)]].reshape(-1)[:length]
                np.testing.assert_allclose(own, expected[layer, head], rtol=0, atol=1e-5)
    (alone,) = scores_of(prefill(unnormed(), prompts[1:], policy=policy_for(unnormed(), 1.0)), LENGTHS[1:])
    np.testing.assert_allclose(alone, scores_of(whole, LENGTHS)[1], rtol=0, atol=1e-5)


TEXT = "The first city is Paris. " * 6


@pytest.mark.parametrize("make", [byte_tokenizer, smol_tokenizer], ids=["bytes", "with a system prompt"])
def test_passes_continue_the_chat_template(make):
    """The asking tokens end the user's turn that the prompt left open, and the part is the model's answer. The
    template's own tokens are the prefix, and each part begins where the last one ended."""
    tokenizer = make()
    row = np.array(encode(tokenizer, TEXT, "beginning"))
    method = KVzip(tokenizer, repeated=20)
    passes = method.passes(row)
    opening, _, _ = tokenizer.apply_chat_template(
        [{"role": "user", "content": "…"}], tokenize=False
    ).partition("…")
    tail = "<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(row[: passes[0].start]) == opening
    for index, pass_ in enumerate(passes):
        asks = "\n\nRepeat the previous context exactly."
        if index:
            lead = tokenizer.decode(row[pass_.start - 8 : pass_.start])
            asks = f"\n\nRepeat the part of the previous context exactly, starting with {lead}"
        part = tokenizer.decode(row[pass_.start : pass_.stop])
        assert tokenizer.decode(pass_.tokens) == asks + tail + part
        assert pass_.stop - pass_.start == 20 or pass_ is passes[-1]
        assert pass_.first == passes[0].start
    assert passes[-1].stop == row.size
    assert [pass_.start for pass_ in passes[1:]] == [pass_.stop for pass_ in passes[:-1]]


def test_passes_ask_without_thinking():
    """The template is rendered as tasks render it: the answer begins with the repeated part."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template += "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    assert tokenizer.decode(KVzip(tokenizer).tail) == "<|im_end|>\n<|im_start|>assistant\n"


def test_without_a_template_a_line_break_ends_the_request():
    tokenizer = load_tokenizer("builtin")
    method = KVzip(tokenizer)
    assert method.opening == (tokenizer.bos_token_id,)
    row = np.array(encode(tokenizer, TEXT))
    (pass_,) = method.passes(row)
    assert (pass_.first, pass_.start, pass_.stop) == (1, 1, row.size)
    assert tokenizer.decode(pass_.tokens) == f"\n\nRepeat the previous context exactly.\n{TEXT}"
    # a prompt that does not begin with the template's tokens has no prefix
    assert method.passes(row[1:])[0].start == 0
    assert hash(method) == hash(KVzip(tokenizer))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "kvzip needs tokenizer=: it asks the model in text to repeat the context"),
        (IDS | {"instruction": "Repeat"}, "kvzip: instruction must be a list of token ids, got 'Repeat'"),
        (IDS | {"tail": [-1]}, "a token id of tail must be a whole number of at least 0, got -1"),
        (PARTS | {"prefix": -1}, "kvzip: prefix must be a whole number of at least 0, got -1"),
        (PARTS | {"repeated": 0}, "kvzip: repeated must be a whole number of at least 1, got 0"),
        (PARTS | {"repeated": None}, "kvzip: repeated must be a whole number of at least 1, got None"),
        (PARTS | {"sink": -4}, "kvzip: sink must be a whole number of at least 0, got -4"),
        (PARTS | {"tail": [61]}, "kvzip asks with token id 61, the model's vocabulary is 0 … 60"),
        (PARTS | {"ratio": 1.5}, "ratio must be a finite number, above 0 and at most 1, got 1.5"),
        (PARTS | {"ratio": None}, "kvzip needs a budget"),
        (PARTS | {"when": "every", "every": 8}, "kvzip scores a prompt by passes over all of it: when"),
        (PARTS | {"when": "chunk", "chunk": 8}, "when must be 'prompt', got 'chunk'"),
        (PARTS | {"ratio": None, "entries": 9, "when": "overflow"}, "when must be 'prompt', got 'overflow'"),
        (PARTS | {"observers": [1, 2]}, "observers=(1, 2) is for methods that look back at the last tokens"),
    ],
)  # fmt: skip
def test_invalid_arguments_give_one_line_errors(model, arguments, message):
    with pytest.raises(UserError) as error:
        make_policy({"kvzip": {"ratio": 0.5} | arguments}, model=model)
    assert message in str(error.value)


@pytest.mark.parametrize("admission", ["streaming_llm", "full"])
def test_an_admission_is_refused(model, admission):
    with pytest.raises(UserError, match="kvzip scores a prompt by passes over all of it, which"):
        make_policy({admission: {"window": 9}, "kvzip": {"ratio": 0.5} | PARTS}, model=model)


def test_an_invalid_tokenizer_is_refused(model):
    with pytest.raises(
        UserError, match="kvzip: tokenizer must come from kvjax.load_tokenizer, got 'builtin'"
    ):
        make_policy("kvzip:ratio=0.5", model=model, tokenizer="builtin")


def test_observers_and_chunk_triggers_are_refused(model, prompts):
    with pytest.raises(UserError, match="observers are for an eviction that observes tokens during prefill"):
        prefill(model, prompts, policy=policy_for(model, 0.5), observers=[[1], [2]])
    with pytest.raises(UserError, match="when must be 'prompt', got 'chunk'"):
        Policy(eviction=KVzip(**PARTS), schedule=Schedule(Ratio(0.5), Trigger("chunk", chunk=16)))
