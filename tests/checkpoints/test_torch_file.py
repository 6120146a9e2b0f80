"""Tests of reading torch.save's files without torch: nothing in them is run, and hostile files are refused."""

import io
import os
import pickle
import re
import zipfile
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest

from kvjax.checkpoints.torch_file import OLD_SIGNATURE, TorchFile, is_torch_file
from kvjax.errors import UserError
from tests.checkpoints.torch_files import Global, Numpy, View, write_torch, write_zip


def arrays():
    rng = np.random.default_rng(0)
    return {
        "a": rng.standard_normal((3, 2)).astype(np.float32),
        "b": rng.standard_normal((2, 3)).astype(ml_dtypes.bfloat16),
        "c": rng.standard_normal(4),
    }


@pytest.mark.parametrize("parameters", [False, True])
def test_arrays_are_read_as_they_were_written(tmp_path, parameters):
    file, wanted = tmp_path / "x.pt", arrays()
    layers = [wanted, wanted | {"a": -wanted["a"]}]
    loss = {
        "loss": Numpy(np.ones(3)),
        "acc": [Numpy(np.float32(0.5))],
        "step": 300000,
        "name": "x",
        "lr": 0.5,
    }
    write_torch(file, {"module": layers, "no": None} | loss, parameters=parameters)
    with TorchFile(file) as opened:
        assert [opened.content[key] for key in ("no", "step", "name", "lr")] == [None, 300000, "x", 0.5]
        for layer, found in zip(layers, opened.content["module"], strict=True):
            for name, array in layer.items():
                read = opened.read(found[name])
                assert read.dtype == array.dtype
                np.testing.assert_array_equal(read, array)
        shapes = {name: array.shape for name, array in wanted.items()}
        opened.check(opened.content["module"], shapes)
        stacked = opened.stack(opened.content["module"], shapes)
    for name in wanted:
        assert stacked[name].dtype == np.float32
        np.testing.assert_array_equal(stacked[name], np.stack([x[name] for x in layers]).astype(np.float32))


def test_views_are_read_through_their_strides(tmp_path):
    numbers = np.arange(24, dtype=np.float32)
    views = {
        "turned": (View(numbers, (4, 6), (1, 4)), numbers.reshape(6, 4).T),
        "part": (View(numbers, (2, 3), (6, 2), 5), numbers[[[5, 7, 9], [11, 13, 15]]]),
        "none": (View(numbers, (2, 0), (2**70, 1), 24), np.zeros((2, 0))),
        "one": (View(numbers, (1, 2), (2**70, 1), 3), numbers[None, 3:5]),
        "number": (View(numbers, (), (), 23), numbers[23]),
    }
    write_torch(tmp_path / "x.pt", {name: view for name, (view, _) in views.items()})
    with TorchFile(tmp_path / "x.pt") as opened:
        for name, (_, wanted) in views.items():
            np.testing.assert_array_equal(opened.read(opened.content[name]), wanted)
        turned = opened.content["turned"]
        assert np.shares_memory(opened.read(turned), opened.read(turned)), "a storage is read once"


