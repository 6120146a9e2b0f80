"""Tests of caches on disk: a loaded cache goes on as the saved one would, and one that is incomplete or does not belong
is refused."""

import json
import os
import shutil

import jax
import jaxtyping
import numpy as np
import orbax.checkpoint as ocp
import pytest

import kvjax
from kvjax import cache as caches
from kvjax.cache import CapacityError
from kvjax.cache.packed_entries import packed
from kvjax.cache.saved import DESCRIPTION, describe_cache, digest_of
from kvjax.checkpoints.orbax import export
from kvjax.errors import UserError
from kvjax.inference import generate, prefill
from kvjax.inference.allocation import new_cache
from kvjax.inference.saving import _digests, checked_place, load_cache, save_cache
from kvjax.mesh import make_mesh, use_mesh
from kvjax.policies import make_policy
from tests.inference.contexts import CONTEXTS, QUESTIONS, WITH_LOGPROBS, policies
from tests.policies.captured import PAGE, pages_are_whole
from tests.tiny_models import tiny_gates, tiny_model, tiny_scorers, tiny_sink_gates

THOROUGH = "full", "quest", "r_kv", "snapkv", "h2o", "wgkv", "max_entries"
TWO_QUESTIONS = QUESTIONS[:2]


def answers_of(model, policy, cache):
    """Return the answers and the log-probabilities of their tokens."""
    answers = generate(model, TWO_QUESTIONS, WITH_LOGPROBS, policy=policy, cache=cache)
    return answers.tokens, [logprobs.chosen for logprobs in answers.logprobs]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.thorough if x in THOROUGH else ()) for x in policies(None)]
)
def test_a_loaded_cache_gives_identical_answers(model, name, tmp_path):
    policy = policies(model)[name]()
    cache = prefill(model, CONTEXTS, policy=policy, page_size=PAGE, chunk=32)
    expected = answers_of(model, policy, cache)
    save_cache(tmp_path / "saved", cache, model, policy)
    loaded = load_cache(tmp_path / "saved", model, policy)
    pages_are_whole(loaded)
    np.testing.assert_array_equal(caches.stats(loaded).entries, caches.stats(cache).entries)
    found = answers_of(model, policy, loaded)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.mesh
