"""A store of contexts: what is found in it, what goes first, and what killed and competing writers leave."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings

import jaxtyping
import numpy as np
import pytest

import kvjax
from kvjax.cache import CapacityError
from kvjax.errors import Doubt, UserError
from kvjax.inference import prefix_store
from kvjax.inference.prefix_store import PrefixStore
from kvjax.inference.sampling import prefill, sample
from kvjax.inference.saving import saved_bytes
from kvjax.policies import make_policy
from tests.tiny_models import tiny_gates, tiny_model

CONTEXTS = [np.random.default_rng(seed).integers(0, 61, 50) for seed in range(4)]
OPTIONS = {"max_new_tokens": 8, "eos": ()}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def reads(monkeypatch):
    """How often a context was read by the model."""
    counted = []

    def counting(*args, **kwargs):
        counted.append(args)
        return prefill(*args, **kwargs)

    monkeypatch.setattr(prefix_store, "prefill", counting)
    return counted


def test_a_context_is_read_once_by_all_that_ask_alike(model, tmp_path, reads):
    policies = [
        None,
        make_policy("wgkv", model=model, gates=tiny_gates(model), tau=0.5, window=6),
        make_policy("wgkv", model=model, gates=tiny_gates(model, seed=2), tau=0.5, window=6),
    ]
    for policy in policies:
        store = PrefixStore(tmp_path)
        first = store.prefill(model, CONTEXTS[:1], policy=policy)
        again = PrefixStore(tmp_path).prefill(model, CONTEXTS[:1], policy=policy)
        said = [
            sample(model, [[5, 6, 7]], policy=policy, cache=cache, **OPTIONS).tokens[0]
            for cache in (first, again)
        ]
        np.testing.assert_array_equal(*said)
    assert len(reads) == len(store) == len(policies)
    others = PrefixStore(tmp_path)
    others.prefill(model, CONTEXTS[1:2])
    others.prefill(model, CONTEXTS[:1], page_size=4)
    others.prefill(tiny_model(qk_norm=False), CONTEXTS[:1])
    assert len(reads) == len(policies) + 3


def test_what_was_used_longest_ago_goes_first(model, tmp_path, reads):
    one = PrefixStore(tmp_path / "one")
    one.prefill(model, CONTEXTS[:1])
    store = PrefixStore(tmp_path / "three", limit=f"{int(one.nbytes * 3.5) // 1024}KiB")
    for index in (0, 1, 2, 0, 3):
        store.prefill(model, [CONTEXTS[index]])
    assert len(store) == 3
    assert store.nbytes <= store.limit
    del reads[:]
    for index in (0, 2, 3):
        store.prefill(model, [CONTEXTS[index]])
    assert not reads
    store.prefill(model, [CONTEXTS[1]])
    assert len(reads) == 1


def test_one_that_is_too_large_with_its_description_takes_no_other_s_place(model, tmp_path, reads):
    """A limit between its arrays and its folder, in which shorter ones fit."""
    short, long = [CONTEXTS[0][:20]], [CONTEXTS[1]]
    alone = PrefixStore(tmp_path / "alone")
    arrays, folder = saved_bytes(alone.prefill(model, long), model), alone.nbytes
    store = PrefixStore(tmp_path / "store")
    store.limit = (arrays + folder) // 2
    store.prefill(model, short)
    assert len(store) == 1
    for _ in range(2):
        with pytest.warns(Doubt, match=r"this context takes .* has a limit of .*: it is not stored"):
            assert store.prefill(model, long).seen.tolist() == [50]
        assert len(store) == 1
    assert not list(store.folder.glob(".*"))
    del reads[:]
    store.prefill(model, short)
    assert not reads


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_written(path, *_, **__):
    (path / "arrays-0123abcd").mkdir(parents=True)
    full_disk()


STOPPED = {
    "a disk that is full": (
        "kvjax.inference.prefix_store.save_cache",
        half_written,
        "No space left on device",
    ),
    "a disk that fills": ("kvjax.inference.saving.write_text", full_disk, "No space left on device"),
    "a disk with little room": (
        "shutil.disk_usage",
        lambda _: shutil._ntuple_diskusage(9, 8, 1),
        "the disk is full",
    ),
    "no right to write": ("os.access", lambda *_: False, "is no folder to write in"),
    "no right to make folders": (
        "kvjax.inference.prefix_store.partial_folder",
        lambda _: (_ for _ in ()).throw(PermissionError(errno.EACCES, os.strerror(errno.EACCES))),
        "Permission denied",
    ),
}


@pytest.mark.parametrize("stop", STOPPED)
def test_a_context_that_cannot_be_stored_is_returned_all_the_same(model, tmp_path, reads, monkeypatch, stop):
    store = PrefixStore(tmp_path)
    store.prefill(model, CONTEXTS[:1])
    name, stopped, said = STOPPED[stop]
    with monkeypatch.context() as patched:
        patched.setattr(name, stopped)
        with pytest.warns(Doubt, match=said) as caught:
            cache = store.prefill(model, CONTEXTS[1:2])
    (line,) = [str(x.message) for x in caught]
    assert line.startswith(f"PrefixStore: {tmp_path}")
    assert line.endswith("this context is not stored")
    assert "\n" not in line
    assert cache.seen.tolist() == [50]
    assert not list(tmp_path.glob(".*"))
    del reads[:]
    store.prefill(model, CONTEXTS[:1])
    assert not reads
    store.prefill(model, CONTEXTS[1:2])
    assert len(reads) == 1
    assert len(store) == 2


def test_another_version_reads_for_itself(model, tmp_path, reads, monkeypatch):
    for version in ("1", "2", "1"):
        monkeypatch.setattr(kvjax, "__version__", version)
        PrefixStore(tmp_path).prefill(model, CONTEXTS[:1])
    assert len(reads) == 2


def test_a_damaged_entry_is_made_again(model, tmp_path, reads):
    store = PrefixStore(tmp_path)
    store.prefill(model, CONTEXTS[:1])
    (entry,) = tmp_path.iterdir()
    (entry / "cache.json").write_text("{")
    store.prefill(model, CONTEXTS[:1])
    store.prefill(model, CONTEXTS[:1])
    assert len(reads) == 2


def test_what_another_made_again_meanwhile_stays(model, tmp_path, monkeypatch):
    store = PrefixStore(tmp_path)
    store.prefill(model, CONTEXTS[:1])
    (entry,) = tmp_path.iterdir()
    (entry / "cache.json").write_text("{")
    made = []

    def slowly(*args, **kwargs):
        with monkeypatch.context() as patched:
            patched.setattr(prefix_store, "prefill", prefill)
            PrefixStore(tmp_path).prefill(model, CONTEXTS[:1])
        made.append(entry.stat().st_ino)
        return prefill(*args, **kwargs)

    monkeypatch.setattr(prefix_store, "prefill", slowly)
    store.prefill(model, CONTEXTS[:1])
    assert made == [entry.stat().st_ino]
    assert [x.name for x in tmp_path.iterdir()] == [entry.name]


def test_an_entry_larger_than_the_devices_memory_is_not_damaged(model, tmp_path, reads, monkeypatch):
    store = PrefixStore(tmp_path)
    store.prefill(model, CONTEXTS[:1])
    with monkeypatch.context() as patched:
        patched.setattr("kvjax.cache.device_bytes", lambda **_: 1000)
        with pytest.raises(CapacityError, match="MiB on a device that has 0.0 MiB free"):
            store.prefill(model, CONTEXTS[:1])
    store.prefill(model, CONTEXTS[:1])
    assert len(reads) == 1


WRITER = """
import sys, numpy as np
from kvjax.inference.prefix_store import PrefixStore
from tests.tiny_models import tiny_model
model, store = tiny_model(), PrefixStore(sys.argv[1], limit="200KiB")
print("ready", flush=True)
for turn in range(int(sys.argv[2])):
    seed = turn % 4
    store.prefill(model, [np.random.default_rng(seed).integers(0, 61, 50)])
    print(turn, flush=True)
