"""Test TriAttention against its formula in float64, at a prompt's end and while decoding, and its files."""

import dataclasses
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import inference
from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.checkpoints.module import filled
from kvjax.errors import UserError
from kvjax.evaluate.gates import describe_gates
from kvjax.mesh import use_mesh
from kvjax.policies import make_policy
from kvjax.policies.eviction.triattention import (
    LAYERS,
    QueryStatistics,
    Sizes,
    TriAttention,
    load_statistics,
    save_statistics,
)
from kvjax.policies.make import parse_policy
from kvjax.sampling_params import SamplingParams
from kvjax.struct import changed
from tests.checkpoints.torch_files import write_torch
from tests.policies import published
from tests.policies.captured import PAGE, captured_layers, entries
from tests.policies.eviction.kept_sets import RATIO, assert_published
from tests.policies.steps import stored
from tests.tiny_models import tiny_gates, tiny_model, tiny_statistics

pytestmark = pytest.mark.slow

GROUP = 2


def by_kv_head(statistics, layer):
    """Return the mean and the mean length of a layer's queries, [k g pairs]."""
    real, imaginary, length = (
        np.asarray(x[...], np.float64)[layer]
        for x in (statistics.real, statistics.imaginary, statistics.length)
    )
    return (
        (real + 1j * imaginary).reshape(-1, GROUP, real.shape[-1]),
        length.reshape(-1, GROUP, real.shape[-1]),
    )


def expected_scores(statistics, layer, k, position, frequencies, tokens):
    """Return the scores of a layer's keys [k s h]."""
    heads = zip(k, *by_kv_head(statistics, layer), strict=True)
    return np.stack(
        [
            published.triattention(keys, position, mean, size, frequencies, tokens)
            for keys, mean, size in heads
        ]
    )


def of_layer(statistics, layer=0):
    """Return the method with the statistics of one layer, as compiled programs see it."""
    sliced = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[layer]), statistics)
    return changed(TriAttention(statistics), statistics=sliced)


def test_a_worked_example():
    """One pair turns by π at each position. The keys 1, 1 and 2i before RoPE, at positions 0, 1 and 2, are stored as 1,
    −1 and 2i. Of the 17 offsets only 1 is odd, so E = −15/17 at t = 3. A head whose mean query is 1 and whose mean
    length is 1.5 gives −15/17 + 1/2, 15/17 + 1/2 and 0 + 1; a head of mean 0 and length 1 gives 1, 1 and 2."""
    arrays = {
        "real": np.array([[[1.0], [0.0]]]),
        "imaginary": np.zeros((1, 2, 1)),
        "length": np.array([[[1.5], [1.0]]]),
    }
    with use_mesh():
        statistics = filled(lambda: QueryStatistics(1, 2, 2), arrays, "example")
    keys = np.array([[[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0]]])
    scores = of_layer(statistics).score((), stored(keys, [np.pi], 3))
    first, second = np.array([0.5 - 15 / 17, 0.5 + 15 / 17, 1.0]), np.array([1.0, 1.0, 2.0])
    normalised = [(x - x.mean()) / x.std() for x in (first, second)]
    np.testing.assert_allclose(scores[0, 0], np.maximum(*normalised), atol=1e-3)  # 65,536 times float32's π
    np.testing.assert_allclose(scores[0, 0], [-0.707, 0.944, 1.414], atol=1e-3)


@pytest.mark.parametrize("layers", LAYERS)
def test_scores_and_kept_sets_are_the_published_ones(model, prompts, captured, layers):
    statistics = tiny_statistics(model)
    policy = make_policy({"triattention": {"ratio": RATIO, "layers": layers}}, model=model, gates=statistics)

    def formula(c, kept):
        (sequence,) = (one for one in captured if any(c is own for own in one))
        tokens = c.k.shape[1]
        scores = [
            expected_scores(statistics, layer, own.k, np.arange(tokens), own.frequencies, tokens)
            for layer, own in enumerate(sequence)
            if layers == "mean" or own is c
        ]
        return np.mean(scores, 0)

    assert_published(policy, formula, model, prompts, captured)


