"""DuoAttention's pattern folders: what each kv head is worth, as a table."""

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
from kvjax.checkpoints.folder import DESCRIPTION, LARGEST, TABLE, of_run, read_description
from kvjax.errors import UserError, real_number, whole_number
from kvjax.files import read_text, write_text


class PatternFolder(NamedTuple):
    """What a pattern folder says."""

    weights: Float[np.ndarray, "l k"]
    """Of each kv head, as they are written: shares in 0 … 1, or any numbers that rank heads, such as log α."""
    sink: int
    """First tokens that streaming heads keep."""
    recent: int
    """Last tokens that they keep."""
    sparsity: float | None
    """The share of streaming heads that it is for; None: it does not say."""
    made_for: MadeFor | None
    """The model that it was written for; None: it does not say, as those of other programs."""


def read_pattern(folder: str | Path) -> PatternFolder:
    """A pattern folder (format: mit-han-lab/duo-attention), of a training run's folder the one that it exported, or one
    that comes with kvjax, by its name.

    `full_attention_heads.tsv` has a row for each layer and a column for each kv head; `config.json` has `sink_size`,
    `recent_size` and, if it is for one, `sparsity`. Raises UserError naming the file and what is wrong with it.
    """
    named = builtin_gates(str(folder)) if str(folder) in GATES else of_run(Path(folder))
    files = named / TABLE, named / DESCRIPTION
    for file in files:
        if not file.is_file():
            raise UserError(f"{folder} is no head pattern: it has no {file.name}")
    table, config = files
    lines = [line for line in read_text(table, "pattern", most=LARGEST).split("\n") if line.strip()]
    try:
        weights = np.array([[float(cell) for cell in line.split("\t")] for line in lines])
        if weights.ndim != 2 or not np.isfinite(weights).all():
            raise ValueError("not finite, or none")
    except ValueError as error:
        raise UserError(f"{table}: expected a table of numbers, layers × kv heads ({error})") from None
    said = read_description(config)
    sink, recent = (
        whole_number(str(config), name, said.get(name), 0) for name in ("sink_size", "recent_size")
    )
    sparsity = said.get("sparsity")
    if sparsity is not None:
        sparsity = real_number(str(config), "sparsity", sparsity, 0.0, 1.0)
    return PatternFolder(weights, sink, recent, sparsity, MadeFor.described(said))


def pattern_digest(folder: str | Path) -> str:
    """What a pattern folder is known by: other weights in the same folder have another one."""
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
    """A pattern folder, as `read_pattern` reads it. sparsity: the share of streaming heads, where weights are no shares
    of which 0.5 parts the heads. described: what else config.json is to say."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savetxt(folder / TABLE, weights, delimiter="\t")
    said = dict(described) | {"sink_size": sink, "recent_size": recent}
    said |= {} if sparsity is None else {"sparsity": sparsity}
    # last: a folder that has it is whole
    write_text(
        folder / DESCRIPTION, json.dumps(said | ({} if made_for is None else made_for.description)) + "\n"
    )
