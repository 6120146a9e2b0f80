"""Training sequences: every step's equal-length rows, from the built-in tasks, text files or a streamed hub data set.

Deterministic from the seed, and an iterator's position is a small JSON value that goes into checkpoints. Documents are
cut as in WG-KV's recipe (App. C): one user turn, instruction + document, truncated on the right to exactly the step's
length, which is the largest that it fills. Some are held out for validation.
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
"""Tokens that a sequence of built-in tasks needs for its questions."""
FIRST_HELD_OUT = 2**31
"""Index of the first held-out sequence of built-in tasks."""
TURN = 256
"""Tokens that the instruction and a chat template's own may take."""


def draw_step_lengths(
    steps: int, lengths: Sequence[int], shares: Sequence[float], seed: int
) -> Int[np.ndarray, " steps"]:
    """The length of every step: as many of each as `shares` say (`apportion`), in an order drawn from `seed`."""
    return np.asarray(lengths)[apportion(steps, shares, np.random.default_rng((seed, 42)))]


def apportion(count: int, shares: Sequence[float], rng: np.random.Generator) -> Int[np.ndarray, " count"]:
    """Which share each of `count` things belongs to: as many to each as they say (largest remainders), in a drawn
    order."""
    exact = np.asarray(shares, np.float64) / np.sum(shares) * count
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: count - counts.sum()]] += 1
    return rng.permutation(np.repeat(np.arange(len(counts)), counts))


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A document as tokens: one user turn, `instruction` before it, where the tokenizer has a chat template; a chat as
    it is."""

    tokenizer: Any
    """The model's."""
    instruction: str
    """What the turn begins with."""
    longest: int
    """Tokens that are needed at most."""

    def __call__(self, text: str) -> Int[np.ndarray, " t"]:
        if isinstance(text, Conversation):
            return np.asarray(text.tokens(self.tokenizer), np.int32)
        # no tokenizer makes so few tokens of so many characters that the cut would show
        text = text[: 64 * self.longest]
        templated = getattr(self.tokenizer, "chat_template", None)
        ids = encode(self.tokenizer, f"{self.instruction}\n\n{text}" if templated else text)
        return np.asarray(ids, np.int32)


@dataclasses.dataclass(frozen=True)
class Bins:
    """The lengths that documents are cut to, rising. Each document belongs to the largest length that it fills."""

    lengths: tuple[int, ...]
    """Rising."""
    encode: Callable[[str], Int[np.ndarray, " t"]]
    """A document's tokens."""

    def tokens(self, text: str, shortest: int = 0) -> Int[np.ndarray, " t"]:
        """The document's tokens. One that is surely shorter than `shortest` and than every length needs no tokenizer
        and comes as zeros."""
        size, shortest = len(text.encode()), max(shortest, self.lengths[0])
        if size < shortest - TURN:  # a token has at least one byte
            return np.zeros(min(size, shortest - 1), np.int32)
        return self.encode(text)

    def of(self, tokens: int) -> int | None:
        """The length that a document of so many tokens is cut to; None: it is too short for all of them."""
        return max((length for length in self.lengths if length <= tokens), default=None)

    def range(self, length: int) -> str:
        """The sizes that belong to a length, in words."""
        above = [longer for longer in self.lengths if longer > length]
        return f"{length} to {above[0] - 1} tokens" if above else f"{length} or more tokens"


COUNTED = 64
"""Documents that are read at least, to say how much of their text is left out."""


class Count:
    """What becomes of documents: how many were read, are too short, are cut, and how many tokens that leaves."""

    def __init__(self):
        self.read = self.short = self.cut = self.tokens = self.kept = 0

    def add(self, tokens: int, length: int | None) -> None:
        """A document of so many tokens that is cut to `length`; None: it is too short for every length."""
        self.read += 1
        self.short += length is None
        if length is not None:
            self.cut += tokens > length
            self.tokens, self.kept = self.tokens + tokens, self.kept + length

    def remark(self, shortest: int, *, all_read: bool) -> str:
        """What is left out, in a line; nothing, if nothing is."""
        parts = []
        if self.short:
            parts.append(f"{self.short} shorter than {shortest} tokens and not trained on")
        if self.cut:
            share = 1 - self.kept / self.tokens
            parts.append(f"{self.cut} cut, which leaves out {100 * share:.2g}% of the tokens")
        of = f"of all {self.read} documents" if all_read else f"of the first {self.read} documents"
        return f"{of}: {'; '.join(parts)}" if parts else ""


