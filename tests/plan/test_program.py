"""The bytes of a program by part, against real arrays and what the compiler says of the run's own program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import cache as caches
from kvjax.command.launch import MeshShape
from kvjax.inference.sampling import sample
from kvjax.mesh import make_mesh
from kvjax.models.decoder import Decoder
from kvjax.plan.program import TEMPORARIES, figures, too_much
from kvjax.plan.serving import POOL, STAGES, ServeConfig, Serving, stages_of
from kvjax.plan.targets import targets
from kvjax.plan.training import WEIGHTS, update
from kvjax.policies import make_policy
from kvjax.train.recipes.wgkv import WriteGates
from kvjax.train.rows import Rows, to_mesh
from kvjax.train.update import initial_state, make_update
from tests.tiny_models import filled, tiny_sink_gates

RUN = WriteGates(mesh=MeshShape(1, 2, 2), window=8, lengths=(64,), shares=(1.0,), sequences=10)


def own_bytes(tree) -> int:
    """Of the first device's parts of real arrays."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(fsdp=2, tensor=2)


@pytest.fixture(scope="module")
def trained(mesh, shape):
    with jax.set_mesh(mesh):
        return figures(update(RUN, shape, "float32", mesh, 64), "cpu")


@pytest.mark.thorough
def test_a_pass_over_a_context_is_of_one_sequence_and_its_share_of_the_heads(mesh, shape, trained):
    """Of contexts of 1,000 tokens behind a prefix of 64, repeated by 2,064, which are padded to 3,072."""
    with jax.set_mesh(mesh):
        found = figures(targets("hidden", shape, "float32", mesh, 1000, "repeat"), "cpu")
    assert found.parts[WEIGHTS] == trained.parts[WEIGHTS]
    # tokens, how many there are, and where the part and the prefix are
    assert found.parts["batch"] == 4 * (3072 + 1 + 3)
    # keys, values and a score, of half the kv heads
    entry = shape.num_layers * shape.num_kv_heads // 2 * 4 * (2 * shape.head_dim + 1)
    assert 1064 * entry < found.parts[POOL] < 2 * 1064 * entry


def test_the_parts_of_training_are_those_of_the_run(mesh, shape, trained):
    with jax.set_mesh(mesh):
        model = jax.jit(lambda: Decoder(shape, rngs=nnx.Rngs(0)))()
        state = jax.jit(lambda model: initial_state(RUN, model))(model)
        batch = to_mesh(mesh, Rows.of_this_process(mesh, RUN.rows), np.zeros((RUN.rows, 64), np.int32))
        memory = make_update(RUN).lower(state, model, batch, np.int32(0)).compile().memory_analysis()
    assert trained.parts[WEIGHTS] == own_bytes(model)
    assert trained.parts["trained parameters"] == own_bytes(state.params)
    assert trained.parts["optimizer"] == own_bytes(state.opt)
    assert trained.parts["batch"] == own_bytes(batch) + 4
    assert trained.parts[TEMPORARIES] == memory.temp_size_in_bytes > 0
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    compiled = memory.argument_size_in_bytes + memory.temp_size_in_bytes + results
    # the run's program is not given what it does not read
    unread = trained.parts["padding"] + trained.total - compiled - trained.parts["program"]
    assert 0 <= unread < own_bytes(model)
    assert trained.least_bytes == trained.total - trained.parts[TEMPORARIES] - trained.parts["program"]


@pytest.mark.thorough
def test_split_tokens_take_their_part_of_the_memory(shape):
    found = []
    for count in (1, 2):
        run, mesh = dataclasses.replace(RUN, mesh=MeshShape(sequence=count)), make_mesh(sequence=count)
        with jax.set_mesh(mesh):
            found.append(figures(update(run, shape, "float32", mesh, 1024), "cpu"))
    alone, split = found
    assert split.parts[WEIGHTS] == alone.parts[WEIGHTS]
    assert split.parts[TEMPORARIES] < 0.55 * alone.parts[TEMPORARIES]
    assert set(split.collectives) == {"all-to-all", "all-reduce"}


@pytest.mark.parametrize(("policy", "share"), [({}, 1.0), ({"policy": "wgkv", "ratio": 0.25}, 0.25 * 1.25)])
def test_a_pool_holds_what_the_policy_keeps(mesh, shape, policy, share):
    """In whole pages, and for a window its ring and a page; each entry a key and a value, and beside the pages their
    numbers on a list and a count."""
    told = ServeConfig(topology="", context=1024, batch=4, new=16, window=16 if policy else None, **policy)
    with jax.set_mesh(mesh):
        program = Serving(told, shape, "bfloat16", mesh).decode()
        parts = dict(program.parts)
        pool = jax.tree.leaves(parts[POOL])
        own = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in pool)
    rows = shape.num_layers * 4 // 2 * shape.num_kv_heads // 2
    page = 16 * 2 * shape.head_dim * 2 + 4
    least = rows * np.ceil(share * 1040 / 16)
    assert least * page <= own - 4 <= caches.pool_size(int(least) + 3 * rows, page) * page


