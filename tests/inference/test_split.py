"""Rows split by pages over the devices of the kv heads: what is computed is the same, and no device has more."""

import jax
import numpy as np
import pytest

import kvjax.inference.sampling as sampling
import kvjax.inference.striped as striped
from kvjax import cache as caches
from kvjax.builtin import builtin_gates
from kvjax.cache.stripes import own_pages
from kvjax.errors import UserError
from kvjax.inference.page_counts import pages_in_use
from kvjax.inference.saving import load_cache, save_cache
from kvjax.inference.split import ROW, WORTH, excess, split_by_heads
from kvjax.mesh import make_mesh
from kvjax.models import load
from kvjax.policies import Adaptive, Random, SnapKV, make_policy
from kvjax.tasks import heldout_files
from tests.tiny_models import tiny_gates, tiny_model

RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(0, 61, count) for count in (150, 131)]
QUESTIONS = [RANDOM.integers(0, 61, count) for count in (5, 9)]
PAGE = 4
THOROUGH = pytest.mark.thorough
MESHES = {"tensor=4": {"tensor": 4}, "fsdp=2,tensor=2,sequence=2": {"fsdp": 2, "tensor": 2, "sequence": 2}}
RATES = np.array([[0.84, 0.59, 0.04, 0.0], [0.0, 0.02, 0.9, 0.5], [0.3, 0.1, 0.0, 0.9]], np.float32)
"""What the built-in model's gates let in of one layer, in the first."""


def policies(model):
    pattern = np.array([[1, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]])
    random = RANDOM.permutation(12).reshape(3, 4) / 12
    return {
        "random": make_policy("random", model=model, rates=RATES, window=6),
        "wgkv": make_policy("wgkv", model=model, gates=tiny_gates(model), tau=0.5, window=7),
        "head_pattern": make_policy(
            "head_pattern", model=model, pattern=pattern + 0.01 * random, sparsity=0.6, sink=1, window=6
        ),
        "adakv": make_policy(eviction=Adaptive(SnapKV(observed=4)), ratio=0.3),
        "snapkv over an admission": make_policy(
            admission=Random(rates=RATES), eviction=Adaptive(SnapKV(observed=4)), ratio=0.2, window=6
        ),
    }  # fmt: skip


def own_pages_used(cache) -> np.ndarray:
    """Pages of each shard that are in use."""
    return cache.pages.pool.shape[0] // cache.pages.free_count.size - np.asarray(cache.pages.free_count)


def held_entries(cache) -> list[np.ndarray]:
    """Of each row, layer by layer, the entries of its global region in order, read by hand."""
    layers, batch, heads = cache.layers.length.shape
    shards = cache.pages.free_count.size
    pool = np.asarray(cache.pages.pool).reshape(shards, -1, *cache.pages.pool.shape[1:])
    table, length = np.asarray(cache.layers.stripes.page_table), np.asarray(cache.layers.length)
    devices = table.shape[2] // heads
    rows = []
    for layer, row, head in np.ndindex(layers, batch, heads):
        batch_shard = row // (batch * devices // shards)
        found = []
        for place in range(length[layer, row, head]):
            column, offset = divmod(place, cache.page_size)
            device = (column + head) % devices
            page = table[layer, row, device * heads + head, column // devices]
            found.append(pool[batch_shard * devices + device, page, offset])
        rows.append(np.array(found))
    return rows


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """A call's tokens go to the devices in parts of 16."""
    monkeypatch.setattr(striped, "PART", 16)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("wgkv", "tensor=4"),
        pytest.param("snapkv over an admission", "fsdp=2,tensor=2,sequence=2", marks=THOROUGH),
        pytest.param("random", "tensor=4", marks=THOROUGH),
        pytest.param("head_pattern", "tensor=4", marks=THOROUGH),
        pytest.param("adakv", "tensor=4", marks=THOROUGH),
        pytest.param("wgkv", "fsdp=2,tensor=2,sequence=2", marks=THOROUGH),
    ],
)
def test_answers_and_entries_are_those_of_rows_split_by_heads(name, mesh):
    options = {"page_size": PAGE, "chunk": 64, "eos": (), "max_new_tokens": 21, "logprobs": True, "block": 8}
    with jax.set_mesh(make_mesh(**MESHES[mesh])):
        model = tiny_model()
        policy = policies(model)[name]
        want, got = (
            sampling.sample(model, PROMPTS, policy=policy, split=split, **options)
            for split in ("heads", "pages")
        )
    np.testing.assert_array_equal(np.stack(got.tokens), np.stack(want.tokens))
    np.testing.assert_allclose(np.stack(got.logprobs), np.stack(want.logprobs), atol=1e-5)
    np.testing.assert_array_equal(got.stats.entries, want.stats.entries)
    assert got.stats.pages == want.stats.pages


