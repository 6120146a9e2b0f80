"""A store of contexts that were read: the next time that one is asked for, its cache comes from the disk.

An entry is a saved cache in a folder whose name is a digest of all that the cache depends on. It is moved into place
once it is whole, and removed only where nobody reads it: several processes may use one store, and any may be killed.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.cache import Cache, CapacityError
from kvjax.cache.saved import DESCRIPTION, FORMAT
from kvjax.errors import Doubt, UserError, byte_size, named_arguments, one_of, shown
from kvjax.exported.fingerprint import contents
from kvjax.files import locked, partial_folder, remove_left
from kvjax.inference.checks import Prompts, check_arguments, token_rows, tokens_of
from kvjax.inference.room import page_size_of
from kvjax.inference.sampling import CHUNK, prefill
from kvjax.inference.saving import STORED, array_bytes, is_whole, load_cache, save_cache, saved_bytes
from kvjax.mesh import use_mesh
from kvjax.models.decoder import Decoder
from kvjax.policies import make_policy
from kvjax.policies.policy import Policy

ENTRY = re.compile("[0-9a-f]{32}")
"""What an entry's folder is called."""


class PrefixStore:
    """Contexts on the disk, the least recently used of which go first.

        store = kvjax.PrefixStore("contexts", limit="20GiB")
        cache = store.prefill(model, [report], tokenizer=tokenizer, policy=policy)

    Args:
        folder: made if it is not there.
        limit: bytes of all entries ("2GiB"). One that is being written is beside them until it is whole.
        entries: "exact" or "int8", as in `kvjax.save_cache`.

    Raises:
        UserError: a folder that is none, or cannot be made, read or written, what is no size, or no such `entries`.
    """

    @named_arguments()
    def __init__(self, folder: str | Path, limit: str = "2GiB", *, entries: str = "exact"):
        size = byte_size(limit) if isinstance(limit, str) else None
        if size is None:
            raise UserError(f'PrefixStore: limit is a size such as "2GiB", got {shown(limit)}')
        one_of("PrefixStore", "entries", entries, STORED)
        if not isinstance(folder, str | Path) or not str(folder):
            raise UserError(f"PrefixStore: folder must be a folder's path, got {shown(folder)}")
        self.folder, self.limit, self.entries = Path(folder), size, entries
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"PrefixStore: {folder} cannot be made ({error.strerror})") from None
        for needed, done in ((os.R_OK, "read"), (os.W_OK | os.X_OK, "written")):
            if not os.access(self.folder, needed):
                raise UserError(f"PrefixStore: {folder} cannot be {done}")
        self._make_room(0)

    @named_arguments()
    def prefill(
        self,
        model: Decoder,
        tokens: Prompts,
        *,
        tokenizer: Any = None,
        policy: Policy | None = None,
        page_size: int | None = None,
        chunk: int = CHUNK,
    ) -> Cache:
        """The cache of these contexts: from the store, or as `kvjax.prefill` makes it, which is then stored.

        What cannot be stored is returned all the same, with a warning (`kvjax.errors.Doubt`) of one line that says why:
        a cache larger than the limit, a disk that is full, a folder that can no longer be written.

        Args:
            model, tokens, tokenizer, policy, page_size, chunk: as of `kvjax.prefill`. A context is found again by the
                same tokens, weights, policy and page size, in the same version of kvjax.

        Raises:
            UserError: as `kvjax.prefill` of its arguments; a run of several processes.
            CapacityError: the context's cache does not fit into the devices' memory.
        """
        check_arguments("PrefixStore.prefill", model, policy)
        policy = make_policy("full") if policy is None else policy
        rows = token_rows(model, tokens_of(tokens, tokenizer, "beginning"))
        if jax.process_count() > 1:
            raise UserError("PrefixStore: a store is used by one process, this run has several")
        with use_mesh(model):
            page_size = page_size_of(policy, page_size)
        entry = self.folder / _key(model, policy, rows, page_size, chunk, self.entries)
        try:
            cache = load_cache(entry, model, policy)
            with contextlib.suppress(OSError):  # it goes just now
                os.utime(entry / DESCRIPTION)
            return cache
        except CapacityError:
            raise
        except UserError:
            damaged = os.path.isdir(entry)  # False where it cannot be looked at
        cache = prefill(model, rows, policy=policy, page_size=page_size, chunk=chunk)
        if why := self._keep(entry, cache, model, policy, damaged):
            warnings.warn(f"PrefixStore: {why}", Doubt, stacklevel=3)
        return cache

    def _keep(self, entry: Path, cache: Cache, model: Decoder, policy: Policy, damaged: bool) -> str:
        """Store a cache, in place of an entry that is `damaged`. Else why not, and all others stay: it is larger than
        the limit, alone or with what describes it, or nothing can be written."""
        if (size := saved_bytes(cache, model, policy, entries=self.entries)) > self.limit:
            return self._too_large(size)
        whole = self.folder
        try:
            with partial_folder(entry) as partial:
                whole = partial / "cache"
                save_cache(whole, cache, model, policy, entries=self.entries)
                if damaged:
                    # at once: whoever reads it finds files missing and reads the context for itself
                    with locked(entry), contextlib.suppress(OSError):
                        if not is_whole(entry):  # which another process may have made again
                            entry.rename(partial / "damaged")
                if (size := _bytes(whole)) > self.limit:
                    return self._too_large(size)
                self._make_room(size)
                with contextlib.suppress(OSError):  # another process was first
                    whole.rename(entry)
            self._make_room(0)
        except OSError as error:
            return f"{self.folder} cannot be written ({error.strerror or error}): this context is not stored"
        except UserError as error:
            # of the place alone: what is wrong with a cache `saved_bytes` has refused
            return f"{self.folder}: {str(error).removeprefix(f'{whole}: ')}: this context is not stored"
        return ""

    def _too_large(self, size: int) -> str:
        return (
            f"this context takes {size / 2**20:.2f} MiB, {self.folder} has a limit of {self.limit / 2**20:.2f} MiB: it "
            "is not stored"
        )

    def _make_room(self, size: int) -> None:
        """Remove what killed processes left, and the entries used longest ago until there is room for so many bytes
        more."""
        with locked(self.folder):
            remove_left(self.folder)
            entries = sorted(self._entries(), key=lambda entry: entry[0])
            used = sum(bytes_ for _, bytes_, _ in entries)
            for _, bytes_, entry in entries:
                if used + size <= self.limit:
                    return
                with locked(entry, wait=False) as unread:
                    if unread:
                        shutil.rmtree(entry, ignore_errors=True)
                        used -= bytes_

    def _entries(self) -> list[tuple[float, int, Path]]:
        """When each was used last, its bytes, and its folder."""
        found = []
        for entry in self.folder.iterdir():
            if not ENTRY.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):  # one that goes meanwhile
                last = (entry / DESCRIPTION).stat().st_mtime
                found.append((last, _bytes(entry), entry))
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(size for _, size, _ in self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def __repr__(self) -> str:
        used, limit = self.nbytes / 2**20, self.limit / 2**20
        return f"PrefixStore({str(self.folder)!r}: {len(self)} contexts, {used:.2f} of {limit:.2f} MiB)"


def _bytes(folder: Path) -> int:
    """Of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _key(
    model: Decoder, policy: Policy, rows: list[np.ndarray], page_size: int, chunk: int, entries: str
) -> str:
    """A digest of all that a saved cache depends on; also of the version, as another one may compute otherwise."""
    from kvjax import __version__

    dtype = np.dtype(model.embed.dtype).name
    known = hashlib.sha256(repr((FORMAT, __version__, page_size, entries, dtype)).encode())
    known.update(repr(chunk if policy.admission.whole_calls else None).encode())
    known.update(contents(model).encode())
    with use_mesh(model):
        placed = policy.for_model(model)
    known.update(repr(_settings(placed)).encode())
    known.update(array_bytes(placed))
    for row in rows:
        known.update(len(row).to_bytes(8, "little") + row.astype(np.int64).tobytes())
    return known.hexdigest()[:32]


def _settings(x: Any) -> Any:
    """What a policy is told, whole, where its own `repr` is for people; its arrays are its leaves."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return type(x).__qualname__, [(f.name, _settings(getattr(x, f.name))) for f in dataclasses.fields(x)]
    if isinstance(x, tuple | list):
        return [_settings(one) for one in x]
    if isinstance(x, dict):
        return [(key, _settings(one)) for key, one in x.items()]
    return None if isinstance(x, jax.Array | np.ndarray) else repr(x)
