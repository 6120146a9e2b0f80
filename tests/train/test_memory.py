"""Test the memory of a training run: the check before its first update, and the description of a device's memory."""

import jax
import numpy as np
import pytest
from jax import monitoring

from kvjax.cli.launch import MeshShape
from kvjax.errors import UserError, shown_bytes
from kvjax.mesh import make_mesh
from kvjax.train import memory
from kvjax.train.batches import Rows, to_mesh
from kvjax.train.recipes.wgkv import WriteGates
from kvjax.train.update import initial_state, make_update
from tests.tiny_models import tiny_model

RUN = WriteGates(mesh=MeshShape(1, 2, 2), window=8, lengths=(32, 64), shares=(1.0, 1.0), sequences=10)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(fsdp=2, tensor=2)


def on_one(tree):
    """Return the bytes of the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.slow
def test_the_check_compiles_the_runs_own_program(mesh, monkeypatch):
    """It is not compiled twice, and its temporaries are those that the run reports for its longest update."""
    monkeypatch.setattr(memory, "device_bytes", lambda: 1 << 40)
    compiles = []
    with jax.set_mesh(mesh):
        model = tiny_model()
        state = jax.jit(lambda model: initial_state(RUN, model))(model)
        batch = to_mesh(mesh, Rows.of_this_process(mesh, RUN.rows), np.zeros((RUN.rows, 64), np.int32))
        update = make_update(RUN)
        holds = {"weights": model, "trained parameters": state.params, "optimizer": state.opt}
        holds = {name: shown_bytes(on_one(tree)) for name, tree in holds.items()}
        total = shown_bytes(on_one((model, state)))
        assert on_one(state.params) < sum(x.nbytes for x in jax.tree.leaves(state.params)) / 2

        def on_event(event, *_, **__):
            if event.endswith("backend_compile_duration"):
                compiles.append(event)

        monitoring.register_event_duration_secs_listener(on_event)
        try:
            extra = memory.check(RUN, update, mesh, model)
            checked = len(compiles)
            description = memory.describe(RUN, state, model, extra)
            without_extra = memory.describe(RUN, state, model, 0)
            analysis = update.lower(state, model, batch, np.int32(0)).compile().memory_analysis()
            update(state, model, batch, np.int32(0))
            assert checked > 0
            assert len(compiles) == checked
        finally:
            monitoring.clear_event_listeners()
    expected = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    expected += analysis.generated_code_size_in_bytes
    assert 0 < expected <= extra <= expected + batch.nbytes
    assert (
        without_extra
        == f"a device holds {total}: {', '.join(f'{name} {size}' for name, size in holds.items())}"
    )
    assert description == f"{without_extra}; an update of 2 × 64 tokens takes {shown_bytes(extra)} more"


@pytest.mark.slow
def test_lengths_that_do_not_fit_are_refused_with_one_that_does(mesh, monkeypatch):
    """Devices have exactly the bytes that the longer or the shorter sequences need, or one byte less."""
    with jax.set_mesh(mesh):
        model = tiny_model(tied=False)  # the loss does not read this model's output head
        update = make_update(RUN)
        state = jax.jit(lambda model: initial_state(RUN, model))(model)
        needs = {}
        for length in RUN.lengths:
            batch = to_mesh(
                mesh, Rows.of_this_process(mesh, RUN.rows), np.zeros((RUN.rows, length), np.int32)
            )
            analysis = update.lower(state, model, batch, np.int32(0)).compile().memory_analysis()
            temporaries = (
                analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
            )
            inputs = jax.tree.leaves((state, model, batch))
            needs[length] = temporaries + sum(leaf.addressable_shards[0].data.nbytes for leaf in inputs)
            needs[length] += analysis.generated_code_size_in_bytes
        assert needs[32] < needs[64]
        for usable, instead in [
            (needs[64], None),
            (needs[64] - 1, "--lengths up to 32 would fit"),
            (needs[32], "--lengths up to 32 would fit"),
            (needs[32] - 1, "none of its lengths fits"),
        ]:
            monkeypatch.setattr(memory, "device_bytes", lambda usable=usable: usable)
            if instead is None:
                memory.check(RUN, update, mesh, model)
                continue
            with pytest.raises(UserError, match="^an update of 2 × 64 tokens takes ") as refused:
                memory.check(RUN, update, mesh, model)
            assert instead in str(refused.value)


@pytest.mark.thorough
def test_virtual_cpu_devices_share_the_host_s_memory(mesh, monkeypatch):
    """They do not report a memory of their own."""
    host = {"SC_PAGE_SIZE": 1 << 12, "SC_PHYS_PAGES": 16 * jax.local_device_count()}
    monkeypatch.setattr("kvjax.cache.sizes.os.sysconf", host.get)
    refusal = (
        "^an update of 2 × 64 tokens takes .* of a device that has 64.00 KiB: .*none of its lengths fits"
    )
    with jax.set_mesh(mesh), pytest.raises(UserError, match=refusal):
        memory.check(RUN, make_update(RUN), mesh, tiny_model())


def test_a_compilers_refusal_is_an_error_of_one_line(mesh, monkeypatch):
    """A TPU's compiler refuses programs that do not fit, and may not say how much they need."""

    def update(state, model, batch, step):
        pytest.fail("it ran")

    def refuse(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    update.lower = refuse
    monkeypatch.setattr(memory, "device_bytes", lambda: 1 << 30)
    with (
        jax.set_mesh(mesh),
        pytest.raises(UserError, match="takes more of a device that has 1.00 GiB: .*none of its"),
    ):
        memory.check(RUN, update, mesh, tiny_model())


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        ("RESOURCE_EXHAUSTED: … HLO temporaries (24.00G) exceeds available HBM (15.75G).", 24 << 30),
        ("RESOURCE_EXHAUSTED: Ran out. Used 17.50G of 15.75G hbm. Exceeded by 1.75G", 35 << 29),
        ("RESOURCE_EXHAUSTED: no numbers", 0),
        ("INVALID_ARGUMENT: something else", None),
    ],
)
def test_needed_bytes_are_read_from_a_refusal(message, needed):
    assert memory.refused_bytes(message) == needed
