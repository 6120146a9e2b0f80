"""Training sequences from the built-in tasks, text files or a streamed hub dataset. All rows of a step have the same
length.

The sequences depend on the seed only. The position of an iterator is a small JSON value that goes into checkpoints.
Documents are cut as in WG-KV's recipe (App. C): the instruction and the document are one user turn, which is truncated
on the right to the largest of the lengths that it fills. Some documents are held out for validation.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import grain
import numpy as np
from jaxtyping import Int

from kvjax.errors import UserError
from kvjax.models.chat import encode
from kvjax.train.batches import HeldRows, Rows, TokenRows, stack
from kvjax.train.conversation import Conversation, chat_check
from kvjax.train.documents import digest
from kvjax.train.readers import Reader, open_source

if TYPE_CHECKING:
    from kvjax.models.decoder import Decoder

SHORTEST_BUILTIN = 64
"""The minimum number of tokens of a sequence of built-in tasks, so that its questions fit."""
FIRST_HELD_OUT = 2**31
"""The index of the first held-out sequence of built-in tasks."""
MAX_TURN_TOKENS = 256
"""The maximum number of tokens that the instruction and the chat template add to a document."""


def draw_step_lengths(
    steps: int, lengths: Sequence[int], shares: Sequence[float], seed: int
) -> Int[np.ndarray, " steps"]:
    """Return the length of every step. Lengths occur in proportion to `shares` (`apportion`), in an order drawn from
    `seed`."""
    return np.asarray(lengths)[apportion(steps, shares, np.random.default_rng((seed, 42)))]


def apportion(count: int, shares: Sequence[float], rng: np.random.Generator) -> Int[np.ndarray, " count"]:
    """Return the index of a share for each of `count` items. Indices occur in proportion to the shares (largest
    remainders) and in random order."""
    exact = np.asarray(shares, np.float64) / np.sum(shares) * count
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: count - counts.sum()]] += 1
    return rng.permutation(np.repeat(np.arange(len(counts)), counts))


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A function that encodes a document. If the tokenizer has a chat template, a text becomes one user turn that
    begins with `instruction`. A chat stays as it is."""

    tokenizer: Any
    """The model's tokenizer."""
    instruction: str
    """The text before the document in the user's turn."""
    longest: int
    """The maximum number of tokens that are needed."""

    def __call__(self, text: str) -> Int[np.ndarray, " t"]:
        if isinstance(text, Conversation):
            return text.tokens(self.tokenizer)
        # tokens have fewer than 64 characters on average, so the cut leaves at least `longest` tokens
        text = text[: 64 * self.longest]
        templated = getattr(self.tokenizer, "chat_template", None)
        ids = encode(self.tokenizer, f"{self.instruction}\n\n{text}" if templated else text)
        return np.asarray(ids, np.int32)


def plain_tokens(tokenizer: Any, text: str) -> Int[np.ndarray, " t"]:
    """Return a text's tokens without the tokenizer's special tokens."""
    return np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32)


@dataclasses.dataclass(frozen=True)
class Bins:
    """The lengths that documents are cut to. Each document belongs to the largest length that it fills."""

    lengths: tuple[int, ...]
    """The lengths, ascending."""
    encode: Callable[[str], Int[np.ndarray, " t"]]
    """The function that returns a document's tokens."""

    def tokens(self, text: str, shortest: int = 0) -> Int[np.ndarray, " t"]:
        """Return the document's tokens. A document that is certainly shorter than `shortest`, or than every length, is
        not tokenized; zeros are returned for it."""
        size, shortest = len(text.encode()), max(shortest, self.lengths[0])
        if size < shortest - MAX_TURN_TOKENS:  # a token has at least one byte
            return np.zeros(min(size, shortest - 1), np.int32)
        return self.encode(text)

    def of(self, tokens: int) -> int | None:
        """Return the length to which a document of `tokens` tokens is cut, None if it is too short for every length."""
        return max((length for length in self.lengths if length <= tokens), default=None)

    def range(self, length: int) -> str:
        """Return the document sizes that belong to a length, in words."""
        longer_lengths = [longer for longer in self.lengths if longer > length]
        return f"{length} to {longer_lengths[0] - 1} tokens" if longer_lengths else f"{length} or more tokens"


MIN_COUNTED = 64
"""The minimum number of documents that are read to estimate how much text is left out."""


class DocumentCount:
    """Counts of documents (read, too short, cut) and of their tokens (all, kept)."""

    def __init__(self):
        self.read = self.short = self.cut = self.tokens = self.kept = 0

    def add(self, tokens: int, length: int | None) -> None:
        """Count a document of `tokens` tokens that is cut to `length`, None if it is too short for every length."""
        self.read += 1
        self.short += length is None
        if length is not None:
            self.cut += tokens > length
            self.tokens, self.kept = self.tokens + tokens, self.kept + length

    def remark(self, shortest: int, *, all_read: bool) -> str:
        """Return a line that says how much is left out, empty if nothing is."""
        parts = []
        if self.short:
            parts.append(f"{self.short} shorter than {shortest} tokens and not trained on")
        if self.cut:
            share = 1 - self.kept / self.tokens
            parts.append(f"{self.cut} cut, which leaves out {100 * share:.2g}% of the tokens")
        scope = f"of all {self.read} documents" if all_read else f"of the first {self.read} documents"
        return f"{scope}: {'; '.join(parts)}" if parts else ""


