"""Folders of arrays that are computed once before the updates and shared between runs. Each has a manifest of what the
arrays were computed from. A wrong manifest or a full disk is an error of one line."""

import contextlib
import errno
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvjax.checkpoints.fingerprint import KEY, agreement
from kvjax.errors import UserError
from kvjax.files import write_text

MANIFEST = "manifest.json"
SPARE = 1 << 26
"""The bytes of a disk that are left free for checkpoints and logs."""


def check_kept(folder: Path, manifest: Mapping[str, Any], what: str, option: str) -> None:
    """Raise UserError if the folder exists and its manifest does not agree with `manifest`.

    The fingerprints in their `made_for` may be those of the same weights in different dtypes.

    Args:
        what: what the folder holds, for the message.
        option: the command line's option that names the folder.
    """
    if not (folder / MANIFEST).exists():
        return
    remedy = f"name another folder (--out, {option}), or remove it"
    wanted = json.loads(json.dumps(manifest))
    try:
        found = dict(json.loads((folder / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError):
        raise UserError(f"{folder / MANIFEST}: is damaged: {remedy}") from None
    if found.get("version") != wanted["version"]:
        raise UserError(
            f"{folder}: {what} are of version {found.get('version')}, not {wanted['version']}: {remedy}"
        )
    theirs, own = (x.get(KEY, {}) for x in (found, wanted))
    if agreement(str(theirs.get("fingerprint", "")), str(own.get("fingerprint", ""))) < 1:
        raise UserError(f"{folder}: {what} are of the model {theirs.get('model')}, not of {own.get('model')}, "
                        f"whose weights are others: {remedy}")  # fmt: skip
    for name in sorted(wanted.keys() - {KEY}):
        was, now = found.get(name), wanted[name]
        if was != now:
            words = f"{name} {was}, not {now}" if isinstance(now, str | int) else f"other {name}"
            raise UserError(f"{folder}: {what} are of {words}: {remedy}")


def begin_kept(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Make the folder and write its manifest, unless they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MANIFEST).exists():
        write_text(folder / MANIFEST, json.dumps(manifest, indent=1))


def check_room(folder: Path, need: int, what: str, remedy: str) -> None:
    """Raise UserError if the disk of a folder, which need not exist yet, has no space for `need` more bytes."""
    nearest = folder.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    free = shutil.disk_usage(nearest).free
    if need and need + SPARE > free:
        raise UserError(f"{what} take {size(need)} in {folder}, whose disk has {size(free)} free: {remedy}")


@contextlib.contextmanager
def mending(folder: Path, finished: Callable[[], str]) -> Iterator[None]:
    """Turn errors of the disk into a UserError of one line, which also says what is `finished`."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UserError(
            f"{folder}: {'the disk is full' if full else error.strerror or error}: {finished()} finished and stay; the "
            "same command with the same --out goes on from there"
        ) from None


def size(count: int) -> str:
    """Return a number of bytes in MiB or GiB, in words."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
