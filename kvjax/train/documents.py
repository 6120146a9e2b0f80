"""Documents of local .txt, .jsonl and .parquet files, in an order that reads them from disk in blocks."""

import codecs
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.errors import UserError, shown, warn
from kvjax.files import UTF16, check_regular, is_there, not_utf8
from kvjax.train.conversation import COLUMNS, document

BLOCK_LINES = 1024
"""The number of lines of a .jsonl file that are read together."""
LONGEST_LINE = 256 << 20
"""The limit of a .jsonl line, in bytes."""
CHUNK = 1 << 24
"""The number of bytes of a .txt file that are checked at a time."""

Check = Callable[[str], object]
"""A function that raises UserError for a document that the run could not use."""


def digest(text: str) -> bytes:
    """Return a hash of a document. It keeps copies of held-out documents out of training."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of `count` documents that are read together from `file`. `start` is a byte or a parquet row group."""

    file: Path
    start: int
    size: int
    """The size in bytes, or in parquet row groups."""
    count: int
    empty: int = 0
    """The number of documents without text."""


class Documents:
    """The documents of a file or of a folder's files. `seed` shuffles the blocks, and the documents within a block.

    A .txt file is one document; a long one is cut into documents of `piece` bytes. A .jsonl file has one document per
    line, a text under `text` or a chat under `messages`. A .parquet file has one of these columns or both. All files
    are read and checked here, so that no training fails after hours at a line that it cannot use. Documents without
    text become empty texts, with one warning.

    Raises:
        UserError: there is no such file, it is of another kind, it cannot be read or has no text, a record is not a
            document (the message has its file and line), or `check` refuses a document.
    """

    def __init__(self, path: Path, seed: int, piece: int, check: Check = lambda text: None):
        self.path = path
        is_folder = is_there(path, "--data") and path.is_dir()
        files = (
            sorted(f for f in path.rglob("*") if f.suffix in KINDS and not f.is_dir())
            if is_folder
            else [path]
        )
        if not files:
            raise UserError(f"--data {path}: the folder has no {', '.join(KINDS)} file")
        blocks = [block for file in files for block in _blocks(file, piece, check)]
        rng = np.random.default_rng((seed, 7))
        self._blocks = [blocks[i] for i in rng.permutation(len(blocks))]
        self._ends = np.cumsum([block.count for block in self._blocks], dtype=np.int64)
        self._order = [rng.permutation(block.count) for block in self._blocks]
        self._read = functools.lru_cache(maxsize=8)(_read)
        empty = sum(block.empty for block in blocks)
        if empty == len(self):
            raise UserError(f"--data {path}: there is no text in it")
        if empty:
            message = f"{empty:,} of {len(self):,} documents have no text and are skipped"
            warn(f"--data {path}: {message}", stacklevel=2)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> str:
        position = int(np.searchsorted(self._ends, index, side="right"))
        block = self._blocks[position]
        offset = index - (int(self._ends[position]) - block.count)
        return self._read(block)[self._order[position][offset]]


def _blocks(file: Path, piece: int, check: Check) -> list[Block]:
    if file.suffix not in KINDS:
        raise UserError(f"--data {file}: expected a {', '.join(KINDS)} file, or a folder of them")
    size = check_regular(file, "--data")
    try:
        return KINDS[file.suffix][0](file, size, piece, check)
    except OSError as error:
        raise UserError(f"--data {file}: cannot be read ({error.strerror or error})") from None


def _read(block: Block) -> list[str]:
    try:
        texts = KINDS[block.file.suffix][1](block)
    except OSError as error:
        raise UserError(f"--data {block.file}: cannot be read ({error.strerror or error})") from None
    if len(texts) < block.count:
        raise UserError(f"--data {block.file}: has become shorter since it was opened")
    return texts


def _text_blocks(file: Path, size: int, piece: int, check: Check) -> list[Block]:
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    with file.open("rb") as opened:
        first_bytes = opened.read(2)
        opened.seek(0)
        while True:
            data = opened.read(CHUNK)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                offset = position - pending + error.start
                raise UserError(
                    f"--data {file}: {not_utf8(first_bytes, error.object[error.start], offset)}"
                ) from None
            if (zero := data.find(0)) >= 0:
                raise UserError(f"--data {file}: is not text, byte {position + zero} is 0")
            if not data:
                return [Block(file, start, piece, 1) for start in range(0, size, piece)]
            position += len(data)


def _read_text(block: Block) -> list[str]:
    with block.file.open("rb") as file:
        file.seek(block.start)
        data = file.read(block.size)
    # the file was checked to be UTF-8, so only characters cut at the border of a piece are dropped
    text = data.decode("utf-8", errors="ignore").removeprefix("\ufeff")
    return [text if text.strip() else ""]