class Called(Exception):
    """A run came to a program, with these arguments."""


def sizes(tree):
    """Of a device's parts of arrays, with all that is compiled in."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [x.sharding.shard_shape(x.shape) if hasattr(x, "sharding") else x.shape for x in leaves]
    return structure, parts, [x.dtype for x in leaves]


ANSWERS = {"when": "position", "every": 16, "last": 16, "buffer": 16, "entries": 32}
TEXTS = dict.fromkeys(("instruction", "resumption", "tail"), (0,) * 16)


@pytest.mark.parametrize(
    ("name", "told", "guidance"),
    [
        ("oraclekv", (), (0,) * 112),
        ("oraclekv", ("guidance=What is asked?",), (0,) * 5),
        ("adakv", ("eviction=snapkv", "guidance=T1"), (0,) * 38),
        ("snapkv", ("guidance=[5, 6]",), (5, 6)),
        ("snapkv", ("observed=8",), ()),
    ],
)
def test_guidance_that_is_a_text_has_tokens_for_it(mesh, shape, name, told, guidance):
    """G1 has 336 letters and T1 113."""
    config = ServeConfig(topology="", policy=name, context=512, set=(("ratio=0.5", *told),))
    with jax.set_mesh(mesh):
        assert Serving(config, shape, "bfloat16", mesh).policy().when.guidance == guidance


@pytest.mark.parametrize(
    ("stage", "program", "name", "told"),
    [
        ("passes", "reread.one_pass", "kvzip", {"ratio": 0.5, "repeated": 24}),
        pytest.param("decode", "sampling.decode_block", "fast_kvzip", ANSWERS, marks=pytest.mark.thorough),
    ],
)
def test_a_program_is_given_what_a_run_gives_it(mesh, shape, stage, program, name, told, monkeypatch):
    """Gates, texts, and the compaction of the decoding loop; a pool of another size."""

    def call(*arguments, **named):
        raise Called(arguments, named)

    monkeypatch.setattr(f"kvjax.inference.{program}", call)
    options = tuple(f"{key}={value}" for key, value in told.items())
    config = ServeConfig(topology="", policy=name, context=64, batch=4, new=17, set=(options,))
    assert stages_of(config, shape) == [x for x in STAGES if x == stage or x != "passes"]
    with jax.set_mesh(mesh):
        model = filled(shape, jnp.bfloat16)
        own = TEXTS if name == "kvzip" else {"gates": tiny_sink_gates(model)}
        policy = make_policy(name, model=model, **told, **own)
        with pytest.raises(Called) as came:
            sample(model, [np.arange(64)] * 4, policy=policy, max_new_tokens=17, eos=())
        planned = getattr(Serving(config, shape, "bfloat16", mesh), stage)()
    (arguments, named), cache = came.value.args, planned.donated
    for given, ours in zip(arguments, planned.arguments, strict=True):
        if given is arguments[cache]:
            assert sizes((given.layers, given.seen)) == sizes((ours.layers, ours.seen))
            assert given.pages.planes.keys() == ours.pages.planes.keys() == {"score"}
        else:
            assert sizes(given) == sizes(ours)
    assert planned.static.items() <= named.items()
    assert sizes(named.get("recurring")) == sizes(planned.named.get("recurring"))


def test_what_is_held_already_may_be_too_much(mesh, shape):
    """Then nothing is compiled."""
    with jax.set_mesh(mesh):
        program = update(RUN, shape, "float32", mesh, 64)
        program = dataclasses.replace(program, function=jax.jit(lambda *_: pytest.fail("it was traced")))
        found = figures(program, "cpu", limit=1000)
    assert found.refused == "its arguments alone are too much"
    assert found.total > 1000


def test_decoding_reads_the_weights_once_for_each_token(mesh, shape):
    told = ServeConfig(topology="", context=64, batch=2, new=9)
    with jax.set_mesh(mesh):
        decode = Serving(told, shape, "float32", mesh).decode()
        assert decode.steps == 8
        found, alone = (figures(dataclasses.replace(decode, steps=n), "cpu") for n in (8, 1))
    assert alone.flops == 8 * found.flops
    assert found.parts == alone.parts
    c = shape
    weights = c.num_layers * (
        2 * c.width * c.head_dim * (c.num_heads + c.num_kv_heads) + 3 * c.width * c.mlp_width
    )
    assert (
        found.flops >= 2 * (weights + c.vocab_size * c.width) / 2
    )  # a sequence a batch shard, heads over two


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        ("RESOURCE_EXHAUSTED: … HLO temporaries (24.00G) exceeds available HBM (15.75G).", 24 << 30),
        ("RESOURCE_EXHAUSTED: Ran out. Used 17.50G of 15.75G hbm. Exceeded by 1.75G", 35 << 29),
        ("RESOURCE_EXHAUSTED: no numbers", 0),
        ("INVALID_ARGUMENT: something else", None),
    ],
)
def test_a_refusal_says_what_is_needed(message, needed):
    assert too_much(message) == needed