def hold_out(
    reader: Reader, bins: Bins, held_out_lengths: Sequence[int], trained: Sequence[int], source: str
) -> tuple[list[Int[np.ndarray, " _"]], frozenset[bytes], str]:
    """Hold out the second, fourth, … document of each length in the reader's order. There is one document for each of
    `held_out_lengths`, or fewer if the documents run out. The result does not depend on the mesh, the processes or the
    step of the run.

    Returns:
        the sequences, cut to their lengths, the digests of their documents, and a remark on how much text is left out
        of the documents that were read (all, or at least `MIN_COUNTED`).

    Raises:
        UserError: there is no text at all, no document for one of the `trained` lengths, or none to hold out.
    """
    remaining, missing = Counter(held_out_lengths), set(trained)
    sequences: dict[int, list[Int[np.ndarray, " _"]]] = {length: [] for length in remaining}
    held_out, trained_on, longest = set[bytes](), set[bytes](), 0
    seen: Counter[int] = Counter()
    count, text = DocumentCount(), ""
    while (missing or +remaining or count.read < MIN_COUNTED) and (text := reader.next()) is not None:
        if not text:
            continue
        tokens = bins.tokens(text)
        longest, length, key = max(longest, len(tokens)), bins.of(len(tokens)), digest(text)
        count.add(len(tokens), length)
        if length is None or key in held_out or key in trained_on:
            continue
        seen[length] += 1
        missing.discard(length)
        if seen[length] % 2 == 0 and remaining[length]:
            remaining[length] -= 1
            sequences[length].append(tokens[:length])
            held_out.add(key)
        else:
            trained_on.add(key)
    if missing:
        raise _no_document(source, bins, min(missing), longest)
    if held_out_lengths and not held_out:
        raise UserError(
            f"--data {source}: there is only one document for each of --lengths {list(sequences)}: validation needs "
            "another"
        )
    remark = count.remark(bins.lengths[0], all_read=text is None)
    return (
        [tokens for length in sorted(sequences) for tokens in sequences[length]],
        frozenset(held_out),
        remark,
    )


def _no_document(source: str, bins: Bins, length: int, longest: int) -> UserError:
    if not longest:
        return UserError(f"--data {source}: there is no text in it")
    return UserError(
        f"--data {source}: no document has {bins.range(length)}; the longest of the others has about {longest}, and "
        "each goes to the largest length that it fills: change --lengths"
    )


class DocumentSequences(grain.IterDataset[TokenRows]):
    """The steps of a run, with one document in each row. Each length has its own reader, and a row is the reader's next
    document of that length. Documents with digests in `held_out` are skipped. If this process's share of the documents
    has none of a length, all documents are read for it.
    """

    def __init__(
        self,
        readers: Callable[[int, int], Reader],
        bins: Bins,
        rows: Rows,
        step_lengths: Int[np.ndarray, " steps"],
        source: str,
        held_out: frozenset[bytes] = frozenset(),
    ):
        super().__init__()
        self.readers, self.bins, self.rows, self.step_lengths = readers, bins, rows, step_lengths
        self.source, self.held_out = source, held_out
        self.lengths = sorted({int(length) for length in step_lengths})

    def __iter__(self) -> "DocumentIterator":
        return DocumentIterator(self)


