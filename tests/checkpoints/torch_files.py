"""Write files in torch.save's format without torch."""

import io
import pickle
import zipfile

import numpy as np

STORAGES = {"float32": "FloatStorage", "bfloat16": "BFloat16Storage", "float64": "DoubleStorage"}


class Global:
    """A name that the pickle asks for. Calling it stands for a call of that name in the pickle."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __call__(self, *arguments):
        return Call(self, arguments)


class Call:
    """A call in the pickle, with its arguments."""

    def __init__(self, function, arguments):
        self.function, self.arguments = function, arguments


class View:
    """Numbers in a storage, with any strides, offset and shape."""

    def __init__(self, array, shape=None, strides=None, offset=0, count=None, kind=None):
        self.array, self.offset, self.count, self.kind = np.ascontiguousarray(array), offset, count, kind
        self.shape = array.shape if shape is None else shape
        steps = np.cumprod([1, *self.shape[:0:-1]])[::-1].tolist()
        self.strides = tuple(steps) if strides is None else strides


class Numpy:
    """A NumPy number or array that is pickled by NumPy, not as a tensor."""

    def __init__(self, value):
        self.value = value


class Pickler(pickle._Pickler):  # the C pickler takes only names that it can import
    """A pickler of protocol 2, like torch's."""

    def __init__(self, file, storages, parameters):
        super().__init__(file, protocol=2)
        self.storages, self.parameters = storages, parameters

    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, np.ndarray):
            obj = View(obj)
        match obj:
            case Global():
                self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
            case Call():
                self.save(obj.function)
                self.save(obj.arguments)
                self.write(pickle.REDUCE)
            case View():
                self._save_tensor(obj)
            case Numpy():
                super().save(obj.value)
            case _:
                super().save(obj, save_persistent_id)

    def _save_tensor(self, view):
        key = str(len(self.storages))
        self.storages.append(view.array.tobytes())
        count = view.array.size if view.count is None else view.count
        storage = Global("torch", view.kind or STORAGES[view.array.dtype.name])
        hooks = Global("collections", "OrderedDict")
        tensor = Global("torch._utils", "_rebuild_tensor_v2")(
            Persistent(("storage", storage, key, "cuda:0", count)),
            view.offset, view.shape, view.strides, False, hooks(),
        )  # fmt: skip
        self.save(
            Global("torch._utils", "_rebuild_parameter")(tensor, True, hooks()) if self.parameters else tensor
        )

    def persistent_id(self, obj):
        return obj.identifier if isinstance(obj, Persistent) else None


class Persistent:
    """The identifier by which torch names a storage."""

    def __init__(self, identifier):
        self.identifier = identifier


def write_torch(
    file, content, *, parameters=False, compression=zipfile.ZIP_STORED, order="little", folder="archive"
):
    """Write the file that torch.save(content, file) would write, with NumPy arrays as tensors (or as parameters)."""
    program, storages = io.BytesIO(), []
    Pickler(program, storages, parameters).dump(content)
    write_zip(file, program.getvalue(), storages, compression=compression, order=order, folder=folder)


def write_zip(
    file, program, storages=(), *, compression=zipfile.ZIP_STORED, order="little", folder="archive"
):
    """Write the zip around a pickle and the bytes of arrays."""
    with zipfile.ZipFile(file, "w", compression) as out:
        out.writestr(f"{folder}/data.pkl", program)
        out.writestr(f"{folder}/byteorder", order)
        for key, stored in enumerate(storages):
            out.writestr(f"{folder}/data/{key}", stored)
        out.writestr(f"{folder}/version", "3\n")
