"""Tests of fingerprints: they depend on neither mesh nor dtype, and files made for another model are refused."""

import dataclasses
import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax.builtin
from kvjax import generate, inference
from kvjax.builtin import GATES, builtin_gates, builtin_model
from kvjax.checkpoints.fingerprint import MATRICES, POINTS, STRIDES, MadeFor, agreement, contents, fingerprint
from kvjax.checkpoints.folder import describe, save_tree, write_made_for
from kvjax.errors import UserError
from kvjax.evaluate.__main__ import main as evaluate_main
from kvjax.mesh import make_mesh
from kvjax.models import load_model
from kvjax.models.decoder import unfused_values
from kvjax.models.folder import find_model
from kvjax.policies import WGKV, Policy, make_policy
from kvjax.policies.admission.pattern_folder import read_pattern, write_pattern
from kvjax.policies.admission.wgkv import save_gates
from tests.evaluate.inputs import SMALL
from tests.tiny_models import filled, tiny_config, tiny_gates, tiny_model

PROMPT = [[1, 2, 3]]
KNOWN = {
    "builtin": ("636686ac2801cb76", "fb4dcf2596c7aaf5"),
    Path(kvjax.builtin.__file__).parent / "test_model": ("148498a67a48cb57", "4137e329c1ad0417"),
}
"""Digests of the fingerprints, and the contents, as computed when weights were not fused in storage."""


def named(name, seed=0, dtype=jnp.float32, **mesh):
    with jax.set_mesh(make_mesh(**mesh)):
        return filled(dataclasses.replace(tiny_config(), name=name), dtype, seed)


@pytest.fixture(scope="module")
def own():
    return named("our/model")


@pytest.fixture(scope="module")
def other():
    """Return another model of the same shape."""
    return named("their/model", seed=1)


@pytest.fixture
def gates(own, tmp_path):
    save_gates(tmp_path / "gates", tiny_gates(own), {"tau": 0.5, "window": 4})
    write_made_for(tmp_path / "gates", MadeFor.of(own))
    return tmp_path / "gates"


def test_fingerprint_is_the_signs_of_sampled_weights(own):
    signs = []
    for name in MATRICES:
        x = np.asarray(unfused_values(own)[f"layers.{name}.value"])
        at = [np.arange(POINTS) * stride % size for stride, size in zip(STRIDES, x.shape, strict=False)]
        signs.append(x[tuple(at)] < 0)
    assert fingerprint(own)[8:] == np.packbits(np.concatenate(signs)).tobytes().hex()


def test_fingerprints_of_earlier_versions_are_unchanged():
    for model, (prints, digest) in KNOWN.items():
        model = load_model(find_model(model))
        assert (hashlib.sha256(fingerprint(model).encode()).hexdigest()[:16], contents(model)) == (
            prints,
            digest,
        )


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_fingerprint_does_not_depend_on_the_mesh(own, mesh):
    split = named("", **mesh)
    assert fingerprint(split) == fingerprint(own)
    assert contents(split) == contents(own)


def test_fingerprint_does_not_depend_on_the_dtype_but_contents_does(own):
    for dtype in (jnp.bfloat16, jnp.float16):
        assert fingerprint(named("", dtype=dtype)) == fingerprint(own)
        assert contents(named("", dtype=dtype)) != contents(own)


def test_contents_ignores_turn_ends_of_the_chat_template():
    named = tiny_model(eos_ids=(0,))
    assert contents(tiny_model(eos_ids=(0, 2), turn_ends=(("<|im_end|>", 2),))) == contents(named)
    assert contents(tiny_model(eos_ids=(0, 2))) != contents(named)


def test_other_weights_or_sizes_are_another_model(own, other):
    assert 0.4 < agreement(fingerprint(own), fingerprint(other)) < 0.6
    with jax.set_mesh(make_mesh()):
        wider = filled(tiny_config(mlp_width=96))
    assert agreement(fingerprint(own), fingerprint(wider)) == 0
    assert contents(tiny_model(no_rope=(1,))) != contents(tiny_model())


def test_contents_depends_on_every_array(own):
    """Each array is negated in turn."""
    leaves, tree = jax.tree.flatten(own)
    other = [jax.device_put(-np.asarray(x), x.sharding) for x in leaves]
    digests = {
        contents(jax.tree.unflatten(tree, [*leaves[:i], x, *leaves[i + 1 :]])) for i, x in enumerate(other)
    }
    assert len(digests | {contents(own)}) == len(leaves) + 1


def test_shapes_without_weights_are_accepted(own):
    MadeFor.of(own).check("gates", jax.eval_shape(lambda: own))