class DocumentIterator(grain.DatasetIterator[TokenRows]):
    """The iterator of `DocumentSequences`."""

    def __init__(self, dataset: DocumentSequences):
        super().__init__()
        self._data, self._step = dataset, 0
        self._unshared = set[int]()  # the lengths for which all documents are read
        self._readers = {length: self._open(length) for length in dataset.lengths}

    def _open(self, length: int) -> Reader:
        rows = self._data.rows
        return self._data.readers(*((0, 1) if length in self._unshared else (rows.group, rows.groups)))

    def __next__(self) -> TokenRows:
        if self._step >= len(self._data.step_lengths):
            raise StopIteration
        length = int(self._data.step_lengths[self._step])
        self._step += 1
        return np.stack([self._next_row(length) for _ in range(self._data.rows.count)])

    def _next_row(self, length: int) -> Int[np.ndarray, " t"]:
        bins, longest, passes = self._data.bins, 0, 0
        while passes < 2:  # the first pass may have started in the middle
            text = self._readers[length].next()
            if text is None:
                passes += 1
                if passes == 2 and length not in self._unshared:
                    self._unshared.add(length)
                    self._readers[length], passes = self._open(length), 0
            elif text:
                tokens = bins.tokens(text, length)
                longest = max(longest, len(tokens))
                if bins.of(len(tokens)) == length and digest(text) not in self._data.held_out:
                    return tokens[:length]
        raise _no_document(self._data.source, bins, length, longest)

    def get_state(self) -> dict[str, Any]:
        positions = {str(length): reader.get_state() for length, reader in self._readers.items()}
        return {"step": self._step, "positions": positions, "unshared": sorted(self._unshared)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._step, self._unshared = state["step"], set(state.get("unshared", ()))
        for length in self._readers:
            self._readers[length] = self._open(length)
            self._readers[length].set_state(state["positions"][str(length)])


class Data(NamedTuple):
    """A run's data. A sequence is either an array of tokens, int32 [t], or a mapping with the tokens under `tokens` and
    other arrays [t …]."""

    sequences: grain.DatasetIterator
    """The batches of this process's rows, [b …], one for each step."""
    held_out: list[Any]
    """The held-out sequences, the same in every process."""
    remark: str = ""
    """A line that says how much text is left out, empty if nothing is."""
    held_rows: HeldRows | None = None
    """The held-out rows if an update's rows are not sequences of tokens (`Recipe.row`). In this case `sequences` yields
    such rows, too, and `held_out` is only for the report."""

    @property
    def held_out_tokens(self) -> list[Int[np.ndarray, " _"]]:
        """The tokens of the held-out sequences."""
        return [x["tokens"] if isinstance(x, Mapping) else x for x in self.held_out]


Open = Callable[["Decoder", Rows, Path, Callable[[str], None]], Data]
"""A function that opens data which a recipe makes itself (`Recipe.collect`). Its arguments are the model, this
process's rows, the run's folder and a function that prints a line."""


@dataclasses.dataclass(frozen=True)
class DataRequest:
    """The data that a run asks for."""

    source: str
    """`builtin`, a .txt/.jsonl/.parquet file or a folder of them, or a hub dataset (streamed)."""
    rows: Rows
    """The rows of this process."""
    step_lengths: Int[np.ndarray, " steps"]
    """The length of every step."""
    lengths: Sequence[int]
    """All lengths, ascending."""
    validation: Int[np.ndarray, " s"]
    """The length of every held-out sequence."""
    seed: int
    """The seed of the order of documents and of generated tasks."""
    tokenizer: Any = None
    """The model's tokenizer; None for the built-in tasks."""
    instruction: str = ""
    """The text before a document in the user's turn."""

    def open(self, source: str) -> Callable[[int, int], Reader]:
        """Call `open_source`. .txt files are cut into pieces that are long enough to fill the longest sequence."""
        return open_source(source, self.seed, 16 * max(self.lengths), chat_check(self.tokenizer))


def open_data(request: DataRequest) -> Data:
    """Open the run's data, in which each sequence is one document cut to its length.

    Raises:
        UserError: there is no such data, no text in it, or no document long enough for one of the lengths.
    """
    if request.source == "builtin":
        return open_builtin(request)
    longest, rows = max(request.lengths), request.rows
    bins = Bins(tuple(request.lengths), Encoder(request.tokenizer, request.instruction, longest))
    readers, source = request.open(request.source), request.source
    validation, trained = request.validation.tolist(), sorted(set(request.step_lengths.tolist()))
    sequences, held_out, remark = hold_out(readers(0, 1), bins, validation, trained, source)
    dataset = DocumentSequences(readers, bins, rows, request.step_lengths, source, held_out)
    return Data(prefetched(dataset), sequences, remark)


def prefetched(dataset: grain.IterDataset) -> grain.DatasetIterator:
    """Return an iterator over a dataset's steps, which a thread reads ahead while the devices compute."""
    return iter(grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=2))


MakeSequence = Callable[[int, int, int], Any]
"""A function that makes a sequence from a seed, an index and a length."""


def tasks_and_text(split: Literal["train", "evaluate"]) -> MakeSequence:
    """Return the function that makes token sequences of the built-in tasks and text (`kvjax.tasks.mixture`)."""
    from kvjax.tasks import Mixture, builtin_text, builtin_vocabulary

    mixture = Mixture(builtin_vocabulary(), builtin_text(split))
    return lambda seed, index, length: mixture(seed, index, length)[0]


def open_builtin(
    request: DataRequest, make: Callable[[Literal["train", "evaluate"]], MakeSequence] = tasks_and_text
) -> Data:
    """Open sequences in the built-in model's tokens, made of the packaged training text. The held-out sequences are
    made of the evaluation text. Sequence i of the run is made from index i, whatever the number of processes.

    Raises:
        UserError: a length is too short for the built-in tasks.
    """
    rows, step_lengths, seed = request.rows, request.step_lengths, request.seed
    if (shortest := step_lengths.min()) < SHORTEST_BUILTIN:
        raise UserError(
            f"--lengths {shortest}: the built-in tasks need sequences of at least {SHORTEST_BUILTIN} tokens"
        )
    make_trained, make_held_out = make("train"), make("evaluate")

    def step(index: int) -> Any:
        first, length = index * rows.total, int(step_lengths[index])
        return stack([make_trained(seed, first + row, length) for row in rows.own.tolist()])

    steps = grain.MapDataset.range(len(step_lengths)).map(step)
    sequences = iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))
    lengths = request.validation.tolist()
    return Data(
        sequences, [make_held_out(seed, FIRST_HELD_OUT + i, length) for i, length in enumerate(lengths)]
    )
