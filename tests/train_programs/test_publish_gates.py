"""Test published gates: half the bytes, the same numbers to bfloat16, and public names."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.checkpoints.folder import describe, write_made_for
from kvjax.mesh import make_mesh
from kvjax.policies import make_policy
from kvjax.policies.admission.wgkv import WriteGate, load_gates, save_gates
from train.publish_gates import main


def test_published_gates_are_those_of_the_run_in_half_the_bytes(tmp_path):
    with jax.set_mesh(make_mesh()):
        gates = WriteGate(2, 2, 16, expand=2.0, rngs=nnx.Rngs(0))
    described = {
        "tau": 0.1,
        "window": 8,
        "lambda": 0.5,
        "rate": [[0.5, 0.25]] * 2,
        "peak_rate": [[1.0, 0.5]] * 2,
    }
    save_gates(tmp_path / "run" / "gates", gates, described | {"model": "/some/path", "data": "/other"})
    write_made_for(tmp_path / "run" / "gates", MadeFor("/some/path", "00"))
    out = tmp_path / "published"
    main(["--run", str(tmp_path / "run"), "--out", str(out), "--model", "some/model", "--data", "text"])
    sizes = [(folder / "gates.safetensors").stat().st_size for folder in (tmp_path / "run" / "gates", out)]
    assert sizes[1] < 0.6 * sizes[0]
    assert describe(out).items() >= (described | {"model": "some/model", "data": "text"}).items()
    assert MadeFor.described(describe(out)) == MadeFor("some/model", "00")
    published, _ = load_gates(out)
    for original, published_array in zip(jax.tree.leaves(gates), jax.tree.leaves(published), strict=True):
        assert published_array.dtype == jnp.float32
        np.testing.assert_allclose(published_array, original, rtol=2**-8)
    assert make_policy("wgkv", gates=out).window == 8