def hold_out(
    reader: Reader, bins: Bins, wanted: Sequence[int], trained: Sequence[int], source: str
) -> tuple[list[Int[np.ndarray, " _"]], frozenset[bytes], str]:
    """Held-out sequences: of each length's documents the second, fourth, … in the reader's order, as many as `wanted`
    lists it, or as there are. Independent of the mesh, the processes, and where a run stands.

    Returns:
        the sequences, cut to their lengths, the digests of their documents, and what the lengths leave out of the
        documents that were read (all, or `COUNTED` or more), in words.

    Raises:
        UserError: no text at all, no document for one of the lengths that are `trained` on, or none to hold out.
    """
    left, missing = Counter(wanted), set(trained)
    found: dict[int, list[Int[np.ndarray, " _"]]] = {length: [] for length in left}
    held, others, longest = set[bytes](), set[bytes](), 0
    passed: Counter[int] = Counter()
    count, text = Count(), ""
    while (missing or +left or count.read < COUNTED) and (text := reader.next()) is not None:
        if not text:
            continue
        tokens = bins.tokens(text)
        longest, length, name = max(longest, len(tokens)), bins.of(len(tokens)), digest(text)
        count.add(len(tokens), length)
        if length is None or name in held or name in others:
            continue
        passed[length] += 1
        missing.discard(length)
        if passed[length] % 2 == 0 and left[length]:
            left[length] -= 1
            found[length].append(tokens[:length])
            held.add(name)
        else:
            others.add(name)
    if missing:
        raise _no_document(source, bins, min(missing), longest)
    if wanted and not held:
        raise UserError(
            f"--data {source}: there is but one document for each of --lengths {list(found)}: validation needs another"
        )
    remark = count.remark(bins.lengths[0], all_read=text is None)
    return [tokens for length in sorted(found) for tokens in found[length]], frozenset(held), remark


def _no_document(source: str, bins: Bins, length: int, longest: int) -> UserError:
    if not longest:
        return UserError(f"--data {source}: there is no text in it")
    return UserError(
        f"--data {source}: no document has {bins.range(length)}; the longest of the others has about {longest}, and "
        "each goes to the largest length that it fills: change --lengths"
    )


