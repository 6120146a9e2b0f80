"""Local text as documents: .txt, .jsonl and .parquet files, in an order that reads from disk in blocks."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.errors import UserError
from kvjax.train.conversation import COLUMNS, document

BLOCK_LINES = 1024


def digest(text: str) -> bytes:
    """What a document is known by, so that no copy of a held-out one is trained on."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


@dataclasses.dataclass(frozen=True)
class Block:
    """Documents that are read together: `count` of them in `file`, from `start` (a byte, or a parquet row group)."""

    file: Path
    """Where."""
    start: int
    """A byte, or a row group."""
    size: int
    """Bytes, or row groups."""
    count: int
    """How many."""


class Documents:
    """The documents of a file or of a folder's files, shuffled by `seed`: blocks, and documents within a block.

    A .txt file is one document, or one for every `piece` bytes of a long file; .jsonl has one a line under `text`, or
    a chat under `messages`; .parquet has a column of either name.

    Raises:
        UserError: no such file, none of these kinds, a file that cannot be read, or nothing in it.
    """

    def __init__(self, path: Path, seed: int, piece: int):
        self.path = path
        files = sorted(f for f in path.rglob("*") if f.suffix in KINDS) if path.is_dir() else [path]
        if not files:
            raise UserError(f"--data {path}: the folder has no {', '.join(KINDS)} file")
        blocks = [block for file in files for block in _blocks(file, piece)]
        rng = np.random.default_rng((seed, 7))
        self._blocks = [blocks[i] for i in rng.permutation(len(blocks))]
        self._ends = np.cumsum([block.count for block in self._blocks], dtype=np.int64)
        self._order = [rng.permutation(block.count) for block in self._blocks]
        self._read = functools.lru_cache(maxsize=8)(_read)
        if not len(self):
            raise UserError(f"--data {path}: there is no text in it")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> str:
        at = int(np.searchsorted(self._ends, index, side="right"))
        block = self._blocks[at]
        inside = index - (int(self._ends[at]) - block.count)
        return self._read(block)[self._order[at][inside]]


def _blocks(file: Path, piece: int) -> list[Block]:
    if file.suffix not in KINDS:
        raise UserError(f"--data {file}: expected a {', '.join(KINDS)} file, or a folder of them")
    try:
        return KINDS[file.suffix][0](file, piece)
    except OSError as error:
        raise UserError(f"--data {file}: cannot be read ({error.strerror or error})") from None


def _read(block: Block) -> list[str]:
    return KINDS[block.file.suffix][1](block)


def _text_blocks(file: Path, piece: int) -> list[Block]:
    size = file.stat().st_size
    return [Block(file, start, piece, 1) for start in range(0, size, piece)]


def _read_text(block: Block) -> list[str]:
    with block.file.open("rb") as file:
        file.seek(block.start)
        data = file.read(block.size)
    text = data.decode("utf-8", errors="ignore")  # a cut may go through a character
    if len(text) < len(data) // 8:
        raise UserError(f"--data {block.file}: is not UTF-8 text")
    return [text if text.strip() else ""]


def _line_blocks(file: Path, piece: int) -> list[Block]:
    blocks, start, size, count = [], 0, 0, 0
    with file.open("rb") as lines:
        for line in lines:
            size, count = size + len(line), count + 1
            if count == BLOCK_LINES:
                blocks.append(Block(file, start, size, count))
                start, size, count = start + size, 0, 0
    return [*blocks, Block(file, start, size, count)] if count else blocks


def _read_lines(block: Block) -> list[str]:
    with block.file.open("rb") as file:
        file.seek(block.start)
        lines = file.read(block.size).split(b"\n")
    return [_text_of(line, block.file) for line in lines[: block.count]]


def _text_of(line: bytes, file: Path) -> str:
    if not line.strip():
        return ""
    try:
        text = document(dict(json.loads(line)))
    except (ValueError, TypeError):
        shown = line[:60].decode("utf-8", errors="replace")
        raise UserError(f'--data {file}: expected lines such as {{"text": "…"}}, found {shown}') from None
    return text if text.strip() else ""


def _parquet_blocks(file: Path, piece: int) -> list[Block]:
    import pyarrow
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"--data {file}: is no parquet file ({' '.join(str(error).split())})") from None
    with parquet:
        _column(file, parquet)
        groups = range(parquet.metadata.num_row_groups)
        return [Block(file, group, 1, parquet.metadata.row_group(group).num_rows) for group in groups]


def _read_parquet(block: Block) -> list[str]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(block.file) as parquet:
        name = _column(block.file, parquet)
        values = parquet.read_row_group(block.start, columns=[name]).column(name).to_pylist()
    texts = [document({name: value}) if value else "" for value in values]
    return [text if text.strip() else "" for text in texts]


def _column(file: Path, parquet: Any) -> str:
    names = parquet.schema_arrow.names
    for name in COLUMNS:
        if name in names:
            return name
    raise UserError(f"--data {file}: has no column `text`, it has {', '.join(names)}")


KINDS = {
    ".txt": (_text_blocks, _read_text),
    ".jsonl": (_line_blocks, _read_lines),
    ".parquet": (_parquet_blocks, _read_parquet),
}