@pytest.mark.parametrize("turned", [4, 3, 1])
def test_scores_are_published_for_long_contexts_and_scaled_or_partial_rope(model, turned):
    """Only some of the four pairs are turned. RoPE's factor multiplies queries and keys in those."""
    random, statistics = np.random.default_rng(turned), tiny_statistics(model)
    position, seen = np.sort(random.choice(120_000, 30, replace=False)), 120_001
    frequencies = 10.0 ** -np.arange(1.0, turned + 1)
    keys = random.standard_normal((4, 30, 8))
    scores = of_layer(statistics).score((), stored(keys, frequencies, seen, scale=1.25))
    # a stored key has the factor already
    factor = np.ones(4)
    factor[:turned] = 1.25
    for array in (statistics.real, statistics.imaginary, statistics.length):
        array[...] = array[...] * factor
    want = expected_scores(statistics, 0, keys, position, np.float32(frequencies).astype(float), seen)
    np.testing.assert_allclose(scores[0], want, atol=2e-3)  # 12,000 radians are exact to a thousandth


def test_forced_entries_do_not_count_in_the_mean(model):
    """Without them the others have the same scores."""
    method, random = of_layer(tiny_statistics(model)), np.random.default_rng(0)
    keys, forced = random.standard_normal((4, 12, 8)), np.zeros((4, 12), bool)
    forced[:, :5] = True
    scores = method.score((), stored(keys, [0.5, 0.1], 20, forced=forced))
    alone = method.score((), stored(keys[:, 5:], [0.5, 0.1], 20))
    np.testing.assert_allclose(scores[..., 5:], alone, atol=1e-5)


def answered(model, policy, prompt):
    """Return the cache after a prompt and an answer of 20 tokens, and the answer."""
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
    blocks = list(inference.stream(model, [prompt], sampling, policy=policy, block=4, page_size=PAGE))
    return blocks[-1].cache, np.concatenate([block.tokens[0] for block in blocks])


@pytest.mark.parametrize(
    ("when", "rounds"),
    [
        ("every", (60, 68, 76)),
        pytest.param("position", (60, 64, 72), marks=pytest.mark.thorough),
    ],
)
def test_answers_are_compacted_repeatedly(model, prompts, when, rounds):
    """The first layer's keys depend on nothing but the tokens. Each time, the 20 entries with the highest scores stay,
    among the remaining and the new ones."""
    statistics, prompt = tiny_statistics(model), prompts[0]
    policy = make_policy(
        f"triattention:layers=own,entries=20,when={when},every=8", model=model, gates=statistics
    )
    cache, answer = answered(model, policy, prompt)
    seen = int(cache.seen[0])
    c = captured_layers(model, np.concatenate([prompt, answer])[:seen])[0]
    stays = np.zeros((4, seen), bool)
    before = 0
    for tokens in rounds:
        stays[:, before:tokens], before = True, tokens
        for head, mask in enumerate(stays):
            (place,) = np.nonzero(mask)
            mean, length = (x[head] for x in by_kv_head(statistics, 0))
            score = published.triattention(c.k[head, place], place, mean, length, c.frequencies, tokens)
            mask[place] = published.best(score, 20)
    stays[:, before:] = True
    for head, mask in enumerate(stays):
        np.testing.assert_allclose(entries(cache, 0, 0, head), c.k[head, mask], atol=1e-4)


