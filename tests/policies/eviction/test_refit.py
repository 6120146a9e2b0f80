"""Test the refit against least squares in float64: for one head, and through the library for every head cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Pages
from kvjax.errors import UserError
from kvjax.inference import prefill
from kvjax.inference.forward import forward
from kvjax.mesh import make_mesh, use_mesh
from kvjax.policies import KVzip, make_policy
from kvjax.policies.eviction.refit import LARGEST, RIDGE, Target, bias, fit, ridge, target
from tests.inference.dense import logits_over_stored_entries
from tests.policies.captured import LENGTHS, PAGE, captured_layers
from tests.policies.published import softmax
from tests.tasks.model_tokenizers import byte_tokenizer
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.slow

IDS = {"instruction": (9, 8, 40), "resumption": (9, 7, 5, 33), "tail": (4,)}
PARTS = {"prefix": 3, "repeated": 16} | IDS
"""KVzip's arguments as in its own tests: four passes over 60 tokens, three over 41."""
QUERIES = 64
"""Reference queries of a kv head: those of 32 tokens for its two query heads."""
RATIO = 0.2
LONGEST = 96
read_one = jax.jit(forward, static_argnames="write")
last = jax.jit(lambda model, hidden: model.logits(hidden))


def attention(q, k, v):
    """Return attention's output, each query's largest logit and the mass relative to it."""
    x = q @ k.T / np.sqrt(q.shape[1])
    largest = x.max(1)
    mass = np.exp(x - largest[:, None]).sum(1)
    return softmax(x) @ v, largest, mass


def least_squares(x, y, own):
    """Return the `own` solution of `x @ found = y` changed as little as the ridge wants, by the normal equations."""
    weight = RIDGE * (x**2).sum() / len(x)
    return own + np.linalg.solve(x.T @ x + weight * np.eye(x.shape[1]), x.T @ (y - x @ own))


def expected(q, k, v, stays):
    """Return the values and biases of the entries that stay, in float64."""
    output, largest, mass = attention(q, k, v)
    x = q @ k[stays].T / np.sqrt(q.shape[1])
    weight = np.exp(x - largest[:, None])
    least, most = np.exp(-LARGEST), np.exp(LARGEST)
    w = np.clip(least_squares(weight, mass, np.ones(weight.shape[1])), least, most)
    for _ in range(2):
        w = np.clip(w + weight.T @ (mass - weight @ w) / np.linalg.norm(weight, 2) ** 2, least, most)
    return least_squares(softmax(x + np.log(w)), output, v[stays]), np.log(w)


@pytest.fixture(scope="module")
def one_head():
    """Return the queries, keys and values of a head whose first entries draw most of the attention."""
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(size, 8)) for size in (24, 40, 40))
    k[:, 0] += np.linspace(3, -1, 40)
    q[:, 0] += 1
    return q, k, v


@pytest.mark.parametrize("kept", [10, 30], ids=["fewer entries than queries", "more"])
def test_one_head_is_that_of_float64(one_head, kept):
    """Padded queries and places without an entry change nothing, whatever they hold."""
    q, k, v = one_head
    stays = np.sort(np.random.default_rng(1).permutation(40)[:kept])
    padded = [jnp.asarray(np.pad(x, ((0, 2), (0, 0)), constant_values=7), jnp.float32) for x in (q, k, v)]
    own = [jnp.asarray(np.pad(x[stays], ((0, 3), (0, 0)), constant_values=9), jnp.float32) for x in (k, v)]
    wanted = target(*padded, jnp.arange(42) < 40)
    for got, want in zip(wanted, attention(q, k, v), strict=True):
        np.testing.assert_allclose(got[:24], want, atol=1e-5)
    values, biases = fit(padded[0], jnp.arange(26) < 24, wanted, *own, jnp.arange(kept + 3) < kept)
    want = expected(q, k, v, stays)
    np.testing.assert_allclose(biases[:kept], want[1], atol=1e-3)
    np.testing.assert_allclose(values[:kept], want[0], atol=1e-3)
    assert (biases[kept:] == 0).all()
    assert np.abs(want[1]).max() > 0.1