class Hostile:
    """An object that runs a shell command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def refused(file, message):
    with pytest.raises(UserError, match=message) as caught:
        TorchFile(file)
    assert str(file) in str(caught.value)


def test_hostile_pickle_is_not_run(tmp_path):
    """The marker file appears only when pickle reads the program."""
    marker = tmp_path / "marker"
    program = pickle.dumps({"module": [Hostile(marker)]}, protocol=2)
    write_zip(tmp_path / "x.pt", program)
    refused(tmp_path / "x.pt", f"asks for {os.system.__module__}.system, which gates do not need")
    assert not marker.exists()
    pickle.loads(program)
    assert marker.exists()


@pytest.mark.parametrize(
    "name", ["builtins eval", "torch load", "torch.storage _load_from_bytes", "os\\n system"]
)
def test_unknown_names_are_refused(tmp_path, name):
    module, _, name = name.partition(" ")
    write_torch(tmp_path / "x.pt", {"module": Global(module, name)("1")})
    refused(tmp_path / "x.pt", re.escape(f"asks for {module}.{name}, which gates do not need"))


PROGRAMS = {
    "a memo of 32 GB": (b"\x80\x02}r\xff\xff\xff\x7f.", None),
    "bytes of 8 EB": (b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.", "BYTEARRAY8|damaged"),
    "a method of a class": (b"\x80\x02ccollections\nOrderedDict\n}X\x01\0\0\0aNsb.", "damaged"),
    "a key that takes exponential time to hash": (
        b"\x80\x02})" + b"\x85q\x01h\x01\x86" * 60 + b"Ns.",
        "damaged",
    ),
    "a deeply nested key": (b"\x80\x02})" + b"\x85" * 10**5 + b"Ns.", "damaged"),
    "a new object": (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "instruction NEWOBJ, which"),
    "no storage": (b"\x80\x02X\x01\0\0\0aQ.", "damaged"),
    "nothing": (b"", "damaged"),
    "no end": (b"\x80\x02}", "damaged"),
    "nothing on the stack": (b"\x80\x02s.", "damaged"),
    "no mark": (b"\x80\x02}u.", "damaged"),
    "a call of a word": (b"\x80\x02X\x01\0\0\0a)R.", "damaged"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_faulty_programs_are_refused(tmp_path, name):
    program, message = PROGRAMS[name]
    write_zip(tmp_path / "x.pt", program)
    if message is None:
        with TorchFile(tmp_path / "x.pt") as opened:
            assert opened.content == {}
    else:
        refused(tmp_path / "x.pt", message)


NUMBERS = np.zeros(8, np.float32)
SHAPES = {
    "beyond the end": View(NUMBERS, (4, 2), (2, 1), 1),
    "strides beyond it": View(NUMBERS, (2, 2), (8, 1)),
    "repeated numbers": View(NUMBERS, (2**40,), (0,)),
    "an overflow": View(NUMBERS, (2**32, 2**32), (2**33, 2**31)),
    "before the start": View(NUMBERS, (2,), (1,), -1),
    "backwards": View(NUMBERS, (2,), (-1,), 4),
    "negative shape": View(NUMBERS, (-2, -2), (1, 1)),
    "more bytes than there are": View(NUMBERS, count=9),
    "fewer bytes than there are": View(NUMBERS, count=7),
    "bytes of another kind": View(NUMBERS, kind="DoubleStorage"),
    "many axes": View(NUMBERS, (1,) * 40, (1,) * 40),
    "strides for other axes": View(NUMBERS, (2, 2), (1,)),
    "fractional shape": View(NUMBERS, (2.0,), (1,)),
    "an unknown kind": View(NUMBERS, kind="Tensor"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_arrays_outside_their_storage_are_refused(tmp_path, name):
    write_torch(tmp_path / "x.pt", {"a": SHAPES[name]})
    refused(tmp_path / "x.pt", "does not lie in|has 32 bytes|damaged|asks for torch.Tensor")


def test_arrays_larger_than_the_file_are_refused(tmp_path):
    """All layers share one array of the file."""
    layer = {"a": np.zeros(1000, np.float32)}
    write_torch(tmp_path / "x.pt", {"module": [layer] * 1000})
    with (
        TorchFile(tmp_path / "x.pt") as opened,
        pytest.raises(UserError, match="declares arrays of 4000000 bytes"),
    ):
        opened.check(opened.content["module"], {"a": (1000,)})


def test_compressed_entries_are_refused(tmp_path):
    write_torch(tmp_path / "x.pt", {"a": np.zeros(10**6, np.float32)}, compression=zipfile.ZIP_DEFLATED)
    refused(tmp_path / "x.pt", "is compressed, which torch.save never does")


def test_other_files_are_refused_in_one_line(tmp_path):
    file = tmp_path / "x.pt"
    refused(file, "cannot be read .No such file")
    file.mkdir()
    refused(file, "is a folder, expected a file")
    file.rmdir()
    os.mkfifo(file)
    refused(file, "is a pipe or a device, expected a file")
    file.unlink()
    file.write_bytes(OLD_SIGNATURE + b"\x80\x02M\xe9\x03.")
    refused(file, "before 1.6")
    for content in (b"", b"junk", b"PK\x03\x04junk"):
        file.write_bytes(content)
        refused(file, "damaged")
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("model.safetensors", b"")
    refused(file, "damaged")
    write_torch(file, {"a": NUMBERS}, order="big")
    refused(file, "byte order is b'big', expected little")


def test_truncated_or_changed_file_is_refused(tmp_path):
    file = tmp_path / "x.pt"
    write_torch(file, {"a": np.arange(100, dtype=np.float32)})
    whole = file.read_bytes()
    for length in range(0, len(whole), 50):
        file.write_bytes(whole[:length])
        refused(file, "damaged")
    offset = whole.index(np.arange(100, dtype=np.float32).tobytes())
    file.write_bytes(whole[:offset] + b"\xff" + whole[offset + 1 :])
    with TorchFile(file) as opened, pytest.raises(UserError, match="damaged .*CRC"):
        opened.read(opened.content["a"])


def test_any_changed_program_is_read_or_refused(tmp_path):
    """Each byte of a file's pickle is changed in turn."""
    file, refusals = tmp_path / "x.pt", []
    write_torch(file, OrderedDict(a=NUMBERS[:2]) | {"b": [(1, 2.0)]}, parameters=True)
    with zipfile.ZipFile(file) as opened:
        program, stored = opened.read("archive/data.pkl"), [opened.read("archive/data/0")]
    for index in range(len(program)):
        for bits in (1, 0x80):
            changed = bytearray(program)
            changed[index] ^= bits
            other = io.BytesIO()
            write_zip(other, bytes(changed), stored)
            file.write_bytes(other.getvalue())
            try:
                TorchFile(file).__exit__()
            except UserError as error:
                refusals.append(str(error))
    assert len(refusals) > len(program)
    assert not any("\n" in refusal for refusal in refusals)


def test_is_torch_file_looks_at_files_and_suffixes(tmp_path):
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "gates").write_bytes(b"")
    assert is_torch_file(tmp_path / "gates")
    assert is_torch_file("nowhere.pt")
    assert not is_torch_file(tmp_path)
    assert not is_torch_file("nowhere")
    assert not is_torch_file(tmp_path / "folder.pt")


def test_files_written_by_torch_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    wanted = arrays()
    tensors = {name: torch.tensor(array.astype(np.float64)) for name, array in wanted.items()}
    tensors["a"] = torch.nn.Parameter(tensors["a"].float().T)
    tensors["b"] = tensors["b"].bfloat16()
    saved = {
        "module": [torch.nn.Linear(2, 3).state_dict(), tensors],
        "loss": np.ones(3),
        "acc": [np.float64(1)],
    }
    torch.save(saved, tmp_path / "x.pt")
    wanted["a"] = wanted["a"].T
    with TorchFile(tmp_path / "x.pt") as opened:
        for name, found in opened.content["module"][1].items():
            np.testing.assert_array_equal(opened.read(found), wanted[name])
        weight = opened.read(opened.content["module"][0]["weight"])
        np.testing.assert_array_equal(weight, saved["module"][0]["weight"].numpy())