def test_all_layers_keep_the_same_tokens(model, prompts, captured):
    """The prompt's tokens are identified by their keys. Some that stay at the prompt's end are dropped during the
    answer."""
    policy = make_policy(
        "triattention:entries=20,when=every,every=8", model=model, gates=tiny_statistics(model)
    )
    after_prompt = inference.prefill(model, prompts[:1], policy=policy, page_size=PAGE)
    cache, _ = answered(model, policy, prompts[0])
    for head in range(4):
        kept = []
        for one in (after_prompt, cache):
            places = [
                np.abs(entries(one, layer, 0, head)[:, None] - c.k[head]).max(-1).min(0) < 1e-4
                for layer, c in enumerate(captured[0])
            ]
            np.testing.assert_array_equal(places[1:], places[:-1])
            kept.append(places[0].sum())
        assert kept[0] == 20 > kept[1] > 0


def test_layers_with_different_tokens_cannot_share_a_mean(model):
    statistics, gates = tiny_statistics(model), tiny_gates(model)
    for text in ("wgkv:window=9+triattention:entries=64", "triattention:entries=64,adakv.over=model",
                 "triattention:entries=64,pyramidkv"):  # fmt: skip
        described = parse_policy(text)
        described["triattention"] |= {"statistics": statistics}
        if "wgkv" in described:
            described["wgkv"] |= {"gates": gates}
        with pytest.raises(UserError, match="averages scores over layers, .*: layers must be 'own'"):
            make_policy(described, model=model)
        described["triattention"] |= {"layers": "own"}
        make_policy(described, model=model)
    placed = dataclasses.replace(model.config, head_order=((2, 0, 3, 1), (1, 3, 0, 2), (0, 1, 2, 3)))
    with pytest.raises(
        UserError, match="kv heads were placed in another order in each: layers must be 'own'"
    ):
        TriAttention(statistics).check(placed)
    TriAttention(statistics, layers="own").check(placed)


def test_it_compacts_every_128_tokens_by_default(model):
    statistics = tiny_statistics(model)
    trigger = make_policy("triattention:entries=64", gates=statistics).schedule.trigger
    assert (trigger.when, trigger.every) == ("every", 128)
    trigger = make_policy("triattention:ratio=0.5,when=prompt", gates=statistics).schedule.trigger
    assert trigger.when == "prompt"


def test_statistics_survive_a_round_trip(tmp_path, model):
    statistics = tiny_statistics(model)
    made_for = MadeFor.of(model, "tiny")
    save_statistics(tmp_path, statistics, {"tokens": 9} | made_for.description)
    read, description = load_statistics(tmp_path)
    assert describe_gates(tmp_path)["method"] == "triattention"
    assert (description["tokens"], Sizes.of(read)) == (9, Sizes(3, 8, 8))
    jax.tree.map(np.testing.assert_array_equal, read, statistics)
    policy = make_policy("triattention:ratio=0.5", model=model, gates=tmp_path)
    assert policy.eviction.made_for == made_for
    with pytest.raises(UserError, match="triattention: made for the model tiny, not for"):
        make_policy("triattention:ratio=0.5", model=tiny_model(), gates=tmp_path)


def arrays_of_file(layers=3, heads=8, pairs=4, seed=0):
    """Return the content of an authors' file."""
    random = np.random.default_rng(seed)
    stats = {
        f"layer{layer:02d}_head{head:02d}": {
            name: random.standard_normal(pairs).astype(np.float32)
            for name in ("q_mean_real", "q_mean_imag", "q_abs_mean")
        }
        for layer in range(layers)
        for head in range(heads)
    }
    sampled = [[layer, head] for layer in range(layers) for head in range(heads)]
    metadata = {
        "rope_style": "half",
        "head_dim": 2 * pairs,
        "model_name": "a/model",
        "sampled_heads": sampled,
    }
    return {"metadata": metadata, "stats": stats}