def test_a_bias_restores_the_mass_that_was_dropped():
    """All logits are 0. Two of four entries stay, so each stands for two. The values move by what their mean lacks, up
    to the ridge."""
    q, k, n = jnp.zeros((6, 4)), jnp.ones((4, 4)), 6
    v = jnp.asarray([[1.0, 0], [3, 0], [5, 8], [7, 0]]) @ jnp.eye(2, 4)
    wanted = target(q, k, v, jnp.ones(4, bool))
    np.testing.assert_allclose(wanted.mass, 4)
    np.testing.assert_allclose(wanted.output[:, :2], [[4.0, 2.0]] * n)
    values, biases = fit(q, jnp.ones(n, bool), wanted, k[:2], v[:2], jnp.ones(2, bool))
    np.testing.assert_allclose(biases, np.log([2, 2]), rtol=1e-5)
    share = n / 2 / (n / 2 + RIDGE / 2)
    np.testing.assert_allclose(
        values[:, :2], [[1 + 2 * share, 2 * share], [3 + 2 * share, 2 * share]], rtol=1e-5
    )


def test_biases_are_at_most_three():
    """One entry stands for a hundred of its like, and another draws no attention that would be missed."""
    weight, mass = jnp.asarray([[1.0, 0.0], [1.0, 0.5]]), jnp.asarray([100.0, 1.0])
    assert bias(weight, mass).tolist() == pytest.approx([LARGEST, -LARGEST])


def test_a_matrix_of_zeros_changes_nothing():
    for shape in ((3, 5), (5, 3)):
        assert (ridge(jnp.zeros(shape), jnp.ones((shape[0], 2))) == 0).all()
    nothing = Target(jnp.zeros((3, 4)), jnp.zeros(3), jnp.zeros(3))
    values, biases = fit(
        jnp.ones((3, 4)), jnp.zeros(3, bool), nothing, *jnp.ones((2, 5, 4)), jnp.ones(5, bool)
    )
    assert (values == 1).all()
    assert (biases == 0).all()


def policy_of(model, name="kvzip", ratio=RATIO, refits=True, **more):
    """Return a policy with the passes of KVzip's tests."""
    own = {"ratio": ratio} | (PARTS if name == "kvzip" else {}) | more
    own |= {"refit": {"queries": QUERIES, "reader": KVzip(**PARTS)}} if refits else {}
    return make_policy({name: own}, model=model)


