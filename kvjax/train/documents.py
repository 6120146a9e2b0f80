"""Local text as documents: .txt, .jsonl and .parquet files, in an order that reads from disk in blocks.

All files are read once before the first document is given, so that no run ends at a bad line that comes late.
"""

import codecs
import dataclasses
import functools
import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.errors import Doubt, UserError
from kvjax.files import check_regular, not_utf8, os_reason
from kvjax.train.conversation import COLUMNS, document

BLOCK_LINES = 1024
LONGEST_LINE = 64 << 20
"""Bytes of a line of .jsonl."""
CHUNK = 1 << 20
"""Bytes of a .txt file that are checked at a time."""

Check = Callable[[str], object]
"""Raises ValueError for a document that the run could not use."""


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


class Survey:
    """A pass over all files: counts the documents without text and the bad ones, and keeps the first of these."""

    def __init__(self, check: Check | None):
        self._check = check
        self.first, self.bad, self.empty, self.texts = "", 0, 0, 0

    def add(self, at: str, read: Callable[[], str]) -> None:
        """Read the document at a place."""
        try:
            text = read()
            if text and self._check is not None:
                self._check(text)
        except ValueError as error:
            self.bad, self.first = self.bad + 1, self.first or f"{at}: {error}"
        else:
            self.texts, self.empty = self.texts + bool(text), self.empty + (not text)


class Documents:
    """The documents of a file or of a folder's files, shuffled by `seed`: blocks, and documents within a block.

    A .txt file is one document, or one for every `piece` bytes of a long file; .jsonl has one a line under `text`, or
    a chat under `messages`; .parquet has a column of either name. Those without text are "".

    Raises:
        UserError: no such file, none of these kinds, a file that cannot be read, no text in it, or a bad document, also
            one that `check` refuses; the first is named.
    """

    def __init__(self, path: Path, seed: int, piece: int, check: Check | None = None):
        self.path = path
        files = [path]
        if path.is_dir():
            files = sorted(f for f in path.rglob("*") if f.suffix in KINDS and not f.is_dir())
        if not files:
            raise UserError(f"--data {path}: the folder has no {', '.join(KINDS)} file")
        survey = Survey(check)
        blocks = [block for file in files for block in _blocks(file, piece, survey)]
        if survey.bad:
            more = f"; {survey.bad} documents are bad" if survey.bad > 1 else ""
            raise UserError(f"--data {survey.first}{more}")
        if not survey.texts:
            raise UserError(f"--data {path}: there is no text in it")
        if survey.empty:
            warnings.warn(
                f"--data {path}: {survey.empty} of its documents have no text and are skipped",
                Doubt,
                stacklevel=2,
            )
        rng = np.random.default_rng((seed, 7))
        self._blocks = [blocks[i] for i in rng.permutation(len(blocks))]
        self._ends = np.cumsum([block.count for block in self._blocks], dtype=np.int64)
        self._order = [rng.permutation(block.count) for block in self._blocks]
        self._read = functools.lru_cache(maxsize=8)(_read)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> str:
        at = int(np.searchsorted(self._ends, index, side="right"))
        block = self._blocks[at]
        inside = index - (int(self._ends[at]) - block.count)
        return self._read(block)[self._order[at][inside]]


def _blocks(file: Path, piece: int, survey: Survey) -> list[Block]:
    if file.suffix not in KINDS:
        raise UserError(f"--data {file}: expected a {', '.join(KINDS)} file, or a folder of them")
    check_regular(file, "--data")
    try:
        return KINDS[file.suffix][0](file, piece, survey)
    except OSError as error:
        raise UserError(f"--data {file}: cannot be read ({os_reason(error)})") from None


def _read(block: Block) -> list[str]:
    """Return a block's documents. What is wrong with one was found before, unless the file has changed."""
    try:
        return KINDS[block.file.suffix][1](block)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"--data {block.file}: has changed since the run began: {error}") from None


def _text_blocks(file: Path, piece: int, survey: Survey) -> list[Block]:
    survey.add(str(file), functools.partial(_check_text, file))
    return [Block(file, start, piece, 1) for start in range(0, file.stat().st_size, piece)]


def _check_text(file: Path) -> str:
    """Return "text" for a file that has some, else "". Raises ValueError for one that is binary or not UTF-8."""
    decoder, at, found = codecs.getincrementaldecoder("utf-8-sig")(), 0, ""
    with file.open("rb") as opened:
        begin = opened.peek(2)[:2]
        while True:
            chunk = opened.read(CHUNK)
            at += len(chunk)
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                raise ValueError(not_utf8(begin, byte, at - len(error.object) + error.start)) from None
            if "\0" in text:
                raise ValueError("is binary, not text: it has zero bytes")
            found = found or ("text" if text.strip() else "")
            if not chunk:
                return found


