"""Folders of arrays that are computed once before the first update and shared between runs. A manifest says what the
arrays were computed from. A wrong manifest or a full disk is an error of one line."""

import contextlib
import errno
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvjax.checkpoints.fingerprint import KEY, agreement
from kvjax.errors import UserError, shown_bytes
from kvjax.files import write_text

MANIFEST = "manifest.json"
SPARE = 1 << 26
"""The bytes of a disk that are left free, for checkpoints and logs."""


def check_manifest(folder: Path, manifest: Mapping[str, Any], description: str, option: str) -> None:
    """Raise UserError if the folder exists and its manifest does not agree with `manifest`.

    The fingerprints in the two `made_for` may be those of the same weights in different dtypes.

    Args:
        description: what the folder holds, in the plural, for the message.
        option: the command line's option that names the folder.
    """
    if not (folder / MANIFEST).exists():
        return
    remedy = f"name another folder (--out, {option}), or remove it"
    expected = json.loads(json.dumps(manifest))
    try:
        saved = dict(json.loads((folder / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError):
        raise UserError(f"{folder / MANIFEST}: is damaged: {remedy}") from None
    if saved.get("version") != expected["version"]:
        raise UserError(
            f"{folder}: {description} are of version {saved.get('version')}, not {expected['version']}: {remedy}"
        )
    saved_model, own_model = (x.get(KEY, {}) for x in (saved, expected))
    if agreement(str(saved_model.get("fingerprint", "")), str(own_model.get("fingerprint", ""))) < 1:
        raise UserError(
            f"{folder}: {description} are of the model {saved_model.get('model')}, not of "
            f"{own_model.get('model')}, whose weights differ: {remedy}"
        )
    for name in sorted(expected.keys() - {KEY}):
        saved_value, value = saved.get(name), expected[name]
        if saved_value != value:
            difference = (
                f"{name} {saved_value}, not {value}" if isinstance(value, str | int) else f"other {name}"
            )
            raise UserError(f"{folder}: {description} are of {difference}: {remedy}")


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Make the folder and write its manifest, unless they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MANIFEST).exists():
        write_text(folder / MANIFEST, json.dumps(manifest, indent=1))


def check_disk_space(folder: Path, need: int, description: str, remedy: str) -> None:
    """Raise UserError if the disk of a folder, which need not exist yet, has no space for `need` more bytes."""
    nearest = folder.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    free = shutil.disk_usage(nearest).free
    if need and need + SPARE > free:
        raise UserError(
            f"{description} take {shown_bytes(need)} in {folder}, whose disk has {shown_bytes(free)} free: {remedy}"
        )


@contextlib.contextmanager
def explain_disk_errors(folder: Path, finished: Callable[[], str]) -> Iterator[None]:
    """Turn disk errors into a UserError of one line. `finished`: a function that says what is finished."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UserError(
            f"{folder}: {'the disk is full' if full else error.strerror or error}: {finished()} finished and stay; the "
            "same command with the same --out goes on from there"
        ) from None