def heads(cache, lengths=LENGTHS):
    """Yield each (layer, sequence, head) with the keys, values and biases of its entries."""
    pool, biases = np.asarray(cache.pages.pool), np.asarray(cache.pages.metadata["bias"])
    table, length = np.asarray(cache.layers.page_table), np.asarray(cache.layers.length)
    for layer, b, head in np.ndindex(length.shape[0], len(lengths), length.shape[2]):
        count = length[layer, b, head]
        pages = table[layer, b, head, : -(-count // cache.page_size)]
        k, v = np.split(pool[pages].reshape(-1, pool.shape[-1])[:count], 2, -1)
        yield (layer, b, head), k, v, biases[pages].reshape(-1)[:count]


@pytest.fixture(scope="module")
def references(model, prompts):
    """Return, by sequence and layer, the results of plain attention on the prompt, and the queries `[n r h]` of 32
    tokens that are spread evenly over its passes."""
    found = []
    for row in prompts:
        passes = KVzip(**PARTS).passes(row)
        behind = [np.concatenate([row, one.tokens]) for one in passes]
        layers = [captured_layers(model, np.pad(x, (0, LONGEST - len(x)))) for x in behind]
        count = sum(one.tokens.size for one in passes)
        chosen = np.arange(QUERIES // 2) * count // (QUERIES // 2)
        own = []
        for each in zip(*layers, strict=True):
            read = zip(each, behind, strict=True)
            q = np.concatenate([c.q[:, row.size : len(x)] for c, x in read], 1)
            c = each[0]
            own.append(dataclasses.replace(c, q=q[:, chosen], k=c.k[:, : row.size], v=c.v[:, : row.size]))
        found.append(own)
    return found


@pytest.mark.parametrize("name", ["kvzip", "snapkv"])
def test_every_head_is_refitted_to_the_references(model, prompts, references, name):
    """The same entries stay as without the refit. Their values and biases are those of float64, and attention from the
    references comes closer to that over the whole prompt. The tokens that observe for SnapKV are no part of it."""
    more = {} if name == "kvzip" else {"observed": 4}
    read = {"page_size": PAGE} | ({} if name == "kvzip" else {"observers": [[7, 8, 9, 10]] * 2})
    cache = prefill(model, prompts, policy=policy_of(model, name, **more), **read)
    plain = prefill(model, prompts, policy=policy_of(model, name, refits=False, **more), **read)
    np.testing.assert_array_equal(cache.layers.length, plain.layers.length)
    errors = []
    for (layer, b, head), k, v, biases in heads(cache):
        c = references[b][layer]
        q = c.q.reshape(len(c.k), -1, c.q.shape[-1])[head]
        stays = np.abs(k[:, None] - c.k[head]).sum(-1).argmin(1)
        np.testing.assert_allclose(k, c.k[head][stays], atol=1e-4)
        values, wanted = expected(q, c.k[head], c.v[head], stays)
        np.testing.assert_allclose(biases, wanted, atol=3e-3)
        np.testing.assert_allclose(v, values, atol=3e-3)
        x, output = q @ k.T / np.sqrt(q.shape[1]), attention(q, c.k[head], c.v[head])[0]
        errors.append(
            [np.square(softmax(x + y) @ z - output).sum() for y, z in ((biases, v), (0, c.v[head][stays]))]
        )
    fitted, evicted = np.array(errors).T
    assert (fitted <= evicted).all()
    assert fitted.sum() < evicted.sum() / 2


def logits_after(model, policy, cache):
    """Return the logits of one more token after each sequence."""
    with use_mesh(model):
        batch = cache.seen.shape[0]
        fed = jnp.full((batch, 1), 5, jnp.int32), jnp.ones(batch, jnp.int32)
        hidden = read_one(model, policy.compile(model).decode, cache, *fed, write=False)[1]
        return np.asarray(last(model, hidden))[:, 0]


def test_a_token_reads_biases_and_new_values(model, prompts):
    """Its logits are those of dense attention over what the pool holds."""
    policy = policy_of(model)
    cache = prefill(model, prompts, policy=policy, page_size=PAGE, max_new_tokens=4)
    assert max(np.abs(biases).max() for *_, biases in heads(cache)) > 0.5
    dense = logits_over_stored_entries(model, cache, np.array([5, 5], np.int32))
    np.testing.assert_allclose(logits_after(model, policy, cache), dense, atol=1e-4)


def test_a_sequence_alone_is_that_of_the_batch(model, prompts):
    """The other sequence of the batch has another number of passes and of entries."""
    policy = policy_of(model)
    together = [
        found for found in heads(prefill(model, prompts, policy=policy, page_size=PAGE)) if found[0][1] == 1
    ]
    alone = heads(prefill(model, prompts[1:], policy=policy, page_size=PAGE), LENGTHS[1:])
    for (_, *want), (_, *got) in zip(together, alone, strict=True):
        for one, other in zip(want, got, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-3)


def test_what_lost_nothing_stays_to_the_bit(model, prompts):
    cache = prefill(model, prompts, policy=policy_of(model, ratio=1.0), page_size=PAGE)
    plain = prefill(model, prompts, page_size=PAGE)
    np.testing.assert_array_equal(cache.pages.pool, plain.pages.pool)
    for *_, biases in heads(cache):
        assert (biases == 0).all()


def test_int8_entries_keep_their_keys_to_the_bit():
    """Two of three entries get new values, with new scales; the third stays as it is."""
    random = np.random.default_rng(0)
    kv, v = jnp.asarray(random.normal(size=(1, 1, 3, 16))), jnp.asarray(9 * random.normal(size=(1, 1, 3, 8)))
    key_scale = jnp.exp2(jnp.arange(8.0))[None, None]
    nothing = jnp.zeros(1, jnp.int32)
    metadata = {"scale": jnp.zeros((1, 4), jnp.int32)}
    pages = Pages(jnp.zeros((1, 4, 16), jnp.int8), nothing, nothing, jnp.dtype("float32"), metadata=metadata)
    stored, scale = pages.as_stored(kv, key_scale)
    pages = dataclasses.replace(
        pages,
        pool=pages.pool.at[0, :3].set(stored[0, 0]),
        metadata={"scale": metadata["scale"].at[0, :3].set(scale[0, 0])},
    )
    offset = jnp.arange(3)[None, None]
    after = pages.with_values(jnp.asarray([[[0, 1, 0]]]), offset, v, key_scale)
    old, new = (x.entries(jnp.zeros((1, 1, 3), int), offset, key_scale)[0, 0] for x in (pages, after))
    np.testing.assert_array_equal(new[:, :8], old[:, :8])
    np.testing.assert_array_equal(new[1], old[1])
    step = np.abs(v[0, 0]).max(-1, keepdims=True) / 127
    assert (np.abs(new[:, 8:] - v[0, 0])[::2] <= 0.51 * step[::2]).all()


@pytest.mark.mesh
@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 2}, {"tensor": 2, "replica": 2}], ids=str)
@pytest.mark.parametrize("entries", [None, "int8"])
def test_a_mesh_is_one_device(prompts, mesh, entries):
    """Heads are split, and replicas of a head get the same values. The batch is padded, and its last sequence has no
    pass."""
    sizes, rows = {"num_kv_heads": 2, "qk_norm": False, "kv_cache_dtype": entries}, [*prompts, prompts[0][:3]]
    one = tiny_model(**sizes)

    def found(model):
        policy = policy_of(model)
        cache = prefill(model, rows, policy=policy, page_size=PAGE, max_new_tokens=4)
        return logits_after(model, policy, cache)[:3]

    want = found(one)
    with jax.set_mesh(make_mesh(**mesh)):
        got = found(tiny_model(**sizes))
    np.testing.assert_allclose(got, want, atol=1e-3 if entries is None else 0.05)


BAD = {
    "snapkv:ratio=0.1,refit": "^refit needs tokenizer=",
    "snapkv:ratio=0.1,refit.queries=0": "^refit: queries must be a whole number of at least 1, got 0",
    "snapkv:ratio=0.1,refit.reader=kvzip": "^refit: reader must be a method such as KVzip",
    "snapkv:ratio=0.1,when=chunk,chunk=128,refit": "^snapkv:refit fits .* when must be 'prompt', got 'chunk'",
    "snapkv:entries=64,when=every,every=8,refit": "^snapkv:refit fits .* when must be 'prompt', got 'every'",
    "streaming_llm:window=80+snapkv:ratio=0.1,refit": "^snapkv:refit fits .* an admission does not store every",
    "snapkv:ratio=0.1,refit+quest:ratio=0.5": "^snapkv:refit.quest: refit fits all entries together, and a selection",
}


@pytest.mark.parametrize("policy", BAD)
def test_policies_that_cannot_refit_are_refused(policy):
    """All but the first have what they need to read the passes."""
    with pytest.raises(UserError, match=BAD[policy]):
        make_policy(policy, tokenizer=None if policy == next(iter(BAD)) else byte_tokenizer())
