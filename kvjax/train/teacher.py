"""A teacher's likeliest next tokens after each token of a run's sequences, computed once and stored on disk.

Each sequence has a file, which is named by a hash of its tokens. So files do not depend on the order, the mesh or the
processes, and every run on the same sequences can use them. Files are written atomically, so that a stopped run can go
on.
"""

import contextlib
import functools
import hashlib
import json
import os
import uuid
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Shaped

from kvjax.checkpoints.fingerprint import MadeFor, contents
from kvjax.cli.shards import WHOLE, Shard
from kvjax.errors import UserError
from kvjax.files import write_text
from kvjax.mesh import BATCH, P, batch_shards, token_shards
from kvjax.models.decoder import Decoder
from kvjax.train.batches import Rows, TokenRows, from_mesh, to_mesh
from kvjax.train.objective import TOKENS_AT_ONCE, cut_tokens, likeliest
from kvjax.train.pace import Pace
from kvjax.train.precomputed import check_disk_space, check_manifest, explain_disk_errors, write_manifest

VERSION = 1
"""The version of the layout on disk."""
OPTION = "--teacher"
"""The option that names the folder."""


def shapes(length: int, count: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a sequence with its teacher's likeliest tokens (`TeacherStore.read`)."""
    return {
        "tokens": jax.ShapeDtypeStruct((length,), jnp.int32),
        "logits": jax.ShapeDtypeStruct((length, count), jnp.float16),
        "which": jax.ShapeDtypeStruct((length, count), jnp.int32),
    }


class TeacherStore:
    """A folder with a teacher's `count` likeliest tokens after each token of sequences, and with their logits minus the
    largest one."""

    def __init__(self, folder: Path, count: int):
        self.folder, self.count = folder, count

    def begin(self, teacher: Decoder, name: str) -> None:
        """Make the folder for this teacher, a model called `name`. Call it in every process.

        Raises:
            UserError: the folder is of another teacher, of another `count`, or of another version.
        """
        made_for = MadeFor.of(teacher, name).description
        manifest = {
            "version": VERSION,
            "teacher_tokens": self.count,
            "weights": contents(teacher),
            **made_for,
        }
        check_manifest(self.folder, manifest, "the teacher's logits", OPTION)
        if jax.process_index() == 0:
            with self.explain_disk_errors():
                write_manifest(self.folder, manifest)
        multihost_utils.sync_global_devices("the teacher's folder is there")

    @property
    def bytes(self) -> int:
        """The bytes that are stored for a token."""
        return sum(x.dtype.itemsize * x.size for name, x in shapes(1, self.count).items() if name != "tokens")

    def has(self, row: Int[np.ndarray, " t"]) -> bool:
        """Return True if the folder has the sequence."""
        return self._file_of(row).exists()

    def write(
        self, row: Int[np.ndarray, " t"], logits: Float[np.ndarray, "t n"], which: Int[np.ndarray, "t n"]
    ) -> None:
        """Write the likeliest tokens of a sequence and their logits. Raises UserError if the disk fills up."""
        file = self._file_of(row)
        partial = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
        with self.explain_disk_errors():
            try:
                file.parent.mkdir(exist_ok=True)
                with partial.open("wb") as out:
                    np.savez(out, logits=logits, which=which)
                    out.flush()
                    os.fsync(out.fileno())
                partial.replace(file)
            finally:
                partial.unlink(missing_ok=True)

    def read(self, rows: TokenRows) -> dict[str, Shaped[np.ndarray, "b t ..."]]:
        """Read the likeliest tokens of sequences and their logits. Raises UserError if a file is missing or damaged."""
        sequences = [self._read_row(row) for row in rows]
        return {"tokens": rows} | {
            name: np.stack([sequence[name] for sequence in sequences]) for name in sequences[0]
        }

    def _read_row(self, row: Int[np.ndarray, " t"]) -> dict[str, np.ndarray]:
        file = self._file_of(row)
        expected = {name: x for name, x in shapes(len(row), self.count).items() if name != "tokens"}
        try:
            with file.open("rb") as opened:
                archive = np.load(opened)
                arrays = {name: archive[name] for name in expected}
            if any(arrays[name].shape != x.shape for name, x in expected.items()):
                raise ValueError("other shapes")
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(
                f"{file}: is missing or damaged ({error}): remove it and {self.folder}/finished-*, and give the same "
                "command again"
            ) from None
        return arrays

    def _file_of(self, row: Int[np.ndarray, " t"]) -> Path:
        name = hashlib.blake2b(np.asarray(row, np.int32).tobytes(), digest_size=12).hexdigest()
        return self.folder / name[:2] / f"{name}.npz"

    def finished(self, settings: Mapping[str, Any]) -> Path:
        """Return the file that exists once all sequences of a run with these settings are stored."""
        name = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()
        return self.folder / f"finished-{name}.json"

    def explain_disk_errors(self) -> contextlib.AbstractContextManager[None]:
        """Turn disk errors into a UserError of one line."""
        return explain_disk_errors(self.folder, lambda: "sequences are")


def fill_store(
    store: TeacherStore,
    teacher: Decoder,
    steps: Iterable[TokenRows],
    held_out: Sequence[Int[np.ndarray, " t"]],
    *,
    mesh: Mesh,
    tokens: int,
    settings: Mapping[str, Any],
    share: Shard = WHOLE,
) -> None:
    """Store the teacher's likeliest tokens for a share of a run's sequences, held-out ones included, that are not
    stored yet.

    Args:
        steps: this process's rows of each update.
        tokens: the number of tokens of all updates, in all processes.
        settings: the values that determine the sequences. If all sequences of the same settings are stored, nothing is
            read.

    Raises:
        UserError: the disk is too small or fills up.
    """
    finished = store.finished(settings)
    # one process decides, since others may see the folder a moment later, or on another disk
    if multihost_utils.broadcast_one_to_all(np.array(finished.exists())):
        return
    if not any(store.folder.glob("??/*.npz")):
        remedy = f"name a folder elsewhere ({OPTION}), or keep the teacher in memory with the student ({OPTION} model)"
        description = f"the teacher's {store.count} likeliest after each of {tokens:,} tokens"
        check_disk_space(store.folder, tokens * store.bytes, description, remedy)
    rows = Rows.of_this_process(mesh, batch_shards())
    with Pace("teacher", "tokens", -(-tokens // share.count), 0) as pace:
        for row in share.of(held_out):
            _keep(store, teacher, np.broadcast_to(row, (rows.count, len(row))), mesh, rows)
        for step in share.of(steps):
            for first in range(0, len(step), rows.count):
                _keep(store, teacher, step[first : first + rows.count], mesh, rows)
                pace.advance(rows.total * step.shape[1])
    multihost_utils.sync_global_devices("all of the teacher's files are there")
    if jax.process_index() == 0 and share.count == 1:
        with store.explain_disk_errors():
            write_text(finished, json.dumps(settings, indent=1))


def _keep(store: TeacherStore, teacher: Decoder, batch: TokenRows, mesh: Mesh, rows: Rows) -> None:
    """Write the missing rows of this process. All processes compute if any of them misses a row."""
    missing = {row.tobytes(): index for index, row in enumerate(batch) if not store.has(row)}
    if not np.any(multihost_utils.process_allgather(np.array(len(missing)))):
        return
    hidden, parts = _hidden(teacher, to_mesh(mesh, rows, batch)), []
    count, tokens = batch.shape
    shards = token_shards(tokens)
    for first in range(0, tokens // shards, TOKENS_AT_ONCE):
        part = min(TOKENS_AT_ONCE, tokens // shards - first)
        tokens_and_logits = _likeliest(teacher, hidden, np.int32(first), part, store.count)
        parts.append([from_mesh(rows, x).reshape(count, shards, part, -1) for x in tokens_and_logits])
    logits, which = (np.concatenate(x, 2).reshape(count, tokens, -1) for x in zip(*parts, strict=True))
    for index in missing.values():
        store.write(batch[index], logits[index], which[index])


@jax.jit
def _hidden(model: Decoder, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    return model.hidden(tokens)


@functools.partial(jax.jit, static_argnames=("part", "count"))
def _likeliest(
    model: Decoder, hidden: Float[Array, "b t d"], first: Int[Array, ""], part: int, count: int
) -> tuple[Float[Array, "b cut n"], Int[Array, "b cut n"]]:
    """Return `likeliest` of the tokens that `cut_tokens` cuts, with logits minus the largest one in float16."""
    logits, which = likeliest(model.logits(cut_tokens(hidden, first, part)), count)
    # a shift does not change the divergence, and float16 is most precise near 0
    below = (logits.astype(jnp.float32) - logits[..., :1]).astype(jnp.float16)
    return tuple(jax.sharding.reshard(x, P(BATCH, None, None)) for x in (below, which.astype(jnp.int32)))
