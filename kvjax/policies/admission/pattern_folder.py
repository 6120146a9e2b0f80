"""DuoAttention's pattern folders: what each kv head is worth, as a table."""

import hashlib
import json
from pathlib import Path

import numpy as np
from jaxtyping import Float

from kvjax.errors import UserError
from kvjax.exported.fingerprint import MadeFor
from kvjax.files import write_text


def read_pattern(folder: str | Path) -> tuple[Float[np.ndarray, "l k"], int, int]:
    """A DuoAttention pattern folder: (weight of each kv head in [0, 1], sink size, recent size).

    `full_attention_heads.tsv` has a row for each layer and a column for each kv head; `config.json` has `sink_size`
    and `recent_size` (format: mit-han-lab/duo-attention). Raises UserError naming the file and what is wrong with it.
    """
    table, config = _files(folder)
    try:
        weights = np.loadtxt(table, delimiter="\t", ndmin=2)
    except ValueError as error:
        raise UserError(f"{table}: expected a table of numbers, layers × kv heads ({error})") from None
    try:
        sizes = json.loads(config.read_text())
        sink, recent = int(sizes["sink_size"]), int(sizes["recent_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{config}: expected whole numbers sink_size and recent_size ({error!r})") from None
    return np.clip(weights, 0, 1), sink, recent


def pattern_made_for(folder: str | Path) -> MadeFor | None:
    """The model that a pattern folder was written for, if it says so: those of other programs do not."""
    return MadeFor.described(json.loads(_files(folder)[1].read_text()))


def _files(folder: str | Path) -> tuple[Path, Path]:
    files = Path(folder) / "full_attention_heads.tsv", Path(folder) / "config.json"
    for file in files:
        if not file.is_file():
            raise UserError(f"{folder} is no head pattern: it has no {file.name}")
    return files


def pattern_digest(folder: str | Path) -> str:
    """What a pattern folder is known by: other weights in the same folder have another one."""
    return hashlib.sha256(read_pattern(folder)[0].tobytes()).hexdigest()[:16]


def write_pattern(
    folder: Path, weights: Float[np.ndarray, "l k"], sink: int, window: int, made_for: MadeFor | None = None
) -> None:
    """A DuoAttention pattern folder, as `read_pattern` reads it; its config.json has the model, too."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savetxt(folder / "full_attention_heads.tsv", weights, delimiter="\t")
    sizes = {"sink_size": sink, "recent_size": window}
    # last: a folder that has it is whole
    write_text(
        folder / "config.json", json.dumps(sizes | ({} if made_for is None else made_for.description)) + "\n"
    )