def test_the_authors_file_is_read(tmp_path):
    content, file = arrays_of_file(), tmp_path / "x.pt"
    write_torch(file, content)
    statistics, description = load_statistics(file)
    assert (Sizes.of(statistics), description["method"]) == (Sizes(3, 8, 8), "triattention")
    assert describe_gates(file) == {"method": "triattention"}
    for layer, head in ((0, 0), (2, 5)):
        vectors = content["stats"][f"layer{layer:02d}_head{head:02d}"]
        for array, name in (("real", "q_mean_real"), ("imaginary", "q_mean_imag"), ("length", "q_abs_mean")):
            np.testing.assert_array_equal(
                np.asarray(getattr(statistics, array)[...])[layer, head], vectors[name]
            )
    with pytest.raises(UserError, match=re.escape("= (3, 8, 8), the model has (2, 8, 8)")):
        make_policy("triattention:ratio=0.5", model=tiny_model(num_layers=2), gates=file)


def changed_file(**changes):
    content = arrays_of_file()
    for name, value in changes.items():
        place, _, key = name.partition("__")
        content[place] = content[place] | {key: value} if key else value
    return {name: x for name, x in content.items() if x is not None}


ONE_HEAD = {"q_mean_real": np.zeros(4, np.float32), "q_mean_imag": np.zeros(4, np.float32)}
INVALID_FILES = {
    "no metadata": (changed_file(metadata=None), "expected metadata and stats"),
    "no heads": (changed_file(stats={}), "expected metadata and stats"),
    "another style": (changed_file(metadata__rope_style="interleaved"), "should be 'half', found 'interleaved'"),
    "another width": (changed_file(metadata__head_dim=16), "half of head_dim 16 numbers, found .4,."),
    "another name": (changed_file(stats__layer0=ONE_HEAD), "stats has 'layer0', expected layer00_head00"),
    "one head more": (changed_file(stats__layer01_head08=ONE_HEAD), "layer 0: head 8, q_mean_real should have"),
    "an array less": (changed_file(stats__layer01_head02=ONE_HEAD), "layer 1: head 2, q_abs_mean should have"),
    "an array more": (changed_file(stats__layer02_head02=ONE_HEAD | {"x": 1}), "layer 2 has 'head 2, x', which"),
    "a number": (changed_file(stats__layer01_head02=1.0), "stats has 'layer01_head02'"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID_FILES)
def test_invalid_files_are_refused_in_one_line(tmp_path, case):
    content, message = INVALID_FILES[case]
    write_torch(tmp_path / "x.pt", content)
    with pytest.raises(UserError, match=message) as caught:
        load_statistics(tmp_path / "x.pt")
    assert str(tmp_path / "x.pt") in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [{"method": "wgkv"}, {"heads": 0}, {"head_dim": "wide"}, {"layers": None}], ids=str
)
def test_an_invalid_description_is_refused(tmp_path, model, wrong):
    save_statistics(tmp_path, tiny_statistics(model), {})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    with pytest.raises(UserError, match="no statistics of TriAttention, or the files are damaged"):
        load_statistics(tmp_path)


def test_invalid_statistics_are_refused():
    with pytest.raises(UserError, match="statistics must be a folder or a file of statistics or .*, got 3"):
        make_policy("triattention:ratio=0.5", gates=3)


SIZES = {"qwen3_8b": (36, 32, 128), "ds_qwen7b": (28, 28, 128), "ds_llama8b": (32, 32, 128)}
CALIBRATION = os.environ.get("KVJAX_TRIATTENTION", "")


@pytest.mark.skipif(not CALIBRATION, reason="KVJAX_TRIATTENTION is not set")
@pytest.mark.parametrize("folder", ["for_aime24_experiment", "for_aime25_experiment"])
@pytest.mark.parametrize("name", SIZES)
def test_the_authors_calibration_files_are_read(folder, name):
    """A mean is no longer than the mean of lengths."""
    statistics, _ = load_statistics(Path(CALIBRATION) / folder / f"{name}.pt")
    assert Sizes.of(statistics) == SIZES[name]
    real, imaginary, length = (
        np.asarray(x[...]) for x in (statistics.real, statistics.imaginary, statistics.length)
    )
    assert (np.hypot(real, imaginary) <= 1.001 * length + 1e-4).all()