"""


def test_two_writers_of_which_one_is_killed_leave_whole_entries(model, tmp_path, reads):
    def writer(turns):
        command = [sys.executable, "-c", WRITER, str(tmp_path / "store"), str(turns)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    killed, other = writer(1000), writer(12)
    while killed.stdout.readline().strip() != "2":
        assert killed.poll() is None
    time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    out, _ = other.communicate(timeout=300)
    killed.communicate()
    assert other.returncode == 0
    assert out.splitlines()[-1] == "11"
    store = PrefixStore(tmp_path / "store", limit="200KiB")
    assert 0 < store.nbytes <= store.limit
    for _, _, entry in store._entries():
        assert kvjax.load_cache(entry, model).seen.tolist() == [50]
    # the next one finds what the other read last
    assert store.prefill(model, [CONTEXTS[3]]).seen.tolist() == [50]
    assert not reads
    assert all(not x.name.startswith(".") for x in store.folder.iterdir())


def test_what_cannot_be_is_one_line(model, tmp_path, monkeypatch):
    # as users run it, without the tests' type checks
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for folder in (None, 3, ""):
        with pytest.raises(UserError, match=f"PrefixStore: folder must be a folder's path, got {folder!r}"):
            PrefixStore(folder)
    for missing, done in ((os.R_OK, "read"), (os.W_OK, "written"), (os.X_OK, "written")):
        with monkeypatch.context() as patched:
            patched.setattr("os.access", lambda _, mode, missing=missing: not mode & missing)
            with pytest.raises(UserError, match=f"PrefixStore: {tmp_path} cannot be {done}$"):
                PrefixStore(tmp_path)
    for limit in ("two", "2 apples"):
        with pytest.raises(UserError, match='limit is a size such as "2GiB"'):
            kvjax.PrefixStore(tmp_path, limit=limit)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        PrefixStore(tmp_path / "file" / "store")
    with pytest.warns(Doubt, match="has a limit of 0.00 MiB: it is not stored"):
        PrefixStore(tmp_path / "small", limit="1KiB").prefill(model, CONTEXTS[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrefixStore(tmp_path / "large").prefill(model, CONTEXTS[:1])


def test_policies_are_told_apart_by_all_that_they_are_told(model, tmp_path, reads):
    """Guidance that begins alike, of which people are shown the beginning."""
    store = PrefixStore(tmp_path)
    for guidance in ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 50, 51]):
        store.prefill(model, CONTEXTS[:1], policy=make_policy("oraclekv", entries=20, guidance=guidance))
    assert len(reads) == len(store) == 2


def test_what_others_keep_in_the_folder_stays(model, tmp_path):
    kvjax.save_cache(tmp_path / "thesis", prefill(model, CONTEXTS[:1]), model)
    store = PrefixStore(tmp_path, limit="1KiB")
    assert len(store) == 0
    kvjax.load_cache(tmp_path / "thesis", model)
