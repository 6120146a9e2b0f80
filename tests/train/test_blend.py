"""Test heads that blend full and streaming attention: the keys that a streaming head sees, in blocks and exactly, and
the effect of the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.mesh import AXES, gather, make_mesh, put, use_mesh
from kvjax.models.decoder import positions_of, scan_layers
from kvjax.policies import make_policy
from kvjax.policies.compiled import on_mesh
from kvjax.train.blend import Blend
from kvjax.train.objective import Deployed, next_token_loss, student
from tests.tiny_models import tiny_model

TOKENS = 24


def visible_keys(blend, length, document=None):
    """Return the keys that each query of a streaming head sees, bool [t t]."""
    with jax.set_mesh(make_mesh()):
        document = None if document is None else jnp.asarray(document)[None]
        end = np.asarray(
            jax.jit(lambda: blend.ends(positions_of(jnp.zeros((1, length), jnp.int32), document)))()
        )[0]
    query, key = np.arange(length)[:, None], np.arange(length)
    same = True if document is None else np.asarray(document[0])[:, None] == np.asarray(document[0])
    return (key <= query) & (query < end) & same


def test_blocks_match_the_published_training():
    """With 128 sinks and 1,024 local tokens in blocks of 128, a query sees block 0 and the last 897 to 1,024 tokens."""
    published = Blend(jnp.ones((1, 1)), 128, 1024, 128)
    actual = visible_keys(published, 1600)
    for query in range(1600):
        expected = np.zeros(1600, bool)
        expected[:128] = True
        expected[max(0, 128 * (query // 128 - 7)) :] = True
        expected[query + 1 :] = False
        np.testing.assert_array_equal(actual[query], expected)
    assert actual[1151, :1152].all(), "so far every token is visible"
    counts = actual[:, 128:].sum(1)
    assert [counts[1151], counts[1152]] == [1024, 897]
    assert published.band == 897


def test_blocks_of_one_token_are_exact():
    exact = Blend(jnp.ones((1, 1)), 3, 5, 1)
    actual, (query, key) = visible_keys(exact, 20), np.ogrid[:20, :20]
    np.testing.assert_array_equal(actual, (key <= query) & ((key < 3) | (query - key < 5)))
    assert exact.band == 5


def test_every_document_has_its_own_sinks_and_blocks():
    document = np.repeat([0, 1, 2], [7, 1, 16])
    together = visible_keys(Blend(jnp.ones((1, 1)), 2, 4, 3), 24, document)
    for first, last in ((0, 7), (7, 8), (8, 24)):
        separate = visible_keys(Blend(jnp.ones((1, 1)), 2, 4, 3), last - first)
        np.testing.assert_array_equal(together[first:last, first:last], separate)


@pytest.fixture(scope="module")
def run():
    """Yield a tiny model, two sequences, and a function from weights z to their hidden states."""
    model = tiny_model()
    tokens = np.random.default_rng(0).integers(0, 61, (2, TOKENS))
    with use_mesh(model):
        tokens = put(tokens)

        @jax.jit
        def hidden(z):
            blend = Blend(z, 2, 4, 1)
            return student(blend, model, tokens, window=blend.band)[0]

        yield model, tokens, hidden


def test_weights_of_0_and_1_match_the_streaming_and_the_dense_model(run):
    """They are equal bit by bit where all heads are alike, and a mix is equal up to rounding: the pattern's whole heads
    have ends that no query reaches, the blend's have none."""
    model, tokens, hidden = run
    shape = model.config.num_layers, model.config.num_kv_heads
    with use_mesh(model):
        np.testing.assert_array_equal(hidden(np.ones(shape, np.float32)), jax.jit(model.hidden)(tokens))
        for pattern in (np.zeros(shape), np.arange(np.prod(shape)).reshape(shape) % 2):
            policy = make_policy({"head_pattern": {"pattern": pattern.astype(float), "sink": 2, "window": 4}})
            admission = on_mesh(policy.admission, *shape)
            masked = jax.jit(lambda a: student(Deployed(a, 4), model, tokens, window=4)[0])(admission)
            atol = 1e-5 if pattern.any() else 0.0
            np.testing.assert_allclose(hidden(jnp.asarray(pattern, jnp.float32)), masked, rtol=0, atol=atol)


def dense(model, tokens, document, z, streaming):
    """Return the final hidden states of dense attention: z of the causal mask's plus 1 − z of `streaming`'s [b t t]."""
    index = np.arange(tokens.shape[1])
    full = (index[:, None] >= index) & (document[:, :, None] == document[:, None])
    start = np.stack([np.searchsorted(row, row) for row in document])

    def attend(step, _, z):
        q, k, v = gather((step.q, step.k, step.v), *AXES)
        group = q.shape[1] // z.size
        k, v = (jnp.repeat(x, group, 1) for x in (k, v))
        s = jnp.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(k.shape[-1])

        def under(mask):
            return jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(jnp.where(mask[:, None], s, -jnp.inf), -1), v)

        z = jnp.repeat(z, group)[:, None, None]
        o = z * under(full) + (1 - z) * under(streaming)
        return jax.sharding.reshard(o, jax.typeof(step.q).sharding.spec), None, None

    tokens, position = jnp.asarray(tokens), jnp.asarray(index - start, jnp.int32)
    x, *_ = scan_layers(model, model.embed_tokens(tokens), position, attend, xs=z, token=tokens)
    return model.norm(x)


def test_blends_of_packed_documents_match_dense_attention():
    """Some weights are between 0 and 1 and some are either; sinks and windows are not multiples of a block."""
    sink, window, block = 2, 5, 3
    random, model = np.random.default_rng(4), tiny_model()
    tokens = random.integers(0, 61, (2, 40)).astype(np.int32)
    document = np.stack([np.repeat([0, 1, 2], sizes) for sizes in ((9, 1, 30), (14, 21, 5))]).astype(np.int32)
    z = random.uniform(size=(3, 4)).astype(np.float32)
    z[0, 0], z[1, 1] = 0, 1
    position = np.arange(40) - np.stack([np.searchsorted(row, row) for row in document])
    query, key = position[:, :, None], position[:, None]
    streaming = (document[:, :, None] == document[:, None]) & (key <= query)
    streaming &= (key // block < 1) | (key // block > query // block - 2)
    with use_mesh(model):
        blend = Blend(jnp.asarray(z), sink, window, block)
        run = jax.jit(lambda *arguments: student(blend, model, *arguments, window=blend.band)[0])
        actual = run(put(tokens), put(document))
        reference = jax.jit(lambda z: dense(model, tokens, document, z, streaming))
        expected, full = reference(z), reference(np.ones_like(z))
    assert np.abs(expected - full).max() > 0.1
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.slow
def test_gradients_of_weights_match_finite_differences(run):
    """The loss is smooth in the weights, and each is moved by itself."""
    model, tokens, hidden = run
    shape = model.config.num_layers, model.config.num_kv_heads
    z = np.random.default_rng(1).uniform(0.2, 0.8, shape).astype(np.float32)
    with use_mesh(model):
        loss = jax.jit(lambda z: next_token_loss(model, hidden(z), tokens))
        actual, step = np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(z))), 0.01
        for index in np.ndindex(shape):
            moved = np.zeros(shape, np.float32)
            moved[index] = step
            expected = (float(loss(jnp.asarray(z + moved))) - float(loss(jnp.asarray(z - moved)))) / (
                2 * step
            )
            assert actual[index] == pytest.approx(expected, rel=0.005, abs=3e-4)