class DocumentSequences(grain.IterDataset[TokenRows]):
    """Steps made of documents: row by row the next document of the step's length; each length reads on its own.

    Documents whose digests are in `held_out` are passed over.
    """

    def __init__(
        self,
        readers: Callable[[], Reader],
        bins: Bins,
        rows: int,
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
    """`DocumentSequences`, running."""

    def __init__(self, dataset: DocumentSequences):
        super().__init__()
        self._data = dataset
        self._readers = {length: dataset.readers() for length in dataset.lengths}
        self._step = 0

    def __next__(self) -> TokenRows:
        if self._step >= len(self._data.step_lengths):
            raise StopIteration
        length = int(self._data.step_lengths[self._step])
        self._step += 1
        return np.stack([self._one(length) for _ in range(self._data.rows)])

    def _one(self, length: int) -> Int[np.ndarray, " t"]:
        bins, reader, longest, passes = self._data.bins, self._readers[length], 0, 0
        while passes < 2:  # the first may have begun anywhere
            text = reader.next()
            if text is None:
                passes += 1
            elif text:
                tokens = bins.tokens(text, length)
                longest = max(longest, len(tokens))
                if bins.of(len(tokens)) == length and digest(text) not in self._data.held_out:
                    return tokens[:length]
        raise _no_document(self._data.source, bins, length, longest)

    def get_state(self) -> dict[str, Any]:
        positions = {str(length): reader.get_state() for length, reader in self._readers.items()}
        return {"step": self._step, "positions": positions}

    def set_state(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        for length, reader in self._readers.items():
            reader.set_state(state["positions"][str(length)])


class Data(NamedTuple):
    """A run's data. A sequence is its tokens, int32 [t], or a mapping of these, `tokens`, and of what belongs to each
    of them, [t …]."""

    sequences: grain.DatasetIterator
    """The steps, each sequences of this process's rows, [b …], of the length of that step."""
    held_out: list[Any]
    """The held-out sequences, the same in every process."""
    remark: str = ""
    """What the lengths leave out of the documents, if anything."""
    held_rows: HeldRows | None = None
    """What is held out where an update's rows are no sequences of tokens (`Recipe.row`); `sequences` gives those of the
    updates then, and `held_out` is for the report."""

    @property
    def held_out_tokens(self) -> list[Int[np.ndarray, " _"]]:
        """Of the held-out sequences the tokens."""
        return [x["tokens"] if isinstance(x, Mapping) else x for x in self.held_out]


Open = Callable[["Decoder", Rows, Path, Callable[[str], None]], Data]
"""Opens the data of a recipe that has its own (`Recipe.collect`): from the model, this process's rows and the run's
folder, saying what it does."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a run wants of its data."""

    source: str
    """`builtin`, a .txt/.jsonl/.parquet file or a folder of them, or a hub data set (streamed)."""
    rows: Rows
    """Of this process."""
    step_lengths: Int[np.ndarray, " steps"]
    """The length of every step."""
    lengths: Sequence[int]
    """All that there are, rising."""
    validation: Int[np.ndarray, " s"]
    """The length of every held-out sequence."""
    seed: int
    """Of orders, and of what is made."""
    tokenizer: Any = None
    """The model's; None: of the built-in tasks."""
    instruction: str = ""
    """What stands before a document in a user's turn."""

    def open(self, source: str) -> Callable[[int, int], Reader]:
        """`open_source` with .txt files in pieces that fill the longest sequence."""
        return open_source(source, self.seed, 16 * max(self.lengths), chat_check(self.tokenizer))


def open_data(wanted: Wanted) -> Data:
    """The run's data, a document cut to each sequence.

    Raises:
        UserError: nothing there, no text in it, or no document long enough for one of the lengths.
    """
    if wanted.source == "builtin":
        return open_builtin(wanted)
    longest, rows = max(wanted.lengths), wanted.rows
    bins = Bins(tuple(wanted.lengths), Encoder(wanted.tokenizer, wanted.instruction, longest))
    readers, source = wanted.open(wanted.source), wanted.source
    held, trained = wanted.validation.tolist(), sorted(set(wanted.step_lengths.tolist()))
    sequences, held_out, remark = hold_out(readers(0, 1), bins, held, trained, source)
    own = lambda: readers(rows.group, rows.groups)  # noqa: E731
    dataset = DocumentSequences(own, bins, rows.count, wanted.step_lengths, source, held_out)
    return Data(prefetched(dataset), sequences, remark)


def prefetched(dataset: grain.IterDataset) -> grain.DatasetIterator:
    """The steps of a data set, read by a thread while the devices work."""
    return iter(grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=2))


Made = Callable[[int, int, int], Any]
"""The sequence of a seed, an index and a length."""


def tasks_and_text(split: Literal["train", "evaluate"]) -> Made:
    """The built-in tasks and text (`kvjax.tasks.mixture`) as tokens."""
    from kvjax.tasks import Mixture, builtin_text, builtin_vocabulary

    mixture = Mixture(builtin_vocabulary(), builtin_text(split))
    return lambda seed, index, length: mixture(seed, index, length)[0]


def open_builtin(
    wanted: Wanted, make: Callable[[Literal["train", "evaluate"]], Made] = tasks_and_text
) -> Data:
    """Sequences in the built-in model's tokens, made of the packaged text for training, and of that for evaluation to
    hold out. Sequence i of the run is that of index i, whatever the processes.

    Raises:
        UserError: a length that is too short for the built-in tasks.
    """
    rows, step_lengths, seed = wanted.rows, wanted.step_lengths, wanted.seed
    if (least := step_lengths.min()) < SHORTEST_BUILTIN:
        raise UserError(
            f"--lengths {least}: the built-in tasks need sequences of at least {SHORTEST_BUILTIN} tokens"
        )
    trained, held = make("train"), make("evaluate")

    def step(index: int) -> Any:
        first, length = index * rows.total, int(step_lengths[index])
        return stack([trained(seed, first + row, length) for row in range(rows.start, rows.stop)])

    steps = grain.MapDataset.range(len(step_lengths)).map(step)
    sequences = iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))
    lengths = wanted.validation.tolist()
    return Data(sequences, [held(seed, FIRST_HELD_OUT + i, length) for i, length in enumerate(lengths)])
