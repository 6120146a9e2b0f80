"""What a run says of a device's memory before its first update."""

import jax
import numpy as np
import pytest

from kvjax.command.launch import MeshShape
from kvjax.mesh import make_mesh
from kvjax.plan import here
from kvjax.plan.figures import size
from kvjax.train.memory import device_bytes
from kvjax.train.recipes.wgkv import WriteGates
from kvjax.train.update import initial_state, make_update
from tests.tiny_models import tiny_model

RUN = WriteGates(mesh=MeshShape(1, 2, 2), window=8, lengths=(32, 64), shares=(1.0, 1.0), sequences=10)


@pytest.fixture(scope="module")
def started():
    mesh = make_mesh(fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        model = tiny_model()
        return mesh, model, jax.jit(lambda model: initial_state(RUN, model))(model)


def on_one(tree):
    """Bytes of the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def test_parts_are_what_one_device_holds_and_temporaries_the_checked_program_s(started):
    mesh, model, state = started
    own = make_update(RUN)
    with jax.set_mesh(mesh):
        (beside,) = here.check_memory((RUN,), (own,), (None,), mesh, model)
        batch = jax.device_put(np.zeros((2, 64), np.int32), jax.P(("data", "fsdp"), None))
        memory = own.lower(state, model, batch, np.int32(0)).compile().memory_analysis()
    more = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    more += memory.generated_code_size_in_bytes
    assert 0 < more <= beside <= more + batch.nbytes
    assert device_bytes(RUN, state, model, beside) == (
        f"a device holds {size(on_one((model, state)))}: weights {size(on_one(model))}, trained parameters "
        f"{size(on_one(state.params))}, optimizer {size(on_one(state.opt))}; an update of 2 × 64 tokens takes "
        f"{size(beside)} more"
    )
    assert on_one(state.params) < sum(x.nbytes for x in jax.tree.leaves(state.params)) / 2
    assert device_bytes(RUN, state, model, 0).endswith(f"optimizer {size(on_one(state.opt))}")
