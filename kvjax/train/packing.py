"""Packed sequences: documents one after another, cut wherever a sequence is full. Attention crosses their borders."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Int

from kvjax.errors import UserError
from kvjax.train.batches import TokenRows
from kvjax.train.conversation import Conversation
from kvjax.train.data import Data, Wanted, open_builtin, prefetched
from kvjax.train.documents import digest
from kvjax.train.readers import Reader

Encode = Callable[[str], Int[np.ndarray, " t"]]
"""A function that returns a document's tokens, with the token that ends it."""


@dataclasses.dataclass(frozen=True)
class StreamEncoder:
    """The encoding of a document of a stream. A text gets the tokenizer's own beginning, if it has one, and its
    end-of-sequence token. A chat is written by the template."""

    tokenizer: Any
    """The model's tokenizer."""

    def __call__(self, text: str) -> Int[np.ndarray, " t"]:
        if isinstance(text, Conversation):
            return np.asarray(text.tokens(self.tokenizer), np.int32)
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        return np.asarray(ids if end is None or ids[-1:] == [end] else [*ids, end], np.int32)


class PackedSequences(grain.IterDataset[TokenRows]):
    """The steps of a run, made of a stream of documents. Rows follow one another in the stream. Documents whose digests
    are in `held_out` are skipped."""

    def __init__(
        self,
        readers: Callable[[], Reader],
        encode: Encode,
        rows: int,
        step_lengths: Int[np.ndarray, " steps"],
        held_out: frozenset[bytes] = frozenset(),
    ):
        super().__init__()
        self.readers, self.encode, self.rows = readers, encode, rows
        self.step_lengths, self.held_out = step_lengths, held_out

    def __iter__(self) -> "PackedIterator":
        return PackedIterator(self)


class PackedIterator(grain.DatasetIterator[TokenRows]):
    """The iterator of `PackedSequences`. Its position is that of the reader before the current document, and the number
    of tokens that were taken from this document."""

    def __init__(self, dataset: PackedSequences):
        super().__init__()
        self._data, self._reader, self._step = dataset, dataset.readers(), 0
        self._before, self._tokens, self._taken = self._reader.get_state(), np.zeros(0, np.int32), 0

    def __next__(self) -> TokenRows:
        if self._step >= len(self._data.step_lengths):
            raise StopIteration
        length = int(self._data.step_lengths[self._step])
        self._step += 1
        return np.stack([self._row(length) for _ in range(self._data.rows)])

    def _row(self, length: int) -> Int[np.ndarray, " t"]:
        parts, missing = [], length
        while missing:
            if self._taken == len(self._tokens):
                self._open_next()
            part = self._tokens[self._taken : self._taken + missing]
            parts.append(part)
            self._taken, missing = self._taken + len(part), missing - len(part)
        return np.concatenate(parts)

    def _open_next(self) -> None:
        # this ends: `hold_out_of_stream` found documents to train on
        while True:
            before, text = self._reader.get_state(), self._reader.next()
            if text and digest(text) not in self._data.held_out:
                self._before, self._tokens, self._taken = before, self._data.encode(text), 0
                return

    def get_state(self) -> dict[str, Any]:
        return {"step": self._step, "before": self._before, "taken": self._taken}

    def set_state(self, state: dict[str, Any]) -> None:
        self._step, self._before = state["step"], state["before"]
        self._reader.set_state(self._before)
        self._tokens, self._taken = np.zeros(0, np.int32), 0
        if state["taken"]:
            self._open_next()
            self._taken = state["taken"]


def hold_out_of_stream(
    reader: Reader, encode: Encode, wanted: Sequence[int], source: str
) -> tuple[list[Int[np.ndarray, " _"]], frozenset[bytes]]:
    """Hold out sequences of the lengths `wanted`, packed from the second, fourth, … document in the reader's order, as
    far as they are needed. At most half of the distinct documents are held out. The result does not depend on the mesh,
    the processes or the step of the run.

    Returns:
        the sequences and the digests of their documents.

    Raises:
        UserError: there is not enough text for one sequence to train on and one to hold out.
    """
    longest, needed = max(wanted), sum(wanted)
    held, others = dict[bytes, Int[np.ndarray, " t"]](), dict[bytes, int]()
    while (text := reader.next()) is not None:
        name = digest(text) if text else b""
        if not text or name in held or name in others:
            continue
        tokens, found = encode(text), sum(map(len, held.values()))
        if len(others) > len(held) and found < needed:
            held[name] = tokens
        else:
            others[name] = len(tokens)
        if found >= needed and sum(others.values()) >= longest:
            break
    stream = np.concatenate([np.zeros(0, np.int32), *held.values()])
    for what, count in (
        ("to train on,", sum(others.values())),
        ("to hold out, every second document,", len(stream)),
    ):
        if count < longest:
            raise UserError(
                f"--data {source}: there are {count} tokens {what} which fill no sequence of --lengths {longest}"
            )
    sequences, first = [], 0
    for length in wanted:
        if first + length <= len(stream):
            sequences.append(stream[first : first + length])
            first += length
    return sequences, frozenset(held)


def open_stream(wanted: Wanted) -> Data:
    """Open the run's data: documents one after another, cut into sequences. Each built-in task is one sequence.

    Raises:
        UserError: there is no such data, or too little text in it.
    """
    if wanted.source == "builtin":
        return open_builtin(wanted)
    readers, encode, rows = wanted.open(wanted.source), StreamEncoder(wanted.tokenizer), wanted.rows
    held = wanted.validation.tolist()
    sequences, held_out = hold_out_of_stream(readers(0, 1), encode, held, wanted.source)
    own = lambda: readers(rows.group, rows.groups)  # noqa: E731
    return Data(
        prefetched(PackedSequences(own, encode, rows.count, wanted.step_lengths, held_out)), sequences
    )