def _line_blocks(file: Path, size: int, piece: int, check: Check) -> list[Block]:
    blocks, start, length, count, empty, number, faults = [], 0, 0, 0, 0, 0, Faults(file, "line", check)
    with file.open("rb") as lines:
        for line in iter(lambda: lines.readline(LONGEST_LINE), b""):
            length, count, number = length + len(line), count + 1, number + 1
            if len(line) == LONGEST_LINE:
                raise UserError(f"--data {file}: line {number} is longer than {LONGEST_LINE >> 20} MiB")
            if number == 1 and line[:2] in UTF16:
                raise UserError(f"--data {file}: {not_utf8(line, line[0], 0)}")
            empty += faults.is_empty(f"line {number}", _text_of, line)
            if count == BLOCK_LINES:
                blocks.append(Block(file, start, length, count, empty))
                start, length, count, empty = start + length, 0, 0, 0
    faults.refuse()
    return [*blocks, Block(file, start, length, count, empty)] if count else blocks


class Faults:
    """The first fault in a file's documents, and the number of faults."""

    def __init__(self, file: Path, unit: str, check: Check):
        self._file, self._unit, self._check, self._first, self._count = file, unit, check, "", 0

    def is_empty(self, where: str, text_of: Callable[[Any], str], record: Any) -> bool:
        """Check a document and return True if it has no text. A record that is not a document is counted. A UserError
        of `check` is raised."""
        try:
            text = text_of(record)
            self._check(text)
        except UserError as error:
            raise UserError(f"--data {self._file}: {where}: {error}") from None
        except ValueError as error:
            self._first = self._first or f"{where}: {error}"
            self._count += 1
            return False
        return not text

    def refuse(self) -> None:
        """Raise UserError if there are faults."""
        if self._count:
            others = self._count - 1
            more = f"; {others:,} more {self._unit}{'s are' if others > 1 else ' is'} wrong" if others else ""
            raise UserError(f"--data {self._file}: {self._first}{more}")


def _read_lines(block: Block) -> list[str]:
    with block.file.open("rb") as file:
        file.seek(block.start)
        lines = file.read(block.size).split(b"\n")
    try:
        return [_text_of(line) for line in lines[: block.count]]
    except ValueError as error:
        raise UserError(f"--data {block.file}: has changed since it was opened, {error}") from None


def _text_of(line: bytes) -> str:
    """Return the document of a line, empty if it has no text. Raises ValueError if the line is not a document."""
    if not line.strip():
        return ""
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(line, line[error.start], error.start)) from None
    except (ValueError, RecursionError):
        raise ValueError(f"expected JSON, got {shown(line[:200].decode(errors='replace'))}") from None
    return _valid_document(record)


def _valid_document(record: Any) -> str:
    """Return a record's document, empty if it has no text. Raises ValueError if it is not a document or not Unicode."""
    text = document(record)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start].encode("unicode_escape").decode()
        raise ValueError(f"has half of a surrogate pair, {half}, which is no character") from None
    return text if text.strip() else ""


def _parquet_blocks(file: Path, size: int, piece: int, check: Check) -> list[Block]:
    import pyarrow.parquet

    faults, blocks = Faults(file, "row", check), []
    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            names = _columns(file, parquet)
            for group in range(parquet.metadata.num_row_groups):
                rows = parquet.read_row_group(group, columns=names).to_pylist()
                places = (f"row {row} of row group {group}" for row in range(1, len(rows) + 1))
                empty = sum(
                    faults.is_empty(place, _valid_document, row)
                    for place, row in zip(places, rows, strict=True)
                )
                blocks.append(Block(file, group, 1, len(rows), empty))
    except UserError:
        raise
    except Exception as error:  # pyarrow raises many kinds for a damaged file
        raise UserError(f"--data {file}: is not a complete parquet file ({error})") from None
    faults.refuse()
    return blocks


def _read_parquet(block: Block) -> list[str]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(block.file) as parquet:
            rows = parquet.read_row_group(block.start, columns=_columns(block.file, parquet)).to_pylist()
            return [_valid_document(row) for row in rows]
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--data {block.file}: has changed since it was opened ({error})") from None


def _columns(file: Path, parquet: Any) -> list[str]:
    names = parquet.schema_arrow.names
    found = [name for name in COLUMNS if name in names]
    if not found:
        raise UserError(f"--data {file}: has no column `text`, it has {', '.join(names)}")
    return found


KINDS = {
    ".txt": (_text_blocks, _read_text),
    ".jsonl": (_line_blocks, _read_lines),
    ".parquet": (_parquet_blocks, _read_parquet),
}
"""Two functions for each kind of file: one finds and checks its blocks, the other reads a block."""
