"""Tests of meshes with more devices than the model has kv heads: replicas of a head hold the same entries and give the
same results."""

import functools

import jax
import numpy as np
import pytest

from kvjax import cache as caches
from kvjax.cli.launch import MeshShape
from kvjax.errors import UserError
from kvjax.inference import generate, prefill
from kvjax.mesh import P, make_mesh
from kvjax.models.layers import by_replica
from kvjax.models.shapes import fit_mesh
from kvjax.policies import make_policy
from tests.inference.cached import cached_logits
from tests.inference.contexts import CONTEXTS, QUESTIONS, WITH_LOGPROBS
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.mesh
SIZES = {"num_kv_heads": 2, "qk_norm": False}
MESHES = [{"tensor": 2, "replica": 2}, {"fsdp": 2, "replica": 4}]
CALLS = [8] * 4 + [1] * 8


@pytest.mark.parametrize("mesh", [MESHES[0], pytest.param(MESHES[1], marks=pytest.mark.thorough)], ids=str)
def test_replicas_give_the_logits_and_entries_of_one_device(tokens, mesh):
    one = tiny_model(**SIZES)
    rates = {"random": {"rates": np.full((3, 2), 0.5, np.float32), "window": 6}}
    want, alone = cached_logits(one, make_policy(rates, model=one), tokens, CALLS)
    with jax.set_mesh(make_mesh(**mesh)):
        many = tiny_model(**SIZES)
        got, cache = cached_logits(many, make_policy(rates, model=many), tokens, CALLS)
    assert np.abs(got - want).max() < 1e-4
    np.testing.assert_array_equal(cache.layers.length, alone.layers.length)
    assert caches.stats(cache).pages == caches.stats(alone).pages


@pytest.mark.parametrize(
    "policy",
    [
        "snapkv:ratio=0.5,observed=4",
        *(
            pytest.param(x, marks=pytest.mark.thorough)
            for x in ("h2o:entries=24,when=every,every=8", "quest:ratio=0.5")
        ),
    ],
)
def test_replicas_give_the_answers_of_one_device(policy):
    results = []
    for mesh in ({}, MESHES[0]):
        with jax.set_mesh(make_mesh(**mesh)):
            model = tiny_model(**SIZES)
            made_policy = make_policy(policy, model=model)
            cache = prefill(model, CONTEXTS, policy=made_policy, chunk=32)
            answers = generate(model, QUESTIONS[:2], WITH_LOGPROBS, policy=made_policy, cache=cache)
            results.append((answers.tokens, [logprobs.chosen for logprobs in answers.logprobs]))
    np.testing.assert_array_equal(results[1][0], results[0][0])
    np.testing.assert_allclose(results[1][1], results[0][1], atol=1e-4)


@pytest.mark.parametrize(("replicas", "own"), [(4, 1), (2, 2), (8, 4)])
def test_each_replica_computes_its_share_of_the_query_heads(replicas, own):
    """There is one kv head with four query heads, which eight devices cannot share."""
    seen = []

    def attend(q):
        seen.append(q.shape[1])
        return 2 * q, q.sum(-1)

    q = jax.random.normal(jax.random.key(0), (1, 4, 5, 3))
    with jax.set_mesh(make_mesh(replica=replicas)):
        call = functools.partial(by_replica, attend, heads=1)
        o, lse = jax.jit(jax.shard_map(call, in_specs=P(), out_specs=P()))(q)
    np.testing.assert_array_equal(o, 2 * q)
    np.testing.assert_allclose(lse, q.sum(-1), rtol=1e-6)
    assert seen == [own]


def test_an_error_suggests_a_mesh_with_replicas():
    message = r"the model's kv heads \(2\); tensor=2,replica=4 does"
    with jax.set_mesh(make_mesh(tensor=8)), pytest.raises(UserError, match=message):
        tiny_model(**SIZES)


def test_devices_beyond_the_kv_heads_become_replicas_on_the_command_line():
    sizes = tiny_model(**SIZES).config
    fitted = {
        text: str(fit_mesh(MeshShape.parse(text), sizes))
        for text in ("tensor=8", "fsdp=2,tensor=4", "2x2", "8")
    }
    assert fitted == {
        "tensor=8": "tensor=2,replica=4",
        "fsdp=2,tensor=4": "fsdp=2,tensor=2,replica=2",
        "2x2": "2x2",
        "8": "8",
    }
    assert str(fit_mesh(MeshShape.parse("tensor=2,sequence=2"), sizes)) == "sequence=2,replica=2"
    with pytest.raises(UserError, match=r"--mesh sequence=3: .* does not divide the model's kv heads \(2\)"):
        fit_mesh(MeshShape.parse("sequence=3"), sizes)