def test_gates_of_another_model_need_force(own, other, gates):
    message = "wgkv: made for the model our/model, not for their/model, .*; --force "
    with pytest.raises(UserError, match=message):
        make_policy("wgkv", model=other, gates=gates)
    for policy in (make_policy("wgkv", gates=gates), Policy(WGKV(gates))):
        inference.prefill(own, PROMPT, policy=policy)
        with pytest.raises(UserError, match=message):
            inference.prefill(other, PROMPT, policy=policy)
    for policy in (
        make_policy("wgkv", gates=gates, force=True),
        make_policy("wgkv", model=other, gates=gates, force=True),
    ):
        inference.prefill(other, PROMPT, policy=policy)


def test_gates_without_a_fingerprint_serve_any_model(own, other, tmp_path):
    save_gates(tmp_path, tiny_gates(own), {"tau": 0.5, "window": 4, "model": "our/model"})
    make_policy("wgkv", model=other, gates=tmp_path)


def test_pattern_of_another_model_needs_force(own, other, tmp_path):
    write_pattern(tmp_path / "own", np.eye(3, 4), 2, 8, MadeFor.of(own))
    write_pattern(tmp_path / "any", np.eye(3, 4), 2, 8)
    assert read_pattern(tmp_path / "own").made_for == MadeFor.of(own)
    make_policy({"head_pattern": {"pattern": tmp_path / "own"}}, model=own)
    make_policy({"head_pattern": {"pattern": tmp_path / "any"}}, model=other)
    make_policy({"head_pattern": {"pattern": tmp_path / "own"}}, model=other, force=True)
    with pytest.raises(UserError, match="head_pattern: made for the model our/model, not for their/model"):
        make_policy({"head_pattern": {"pattern": tmp_path / "own"}}, model=other)


def test_parameters_of_a_plugin_for_another_model_need_force(own, other, tmp_path):
    method = "tests.probes.head_masks:HeadMasks"
    description = {"method": method, "options": {"window": 8, "sink": 2}}
    with jax.set_mesh(make_mesh()):
        save_tree(tmp_path, {"mask": jnp.zeros((3, 4)), "multiplier": jnp.zeros(2)}, description)
    write_made_for(tmp_path, MadeFor.of(own))
    make_policy(method, model=own, gates=tmp_path)
    make_policy(method, model=other, gates=tmp_path, force=True)
    with pytest.raises(UserError, match="HeadMasks: made for the model our/model, not for their/model"):
        make_policy(method, model=other, gates=tmp_path)


def test_version_of_the_model_causes_a_warning(own, gates):
    """Weights are rounded to 16 steps, as in four bits, so that the smallest become 0."""

    def quantised(leaf):
        x = np.asarray(leaf)
        step = np.abs(x).max(-1, keepdims=True) / 8
        return jax.device_put(np.round(x / step) * step, leaf.sharding) if x.ndim > 2 else leaf

    with pytest.warns(UserWarning, match=r"of which our/model is a fine-tuned or quantised version: 9\d% of"):
        make_policy("wgkv", model=jax.tree.map(quantised, own), gates=gates)


def test_builtin_gates_are_for_the_builtin_model():
    model = load_model("builtin")
    for name, method in GATES.items():
        assert describe(builtin_gates(name))["method"] == method
        assert MadeFor.described(describe(name)) == MadeFor("builtin", fingerprint(model))
    make_policy("wgkv", model=model, gates="builtin")
    own, named = (
        make_policy("fast_kvzip:ratio=0.3", model=model, gates=x) for x in ("builtin", "builtin:fast_kvzip")
    )
    assert own.eviction.made_for == named.eviction.made_for == MadeFor("builtin", fingerprint(model))
    np.testing.assert_array_equal(own.eviction.gates.b, named.eviction.gates.b)


@pytest.mark.slow
def test_commands_refuse_gates_of_another_model_without_force(tmp_path):
    model = load_model(builtin_model("test_model"))
    their = MadeFor("their/model", fingerprint(jax.tree.map(lambda x: jnp.flip(x, 0), model)))
    save_gates(tmp_path / "gates", tiny_gates(model), {"tau": 0.5, "window": 4})
    write_made_for(tmp_path / "gates", their)
    write_pattern(tmp_path / "pattern", np.linspace(0, 1, 8).reshape(2, 4), 4, 16, their)
    gates = ["--gates", str(tmp_path / "gates")]
    command = ["--model", str(builtin_model("test_model")), "--prompt", "x", "--max-new-tokens", "1"]
    with pytest.raises(UserError, match="wgkv: made for the model their/model, not for .*test_model, "):
        generate.main([*command, "--policy", "wgkv", *gates])
    generate.main([*command, "--policy", "wgkv", *gates, "--force"])
    compare = [*SMALL, "--tasks", "needle", "--out", str(tmp_path / "out"), "--policies"]
    with pytest.raises(UserError, match="--gates .*: made for the model their/model, not for .*"):
        evaluate_main([*compare, "full", *gates])
    with pytest.raises(UserError, match="head_pattern: made for the model their/model, not for .*"):
        evaluate_main([*compare, f"head_pattern:sparsity=0.5,gates={tmp_path / 'pattern'}"])
    evaluate_main([*compare, "full", *gates, "--force"])
