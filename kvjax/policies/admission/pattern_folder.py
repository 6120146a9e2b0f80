"""DuoAttention's pattern folders: a table with a weight for each kv head."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from kvjax.builtin import GATES, builtin_gates
from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.checkpoints.folder import DESCRIPTION, LARGEST, TABLE, export_folder, read_description
from kvjax.errors import UserError, real_number, whole_number
from kvjax.files import read_text, write_text


class PatternFolder(NamedTuple):
    """The contents of a pattern folder."""

    weights: Float[np.ndarray, "l k"]
    """The kv heads' weights as they are written: shares in 0 … 1, or any numbers that rank heads, such as log α."""
    sink: int
    """The number of first tokens that streaming heads keep."""
    recent: int
    """The number of last tokens that streaming heads keep."""
    sparsity: float | None
    """The share of streaming heads that the pattern is for; None: it does not say."""
    made_for: MadeFor | None
    """The model that the pattern was made for; None: it does not say, as in folders of other programs."""


def read_pattern(folder: str | Path) -> PatternFolder:
    """Return the contents of a pattern folder (format: mit-han-lab/duo-attention). `folder` may also be a training run,
    whose exported folder is read, or the name of a pattern that comes with kvjax.

    `full_attention_heads.tsv` has a row for each layer and a column for each kv head; `config.json` has `sink_size`,
    `recent_size` and, if the pattern is for one, `sparsity`. Raises UserError naming the faulty file and the fault.
    """
    path = builtin_gates(str(folder)) if str(folder) in GATES else export_folder(Path(folder))
    files = path / TABLE, path / DESCRIPTION
    for file in files:
        if not file.is_file():
            raise UserError(f"{folder} is no head pattern: it has no {file.name}")
    table, config = files
    lines = [line for line in read_text(table, "pattern", most=LARGEST).split("\n") if line.strip()]
    try:
        weights = np.array([[float(cell) for cell in line.split("\t")] for line in lines])
        if weights.ndim != 2 or not np.isfinite(weights).all():
            raise ValueError("empty or not finite")
    except ValueError as error:
        raise UserError(f"{table}: expected a table of numbers, layers × kv heads ({error})") from None
    description = read_description(config)
    sink, recent = (
        whole_number(str(config), name, description.get(name), 0) for name in ("sink_size", "recent_size")
    )
    sparsity = description.get("sparsity")
    if sparsity is not None:
        sparsity = real_number(str(config), "sparsity", sparsity, 0.0, 1.0)
    return PatternFolder(weights, sink, recent, sparsity, MadeFor.described(description))


def pattern_digest(folder: str | Path) -> str:
    """Return a hash of a pattern folder's weights."""
    return hashlib.sha256(read_pattern(folder).weights.tobytes()).hexdigest()[:16]


def write_pattern(
    folder: Path,
    weights: Float[np.ndarray, "l k"],
    sink: int,
    recent: int,
    made_for: MadeFor | None = None,
    sparsity: float | None = None,
    described: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write a pattern folder that `read_pattern` reads. `sparsity` is the share of streaming heads, for weights that
    do not separate streaming and retrieval heads at 0.5. `described` holds further entries of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savetxt(folder / TABLE, weights, delimiter="\t")
    description = dict(described) | {"sink_size": sink, "recent_size": recent}
    description |= {} if sparsity is None else {"sparsity": sparsity}
    # written last: a folder with this file is complete
    write_text(
        folder / DESCRIPTION,
        json.dumps(description | ({} if made_for is None else made_for.description)) + "\n",
    )