def _read_text(block: Block) -> list[str]:
    with block.file.open("rb") as file:
        file.seek(block.start)
        data = file.read(block.size)
    # a cut may go through a character, whose parts are left out
    data = data.lstrip(bytes(range(0x80, 0xC0))) if block.start else data.removeprefix(codecs.BOM_UTF8)
    text = codecs.getincrementaldecoder("utf-8")().decode(data)
    return [text if text.strip() else ""]


def _line_blocks(file: Path, piece: int, survey: Survey) -> list[Block]:
    blocks, start, size, count = [], 0, 0, 0
    with file.open("rb") as lines:
        while line := lines.readline(LONGEST_LINE + 1):
            at = f"{file}: line {len(blocks) * BLOCK_LINES + count + 1}"
            if len(line) > LONGEST_LINE:
                raise UserError(f"--data {at}: is longer than {LONGEST_LINE >> 20} MiB")
            survey.add(at, functools.partial(_text_of, line))
            size, count = size + len(line), count + 1
            if count == BLOCK_LINES:
                blocks.append(Block(file, start, size, count))
                start, size, count = start + size, 0, 0
    return [*blocks, Block(file, start, size, count)] if count else blocks


def _read_lines(block: Block) -> list[str]:
    with block.file.open("rb") as file:
        file.seek(block.start)
        lines = file.read(block.size).split(b"\n")
    return [_text_of(line) for line in lines[: block.count]]


def _text_of(line: bytes) -> str:
    """Return the document of a line of JSON. Raises ValueError."""
    line = line.strip().removeprefix(codecs.BOM_UTF8)
    if not line:
        return ""
    try:
        record = json.loads(line.decode())
        if not isinstance(record, dict):
            raise ValueError("no JSON object")
        text = document(record)
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(line[:2], line[error.start], error.start)) from None
    except RecursionError:
        raise _bad_line(line, "nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _bad_line(line, f"{error.msg}, character {error.pos + 1}") from None
    except ValueError as error:
        raise _bad_line(line, str(error)) from None
    return text if text.strip() else ""


def _bad_line(line: bytes, why: str) -> ValueError:
    found = line[:60].decode(errors="replace")
    return ValueError(f'expected lines such as {{"text": "…"}}, found {found} ({why[:80]})')


def _parquet_blocks(file: Path, piece: int, survey: Survey) -> list[Block]:
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(file)
    except Exception as error:  # of a damaged file pyarrow raises many kinds
        raise UserError(f"--data {file}: is no parquet file ({error})") from None
    with parquet:
        _column(file, parquet)
        groups = range(parquet.metadata.num_row_groups)
        blocks = [Block(file, group, 1, parquet.metadata.row_group(group).num_rows) for group in groups]
    for block in blocks:
        for row, value in enumerate(_parquet_values(block)):
            survey.add(
                f"{file}: row {row} of row group {block.start}", functools.partial(_text_of_value, value)
            )
    return blocks


def _parquet_values(block: Block) -> list[dict[str, Any]]:
    """Return the rows of a row group, with one column."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(block.file) as parquet:
            name = _column(block.file, parquet)
            rows = parquet.read_row_group(block.start, columns=[name]).to_pylist()
        if len(rows) != block.count:
            raise ValueError(f"{len(rows)} rows, expected {block.count}")
    except UserError:
        raise
    except Exception as error:  # of a damaged page pyarrow raises many kinds
        raise UserError(
            f"--data {block.file}: row group {block.start} cannot be read ({error or type(error).__name__})"
        ) from None
    return rows


def _text_of_value(row: dict[str, Any]) -> str:
    text = document(row) if any(row.values()) else ""
    return text if text.strip() else ""


def _read_parquet(block: Block) -> list[str]:
    return [_text_of_value(row) for row in _parquet_values(block)]


def _column(file: Path, parquet: Any) -> str:
    """Return the name of the column that holds documents."""
    from pyarrow import types

    schema = parquet.schema_arrow
    for name in COLUMNS:
        if name not in schema.names:
            continue
        if len(found := schema.get_all_field_indices(name)) > 1:
            raise UserError(f"--data {file}: has {len(found)} columns `{name}`, expected one")
        kind = schema.field(name).type
        plain = kind.value_type if types.is_dictionary(kind) else kind
        strings = str(plain) in ("string", "large_string", "string_view")
        chats = (types.is_list(kind) or types.is_large_list(kind)) and types.is_struct(kind.value_type)
        if not (types.is_null(kind) or (strings if name == "text" else chats)):
            expected = "strings" if name == "text" else "chats, lists of {role, content}"
            raise UserError(f"--data {file}: its column `{name}` is of {kind}, expected {expected}")
        return name
    raise UserError(f"--data {file}: has no column `text`, it has {', '.join(schema.names)}")


KINDS = {
    ".txt": (_text_blocks, _read_text),
    ".jsonl": (_line_blocks, _read_lines),
    ".parquet": (_parquet_blocks, _read_parquet),
}