@pytest.mark.parametrize(
    "name", ["wgkv", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("quest", "max_entries"))]
)
def test_other_pages_and_meshes_load_the_same_entries(model, name, tmp_path):
    """The stored entries are the same bit by bit. Answers are those of a cache that was read in such pages, up to the
    rounding of sums; reading the context on the other mesh changes them as much."""
    policy = policies(model)[name]()
    cache = prefill(model, CONTEXTS, policy=policy, page_size=PAGE)
    save_cache(tmp_path, cache, model, policy)
    expected = answers_of(model, policy, prefill(model, CONTEXTS, policy=policy, page_size=6))
    loaded = load_cache(tmp_path, model, policy, page_size=6, capacity=105)
    assert (loaded.page_size, loaded.limit) == (6, 105 * 2 * 12 // 6)
    found = answers_of(model, policy, loaded)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    with use_mesh(model):
        stored = packed(cache)
    with jax.set_mesh(make_mesh(fsdp=4, tensor=2)):
        split = tiny_model(qk_norm=False)
        same = policies(split)[name]()
        apart = load_cache(tmp_path, split, same, page_size=6)
        jax.tree.map(np.testing.assert_array_equal, packed(apart), stored)
        others = answers_of(split, same, apart)
    np.testing.assert_allclose(others, expected, rtol=0, atol=2e-6)


def test_only_stored_entries_are_written(model, tmp_path):
    policy = make_policy("streaming_llm:window=9,sink=2")
    cache = prefill(model, CONTEXTS, policy=policy, max_new_tokens=2000, capacity=2000)
    size = save_cache(tmp_path, cache, model, policy)
    entries = 3 * 2 * 4 * (2 + 8)
    assert size < entries * 2 * 8 * 4 + 4096 < cache.pages.nbytes // 10
    found = describe_cache(tmp_path)
    assert found["tokens"] == [63, 40]
    assert found["held"] == [[20] * 4] * 3


def test_a_later_save_replaces_an_earlier_one(model, tmp_path):
    first, second = (prefill(model, [row]) for row in CONTEXTS)
    save_cache(tmp_path, first, model)
    save_cache(tmp_path, second, model)
    assert load_cache(tmp_path, model).seen.tolist() == [40]
    assert len(list(tmp_path.glob("arrays-*"))) == 1


def test_a_failed_save_leaves_the_earlier_one(model, tmp_path, monkeypatch):
    save_cache(tmp_path, prefill(model, CONTEXTS[:1]), model)
    monkeypatch.setattr(
        "kvjax.inference.saving.write_text", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.raises(UserError, match="a cache cannot be written there"):
        save_cache(tmp_path, prefill(model, CONTEXTS[1:]), model)
    assert load_cache(tmp_path, model).seen.tolist() == [63]


def changed_description(folder, model, **changes):
    file = folder / DESCRIPTION
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def damaged(folder, size):
    """Cut the largest file of the arrays to a part, or change one of its bytes."""
    file = max(folder.glob("arrays-*/**/*"), key=lambda x: x.stat().st_size if x.is_file() else 0)
    content = bytearray(file.read_bytes())
    if size is None:
        content[len(content) // 2] ^= 1
    else:
        del content[int(len(content) * size) :]
    file.write_bytes(content)


DAMAGE = {
    "a truncated file": (lambda folder, model: damaged(folder, 0.5), "damaged"),
    "a changed byte": (lambda folder, model: damaged(folder, None), "damaged"),
    "another window": (
        lambda folder, model: changed_description(folder, model, window=2),
        "it was changed since it was written",
    ),
    "a later format": (
        lambda folder, model: changed_description(folder, model, format=3),
        "saved in format 3 by kvjax .*, this reads 2",
    ),
    "no arrays": (
        lambda folder, model: [shutil.rmtree(x) for x in folder.glob("arrays-*")],
        "it was changed since it was written",
    ),
    "half a description": (
        lambda folder, model: (folder / DESCRIPTION).write_text('{"format"'),
        "cache.json: damaged",
    ),
    "no description": (lambda folder, model: (folder / DESCRIPTION).unlink(), "it has no cache.json"),
}


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_cache(folder, prefill(model, CONTEXTS), model)
    return folder


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders_are_refused(model, saved, tmp_path, damage):
    folder = shutil.copytree(saved, tmp_path / "copy")
    change, message = DAMAGE[damage]
    change(folder, model)
    with pytest.raises(UserError, match=message):
        load_cache(folder, model)


@pytest.mark.parametrize("capacity", [None, 200])
def test_a_cache_that_exceeds_the_memory_is_refused(model, saved, monkeypatch, capacity):
    size = load_cache(saved, model, capacity=capacity).pages.nbytes
    monkeypatch.setattr(caches, "device_bytes", lambda **_: size)
    load_cache(saved, model, capacity=capacity)
    monkeypatch.setattr(caches, "device_bytes", lambda **_: size - 1)
    with pytest.raises(
        CapacityError, match=f"takes {size / 2**20:.1f} MiB on a device that has .* MiB free$"
    ):
        load_cache(saved, model, capacity=capacity)


def test_caches_of_another_model_or_policy_are_refused(model, saved, tmp_path):
    wgkv = policies(model)["wgkv"]()
    gated = save_cache(tmp_path / "gated", prefill(model, CONTEXTS, policy=wgkv), model, wgkv)
    assert gated > 0
    for loaded, options, folder, message in (
        (tiny_model(), {}, saved, "whose weights are not those of"),
        (model, {"policy": wgkv}, saved, "the cache has window 1, policy wgkv has 6"),
        (
            model,
            {"policy": policies(model)["max_entries"]()},
            tmp_path / "gated",
            "which does not know what policy delayed needs to know",
        ),
        (model, {}, tmp_path / "gated", "the cache has window 6, policy full has 1"),
        (
            model,
            {"policy": make_policy("h2o:entries=9,when=every,every=4")},
            saved,
            "needs to know more",
        ),
        (model, {}, tmp_path / "none", "no cache is saved here"),
    ):
        with pytest.raises(UserError, match=message):
            load_cache(folder, loaded, **options)
    with pytest.raises(CapacityError, match="capacity 50: .* pages of 16 tokens a device, the cache"):
        load_cache(saved, model, capacity=50)


def of_seed(name, model, seed):
    """Return a policy whose state depends on its gates or scorers, which are drawn with this seed."""
    options = {"window": 6, "max_entries": 20, "scorers": tiny_scorers(model, seed)}
    if name == "fast_kvzip":
        often = {"entries": 24, "when": "position", "every": 8, "protected": {"last": 8}, "buffer": 8}
        options = {"gates": tiny_sink_gates(model, seed=seed), **often}
    return make_policy({name: options}, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kvpop", pytest.param("fast_kvzip", marks=pytest.mark.thorough)])
def test_memories_of_other_gates_or_scorers_are_refused(model, tmp_path, name):
    """Files that were written before the gates were recorded are not refused."""
    policy = of_seed(name, model, 1)
    save_cache(tmp_path, prefill(model, CONTEXTS[1:], policy=policy), model, policy)
    assert load_cache(tmp_path, model, of_seed(name, model, 1)).seen.tolist() == [40]
    with pytest.raises(UserError, match=f"other gates or scorers than those of policy {name}"):
        load_cache(tmp_path, model, of_seed(name, model, 2))
    old = {key: x for key, x in describe_cache(tmp_path).items() if key != "trained"}
    (tmp_path / DESCRIPTION).write_text(json.dumps(old | {"sha256": digest_of(old)}))
    assert load_cache(tmp_path, model, of_seed(name, model, 2)).seen.tolist() == [40]


def test_gates_that_nothing_goes_on_with_may_be_others(model, tmp_path):
    policies_ = [
        make_policy("wgkv:tau=0.5,window=6", model=model, gates=tiny_gates(model, seed=seed))
        for seed in (1, 2)
    ]
    save_cache(tmp_path, prefill(model, CONTEXTS, policy=policies_[0]), model, policies_[0])
    assert describe_cache(tmp_path)["trained"] == {}
    load_cache(tmp_path, model, policies_[1])


def test_a_folder_with_other_files_is_not_written_to(model, tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(UserError, match="it exists and holds no saved cache"):
        kvjax.save_cache(tmp_path, prefill(model, CONTEXTS), model)


def test_a_folder_in_which_a_writer_was_killed_is_written_again(model, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "copy")
    (folder / f".{DESCRIPTION}.3fa9c01b").write_text("{")
    save_cache(folder, prefill(model, CONTEXTS), model)
    load_cache(folder, model)


def test_bad_arguments_of_saving_and_loading_are_one_line_errors(model, tmp_path, monkeypatch):
    # users run it without the tests' type checks
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    r_kv = make_policy("r_kv:entries=24,when=every,every=8", model=model)
    cache = prefill(model, CONTEXTS)
    with use_mesh(model):
        remembering = new_cache(model, r_kv.compile(model), CONTEXTS)
    others = tmp_path / "others"
    others.mkdir()
    (others / DESCRIPTION).write_text('{"mine": 1}')
    long = tmp_path / ("x" * 300)
    for saved, policy, path, message in (
        (None, None, tmp_path / "a", "save_cache: cache must come from prefill, got None"),
        (cache, None, None, "save_cache: path must be that of a folder, got None"),
        (cache, None, others, "it exists and holds no saved cache"),
        (cache, None, others / DESCRIPTION / "below", "cannot be written there .* is not a writable folder"),
        (cache, None, long, "a cache cannot be written there .*too long"),
        (remembering, None, tmp_path / "a", "remembers more of its tokens than policy full does"),
    ):
        with pytest.raises(UserError, match=message):
            save_cache(path, saved, model, policy)
    assert json.loads((others / DESCRIPTION).read_text()) == {"mine": 1}
    with pytest.raises(UserError, match="model must come from kvjax.load_model, got 'model'"):
        save_cache(tmp_path / "a", cache, "model")
    with pytest.raises(UserError, match=r"cannot be read \(File name too long"):
        load_cache(long, model)
    save_cache(tmp_path / "kept", cache, model)
    half = jax.tree.map(lambda x: x.astype("bfloat16"), model)
    with pytest.raises(UserError, match="saved in float32, the model is in bfloat16"):
        load_cache(tmp_path / "kept", half)


def test_a_first_save_that_fails_leaves_nothing(model, tmp_path, monkeypatch):
    cache = prefill(model, CONTEXTS[:1])
    large = "OUT_OF_RANGE: Failed to write 9 bytes: File too large [os_error_code='27']"
    for error, why in ((OSError(28, "full"), "full"), (ValueError(large), "File too large")):

        def fail(folder, arrays, error=error):
            (folder.parent / f"{folder.name}.orbax-checkpoint-tmp").mkdir()
            raise error

        with monkeypatch.context() as patched:
            patched.setattr("kvjax.inference.saving.export", fail)
            with pytest.raises(UserError, match=rf"a cache cannot be written there \({why}\)$"):
                save_cache(tmp_path, cache, model)
        assert not list(tmp_path.iterdir())
    # a process that was killed leaves such a folder
    (tmp_path / "arrays-0123abcd.orbax-checkpoint-tmp").mkdir()
    save_cache(tmp_path, cache, model)
    assert load_cache(tmp_path, model).seen.tolist() == [63]
    assert len(list(tmp_path.iterdir())) == 2


def resealed(folder, change):
    """Change the folder's description and seal it again, as someone who knows how could do."""
    file = folder / DESCRIPTION
    description = json.loads(file.read_text())
    change(description)
    file.write_text(json.dumps(description | {"sha256": digest_of(description)}))
    return folder


def other_arrays(folder, change):
    """Change the folder's arrays and describe them again."""
    description = json.loads((folder / DESCRIPTION).read_text())
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = {
            name: np.array(x) for name, x in checkpointer.restore(folder / description["folder"]).items()
        }
    change(arrays)
    export(folder / description["folder"], arrays)
    return resealed(
        folder, lambda description: description.update(files=_digests(folder / description["folder"]))
    )


def at(value, *path):
    def change(found):
        for name in path[:-1]:
            found = found[name]
        found[path[-1]] = value

    return change


EDITS = {
    "another folder": (at("../..", "folder"), "folder is '../..'"),
    "no such dtype": (at("float64", "dtype"), "dtype is 'float64'"),
    "a window that is text": (at("9", "window"), "window is '9'"),
    "more tokens": (at(1_000_000, "tokens", 0), "."),
    "fewer tokens": (at(5, "tokens", 0), "held is"),
    "no tokens": (at([], "tokens"), r"tokens is \[\]"),
    "entries of 4 TiB": (at(2**31 - 1, "arrays", "entries", "shape", 0), "array entries is"),
    "as many everywhere": (lambda found: found.update(held=[[103] * 3] * 4), "array"),
    "a number for a mapping": (at(3, "arrays"), "arrays is 3"),
    "metadata of nonsense": (at({"x": "object"}, "metadata"), "metadata is"),
    "bytes": (at(10**400, "bytes"), "bytes is"),
    "an array of 5000 axes": (at([2**31 - 1] * 5000, "arrays", "entries", "shape"), "arrays is"),
    "a huge page": (at(2**31, "page_size"), "page_size is"),
    "another state": (lambda found: found["arrays"].update(state={"shape": [3], "dtype": "int32"}), "."),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edited_descriptions_are_refused(model, saved, tmp_path, edit):
    change, message = EDITS[edit]
    folder = resealed(shutil.copytree(saved, tmp_path / "copy"), change)
    with pytest.raises(UserError, match=message) as caught:
        load_cache(folder, model)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("entries", np.nan, "its entries is not finite"),
        ("length", 200, "other lengths than its tokens allow"),
        ("length", -1, "other lengths than its tokens allow"),
        ("length", 3, "other lengths than"),
        ("seen", 1_000_000, "other lengths than its tokens allow"),
    ],
)
def test_edited_arrays_are_refused(model, saved, tmp_path, name, value, message):
    def change(arrays):
        arrays[name].reshape(-1)[0] = value

    with pytest.raises(UserError, match=message):
        load_cache(other_arrays(shutil.copytree(saved, tmp_path / "copy"), change), model)


def test_pipes_links_and_deep_json_are_refused(model, saved, tmp_path):
    for index, (make, message) in enumerate(
        (
            (lambda file: os.mkfifo(file.parent / "pipe"), "not a plain file"),
            (lambda file: (file.parent / "link").symlink_to("/etc"), "not a plain file"),
            (lambda file: (file.parent.parent / DESCRIPTION).write_text("[" * 100_000), "damaged"),
            (lambda file: (file.parent.parent / DESCRIPTION).write_text("\ufeff{}"), "damaged"),
            (lambda file: (file.parent.parent / DESCRIPTION).write_text("[3]"), "damaged"),
        )
    ):
        folder = shutil.copytree(saved, tmp_path / str(index))
        make(next(folder.glob("arrays-*/_METADATA")))
        with pytest.raises(UserError, match=message):
            load_cache(folder, model)
    (folder / DESCRIPTION).unlink()
    os.mkfifo(folder / DESCRIPTION)
    with pytest.raises(UserError, match="damaged"):
        describe_cache(folder)


@pytest.mark.parametrize(
    "begun", [os.mkfifo, lambda file: file.write_text("[" * 100_000)], ids=["pipe", "deep"]
)
def test_a_pipe_in_place_of_the_description_does_not_block(tmp_path, begun):
    begun(tmp_path / DESCRIPTION)
    with pytest.raises(UserError, match="it exists and holds no saved cache"):
        checked_place(tmp_path)
    with pytest.raises(UserError, match="path must be that of a folder"):
        checked_place("a\0b")
