"""Tests of the planned programs against real arrays and against the arguments of a real run."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import cache as caches
from kvjax.cli.launch import MeshShape
from kvjax.inference import generate
from kvjax.mesh import make_mesh
from kvjax.models.decoder import Decoder
from kvjax.plan.ahead import TEMPORARIES, memory_of
from kvjax.plan.programs import POOL, WEIGHTS, ServeConfig, Serving, update
from kvjax.policies import make_policy
from kvjax.policies.make import parse_policy
from kvjax.sampling_params import SamplingParams
from kvjax.train.batches import Rows, to_mesh
from kvjax.train.recipes.wgkv import WriteGates
from kvjax.train.update import initial_state, make_update
from tests.tiny_models import filled, tiny_sink_gates

pytestmark = pytest.mark.slow

RUN = WriteGates(mesh=MeshShape(1, 2, 2), window=8, lengths=(64,), shares=(1.0,), sequences=10)


def device_bytes(tree) -> int:
    """Return the bytes of real arrays on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(fsdp=2, tensor=2)


def test_the_parts_of_training_take_the_bytes_of_a_real_run(mesh, shape):
    with jax.set_mesh(mesh):
        trained = memory_of(update(RUN, shape, "float32", mesh, 64), "cpu")
        model = jax.jit(lambda: Decoder(shape, rngs=nnx.Rngs(0)))()
        state = jax.jit(lambda model: initial_state(RUN, model))(model)
        batch = to_mesh(mesh, Rows.of_this_process(mesh, RUN.rows), np.zeros((RUN.rows, 64), np.int32))
        analysis = make_update(RUN).lower(state, model, batch, np.int32(0)).compile().memory_analysis()
    assert trained.parts[WEIGHTS] == device_bytes(model)
    assert trained.parts["trained parameters"] == device_bytes(state.params)
    assert trained.parts["optimizer"] == device_bytes(state.opt)
    assert trained.parts["batch"] == device_bytes(batch) + 4
    assert trained.parts[TEMPORARIES] == analysis.temp_size_in_bytes > 0
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    compiled = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + results
    # The run's program drops the arguments that it does not read.
    unread = trained.parts["padding"] + trained.total - compiled - trained.parts["program"]
    assert 0 <= unread < device_bytes(model)


def test_eight_bit_weights_take_their_bytes_and_scales(mesh, shape):
    small = shape.with_weights("int8")
    with jax.set_mesh(mesh):
        planned = memory_of(update(RUN, small, "float32", mesh, 64), "cpu").parts[WEIGHTS]
        model = jax.jit(lambda: Decoder(small, rngs=nnx.Rngs(0)))()
    assert planned == device_bytes(model)
    assert device_bytes(model.layers.down) == model.layers.down.size // 4


@pytest.mark.parametrize(("policy", "share"), [("full", 1.0), ("wgkv:rate=0.25,window=16", 0.25 * 1.25)])
def test_the_pool_holds_the_entries_that_the_policy_keeps(mesh, shape, policy, share):
    """The pool has whole pages for the entries and the local window, and one page more. An entry is a key and a value.
    The pool also has a list of the free pages and their count."""
    options = ServeConfig(context=1024, batch=4, new=16, policy=policy)
    with jax.set_mesh(mesh):
        program = Serving(options, shape, "bfloat16", mesh).decode()
        pool = jax.tree.leaves(program.parts[POOL])
        pool_bytes = sum(
            np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in pool
        )
    rows = shape.num_layers * 4 // 2 * shape.num_kv_heads // 2
    page = 16 * 2 * shape.head_dim * 2 + 4
    least = rows * np.ceil(share * 1040 / 16)
    assert least * page <= pool_bytes - 4 <= caches.pool_size(int(least) + 3 * rows, page) * page


class Called(Exception):
    """Carries the arguments with which a run called a program."""


def sizes(tree):
    """Return the tree structure with its static values, and the shapes on one device and the dtypes of the arrays."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [x.sharding.shard_shape(x.shape) if hasattr(x, "sharding") else x.shape for x in leaves]
    return structure, parts, [x.dtype for x in leaves]


@pytest.mark.parametrize(
    ("policy", "guidance"),
    [
        ("oraclekv:ratio=0.5", (0,) * 112),
        ("oraclekv:ratio=0.5,guidance=What is asked?", (0,) * 5),
        ("snapkv:ratio=0.5,guidance=T1,adakv", (0,) * 38),
        ("snapkv:ratio=0.5,guidance=[5, 6]", (5, 6)),
        ("snapkv:ratio=0.5,observed=8", ()),
    ],
)
def test_guidance_texts_become_token_ids(mesh, shape, policy, guidance):
    """G1 has 336 characters and T1 has 113."""
    config = ServeConfig(policy=policy, context=512)
    with jax.set_mesh(mesh):
        assert Serving(config, shape, "bfloat16", mesh).policy().schedule.trigger.guidance == guidance


ANSWERS = "fast_kvzip:when=position,every=16,buffer=16,entries=32,protected.last=16"


@pytest.mark.parametrize(
    ("stage", "program", "policy"),
    [
        ("prefill", "forward.last_logits", "kvzip:ratio=0.5"),
        ("decode", "generate.decode_block", ANSWERS),
    ],
)
def test_a_program_gets_the_arguments_of_a_real_run(mesh, shape, stage, program, policy, monkeypatch):
    """The arguments include gates, texts and the compaction of the decoding loop. The size of the pool may differ."""

    def call(*arguments, **named):
        raise Called(arguments, named)

    module, name = program.split(".")
    monkeypatch.setattr(importlib.import_module(f"kvjax.inference.{module}"), name, call)
    config = ServeConfig(policy=policy, context=64, batch=4, new=17)
    with jax.set_mesh(mesh):
        model = filled(shape, jnp.bfloat16)
        texts = dict.fromkeys(("instruction", "resumption", "tail"), (0,) * 16)
        ((name, options),) = parse_policy(policy).items()
        options |= texts if name == "kvzip" else {"gates": tiny_sink_gates(model)}
        policy = make_policy({name: options}, model=model)
        with pytest.raises(Called) as raised:
            generate(
                model, [np.arange(64)] * 4, SamplingParams(max_new_tokens=17, ignore_eos=True), policy=policy
            )
        planned = getattr(Serving(config, shape, "bfloat16", mesh), stage)()
    (arguments, named), cache = raised.value.args, planned.donated
    for given, ours in zip(arguments, planned.arguments, strict=True):
        if given is arguments[cache]:
            assert sizes((given.layers, given.seen)) == sizes((ours.layers, ours.seen))
            assert given.pages.metadata.keys() == ours.pages.metadata.keys() == {"score"}
        else:
            assert sizes(given) == sizes(ours)
    assert planned.static.items() <= named.items()
    assert sizes(named.get("recurring")) == sizes(planned.named.get("recurring"))
