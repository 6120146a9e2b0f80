"""Packed sequences: a stream of documents, cut wherever a sequence is full. Attention crosses document borders."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Int

from kvjax.errors import UserError
from kvjax.train.batches import TokenRows
from kvjax.train.conversation import Conversation
from kvjax.train.data import Data, DataRequest, open_builtin, prefetched
from kvjax.train.documents import digest
from kvjax.train.readers import Reader, next_to_train_on

Encode = Callable[[str], Int[np.ndarray, " t"]]
"""A function that returns a document's tokens, with an end token."""


@dataclasses.dataclass(frozen=True)
class StreamEncoder:
    """A function that encodes a document of a stream. A text gets the tokenizer's special tokens and an end-of-sequence
    token. A chat is written by the chat template."""

    tokenizer: Any
    """The model's tokenizer."""

    def __call__(self, text: str) -> Int[np.ndarray, " t"]:
        if isinstance(text, Conversation):
            return text.tokens(self.tokenizer)
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        return np.asarray(ids if end is None or ids[-1:] == [end] else [*ids, end], np.int32)


class PackedSequences(grain.IterDataset[TokenRows]):
    """The steps of a run, whose rows follow one another in a stream of documents. Documents with digests in `held_out`
    are skipped."""

    def __init__(
        self,
        readers: Callable[[], Reader],
        encode: Encode,
        rows: int,
        step_lengths: Int[np.ndarray, " steps"],
        source: str,
        held_out: frozenset[bytes] = frozenset(),
    ):
        super().__init__()
        self.readers, self.encode, self.rows = readers, encode, rows
        self.step_lengths, self.source, self.held_out = step_lengths, source, held_out

    def __iter__(self) -> "PackedIterator":
        return PackedIterator(self)


class PackedIterator(grain.DatasetIterator[TokenRows]):
    """The iterator of `PackedSequences`. Its position is the reader's position before the current document, and the
    number of tokens that were taken from this document."""

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
        self._before = self._reader.get_state()
        text = next_to_train_on(self._reader, self._data.held_out, self._data.source)
        self._tokens, self._taken = self._data.encode(text), 0

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
    reader: Reader, encode: Encode, lengths: Sequence[int], source: str
) -> tuple[list[Int[np.ndarray, " _"]], frozenset[bytes]]:
    """Hold out sequences of the given lengths, packed from the second, fourth, … document in the reader's order.
    Only as many documents are held out as are needed, and at most half of the distinct ones. The result does not depend
    on the mesh, the processes or the step of the run.

    Returns:
        the sequences and the digests of their documents.

    Raises:
        UserError: there is not enough text for one sequence to train on and one to hold out.
    """
    longest, needed = max(lengths), sum(lengths)
    held_out, trained_on = dict[bytes, Int[np.ndarray, " t"]](), dict[bytes, int]()
    while (text := reader.next()) is not None:
        key = digest(text) if text else b""
        if not text or key in held_out or key in trained_on:
            continue
        tokens, held_out_tokens = encode(text), sum(map(len, held_out.values()))
        if len(trained_on) > len(held_out) and held_out_tokens < needed:
            held_out[key] = tokens
        else:
            trained_on[key] = len(tokens)
        if held_out_tokens >= needed and sum(trained_on.values()) >= longest:
            break
    stream = np.concatenate([np.zeros(0, np.int32), *held_out.values()])
    for purpose, count in (
        ("to train on,", sum(trained_on.values())),
        ("to hold out, every second document,", len(stream)),
    ):
        if count < longest:
            raise too_little_text(source, count, purpose, longest)
    sequences, first = [], 0
    for length in lengths:
        if first + length <= len(stream):
            sequences.append(stream[first : first + length])
            first += length
    return sequences, frozenset(held_out)


def too_little_text(source: str, tokens: int, purpose: str, length: int) -> UserError:
    """Return the error for a source whose text does not fill a sequence. `purpose`: what the text is for."""
    return UserError(
        f"--data {source}: there are {tokens} tokens {purpose} which fill no sequence of --lengths {length}"
    )


def open_stream(request: DataRequest) -> Data:
    """Open the run's data: a stream of documents, cut into sequences. Each built-in task is one sequence.

    Raises:
        UserError: there is no such data, or too little text in it.
    """
    if request.source == "builtin":
        return open_builtin(request)
    readers, encode, rows = request.open(request.source), StreamEncoder(request.tokenizer), request.rows
    validation = request.validation.tolist()
    sequences, held_out = hold_out_of_stream(readers(0, 1), encode, validation, request.source)
    own_readers = functools.partial(readers, rows.group, rows.groups)
    dataset = PackedSequences(own_readers, encode, rows.count, request.step_lengths, request.source, held_out)
    return Data(prefetched(dataset), sequences)