@pytest.mark.parametrize("name", ["wgkv", pytest.param("adakv", marks=THOROUGH)])
def test_a_cache_is_continued_and_goes_back_to_heads(name, tmp_path):
    """A question as often as wanted, entries in order, and what needs whole rows: branches and files."""
    options = {"page_size": PAGE, "chunk": 64}
    with jax.set_mesh(make_mesh(tensor=4)):
        model = tiny_model()
        policy = policies(model)[name]
        caches_ = {
            split: sampling.prefill(model, PROMPTS, policy=policy, split=split, **options)
            for split in ("heads", "pages")
        }
        cache = caches_["pages"]
        assert cache.striped
        assert not caches_["heads"].striped
        back = split_by_heads(cache)
        assert not back.striped
        one = {"policy": policy, "max_new_tokens": 9, "eos": (), "block": 4}
        asked = [
            sampling.sample(model, QUESTIONS, cache=x, **one) for x in (caches_["heads"], cache, cache, back)
        ]
        shared = [
            sampling.sample(model, QUESTIONS * 2, cache=x, share=True, **one)
            for x in (caches_["heads"], cache)
        ]
        save_cache(tmp_path / "saved", cache, model, policy)
        loaded = load_cache(tmp_path / "saved", model, policy)
        asked.append(sampling.sample(model, QUESTIONS, cache=loaded, **one))
        before = [np.array(x) for x in jax.tree.leaves(split_by_heads(cache).layers.length)]
    for other in asked[1:]:
        np.testing.assert_array_equal(np.stack(other.tokens), np.stack(asked[0].tokens))
    np.testing.assert_array_equal(np.stack(shared[1].tokens), np.stack(shared[0].tokens))
    np.testing.assert_array_equal(before[0], np.asarray(caches_["heads"].layers.length))
    table, pool = np.asarray(caches_["heads"].layers.page_table), np.asarray(caches_["heads"].pages.pool)
    ring = caches.ring_pages(policy.window, PAGE)
    pool = pool.reshape(4, -1, *pool.shape[1:])
    layers, batch, heads = table.shape[:3]
    for (layer, row, head), held in zip(np.ndindex(layers, batch, heads), held_entries(cache), strict=True):
        pages = table[layer, row, head, ring : ring - (-len(held) // PAGE)]
        want = pool[head, pages].reshape(-1, pool.shape[-1])[: len(held)]
        np.testing.assert_allclose(held.reshape(want.shape), want, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "arguments", "least"),
    [
        ("wgkv", {"gates": "builtin"}, 1.9),
        pytest.param(
            "head_pattern",
            {"pattern": builtin_gates("builtin:duo_attention"), "sparsity": 0.7},
            1.3,
            marks=THOROUGH,
        ),
        pytest.param("adakv", {"ratio": 0.25}, 1.5, marks=THOROUGH),
    ],
)
def test_no_device_has_a_tenth_more_pages_than_the_mean(name, arguments, least):
    """The built-in model's text, at pages of 16; by heads the fullest has this much more than the mean at least."""
    text = "\n".join(heldout_files().values())[:10_000]
    found = {}
    with jax.set_mesh(make_mesh(tensor=4)):
        model, tokenizer = load("builtin")
        policy = make_policy(name, model=model, **arguments)
        lines = [np.asarray(tokenizer(text)["input_ids"])[:2048]]
        for split in ("heads", "pages"):
            cache = sampling.prefill(model, lines, policy=policy, split=split)
            used = own_pages_used(cache)
            assert used.max() == pages_in_use(cache, striped=split == "pages")
            found[split] = used.max() / used.mean()
    print(f"\n{name}: {found['heads']:.2f} times the mean by heads, {found['pages']:.3f} by pages")
    assert found["pages"] < 1.1
    assert found["heads"] > least


def test_each_page_is_one_device_s():
    pages = np.arange(60).reshape(10, 6)
    of = [own_pages(pages, device, 4) for device in range(4)]
    np.testing.assert_array_equal(sum(of), pages)
    want = [
        [sum((c + head) % 4 == 1 for c in range(pages[row, head])) for head in range(6)] for row in range(10)
    ]
    np.testing.assert_array_equal(of[1], want)


@THOROUGH
def test_a_striped_pool_grows_or_keeps_the_size_that_was_stated():
    """An answer longer than the room that was made; a bound that is too small; one size for all lengths."""
    few = [line[:20] for line in PROMPTS]
    with jax.set_mesh(make_mesh(tensor=4)):
        model = tiny_model()
        policy = policies(model)["wgkv"]
        one = {"policy": policy, "eos": (), "max_new_tokens": 80, "block": 8}
        made = {"policy": policy, "page_size": PAGE}
        answers = []
        for split in ("heads", "pages"):
            cache = sampling.prefill(model, few, split=split, **made)
            out = sampling.sample(model, QUESTIONS, cache=cache, **one)
            assert out.stats.pool_pages > caches.stats(cache).pool_pages
            answers.append(out.tokens)
        with pytest.raises(caches.CapacityError, match="give a capacity of"):
            sampling.prefill(model, PROMPTS, split="pages", capacity=40, **made)
        stated = sampling.prefill(model, few, split="pages", max_tokens=256, **made)
        answers.append(sampling.sample(model, QUESTIONS, cache=stated, **one).tokens)
    for other in answers[1:]:
        np.testing.assert_array_equal(np.stack(other), np.stack(answers[0]))


def test_auto_is_by_pages_where_that_is_worth_it(monkeypatch):
    """Before anything is read, by what is expected; once a prompt was compacted, by what is left. Where programs are
    shared it is the same for all lengths."""

    def by_pages(name, worth, count=150, **options):
        monkeypatch.setattr("kvjax.inference.split.WORTH", worth)
        options |= {"page_size": PAGE, "chunk": 64, "split": "auto"}
        prompts = [line[:count] for line in PROMPTS]
        return sampling.prefill(model, prompts, policy=policies(model)[name], **options).striped

    monkeypatch.setattr("kvjax.inference.split.ROW", 0)
    with jax.set_mesh(make_mesh(tensor=4)):
        model = tiny_model()
        assert by_pages("random", 4096)
        assert not by_pages("random", 1 << 20)
        assert by_pages("adakv", 0)
        assert by_pages("random", 4096, count=1, max_tokens=256)
        assert not by_pages("random", 4096, count=19, max_tokens=20)
        assert not by_pages("adakv", 0, max_tokens=256)


def test_what_is_split_by_pages_and_when(monkeypatch):
    with jax.set_mesh(make_mesh(tensor=4)):
        model = tiny_model()
        for name, arguments, why in (
            ("quest", {"ratio": 0.5}, "selects pages"),
            ("h2o", {"entries": 24, "when": "every", "every": 8}, "goes on compacting"),
        ):
            policy = make_policy(name, model=model, **arguments)
            with pytest.raises(UserError, match=why):
                sampling.prefill(model, PROMPTS, policy=policy, split="pages")
        with pytest.raises(UserError, match="split"):
            sampling.prefill(model, PROMPTS, split="page")
        # so small a cache is not worth it
        policy = policies(model)["head_pattern"]
        assert not sampling.prefill(model, PROMPTS, policy=policy, split="auto").striped
        entries = np.zeros((2, 1, 4), int)
        entries[0, 0] = 800, 0, 400, 400
        # 800 against a quarter of all, of which an empty row is one as well; and a ring's row beside them
        layers = 800 - (200 + 1 + 100 + 100 + 1), 1 - (4 + 1)
        assert excess(entries, ROW) == sum(layers) * ROW / 2
        entries[:, 0, 1] = 2 * WORTH
        assert excess(entries, 1) > WORTH
        monkeypatch.setattr("kvjax.inference.split.device_bytes", lambda *, free: 0)
        with pytest.raises(caches.CapacityError, match="beside the one that it is made of"):
            sampling.prefill(model, PROMPTS, policy=policies(model)["adakv"], split="pages")
        cache = sampling.prefill(model, PROMPTS, policy=policies(model)["wgkv"], split="pages")
        with pytest.raises(caches.CapacityError, match="beside those that are split by pages"):
            split_by_heads(cache)
    alone = tiny_model()
    assert not sampling.prefill(alone, PROMPTS, policy=policies(alone)["wgkv"], split="pages").striped
