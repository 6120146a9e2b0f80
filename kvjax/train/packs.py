"""Packs: sequences of whole documents that are separate, each from one of several sources that are mixed by weights.

As ProLong's (arXiv:2410.02660, Sec. 4), which PruLong trains on: a document that is longer than the sequence is cut to
it, and what is left of it dropped; shorter ones follow one another until it is full, the last one cut. So a source of
long documents gives one a sequence. Each sequence begins with a document.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grain
import numpy as np
from jaxtyping import Bool, Int, Shaped

from kvjax.errors import UserError
from kvjax.train.batches import Rows, stack
from kvjax.train.data import FIRST_HELD_OUT, Data, Wanted, apportion, prefetched
from kvjax.train.documents import digest
from kvjax.train.packing import Encode
from kvjax.train.readers import Reader

Labelled = dict[str, Shaped[np.ndarray, "*b t"]]
"""Of a sequence, [t], or of several, [b t]: `tokens` int32; `document` int32, which of its sequence's documents a token
is of, from 0 on; `labelled` bool, whether a token, as those before it predict it, is learned."""
Finish = Callable[[int, Int[np.ndarray, " t"], Int[np.ndarray, " t"]], Labelled]
"""What is trained on, of a pack's index in the run, its tokens and their documents."""


def labelled(
    tokens: Int[np.ndarray, " t"], document: Int[np.ndarray, " t"], learned: Bool[np.ndarray, " t"]
) -> Labelled:
    """A sequence."""
    return {"tokens": tokens.astype(np.int32), "document": document.astype(np.int32), "labelled": learned}


def natural(index: int, tokens: Int[np.ndarray, " t"], document: Int[np.ndarray, " t"]) -> Labelled:
    """A pack as it is: every token is learned but the first of each document, which nothing predicts."""
    return labelled(tokens, document, np.diff(document, prepend=-1) == 0)


def draw_sources(
    lengths: Int[np.ndarray, " n"], weights: Sequence[float], seed: int
) -> Int[np.ndarray, " n"]:
    """The source of each of the sequences of these lengths: of every length as many as `weights` say, so that they are
    shares of the tokens, in an order drawn from `seed`."""
    found, rng = np.zeros(len(lengths), int), np.random.default_rng((seed, 44))
    for length in np.unique(lengths):
        own = np.flatnonzero(lengths == length)
        found[own] = apportion(len(own), weights, rng)
    return found


def joined(documents: Sequence[Int[np.ndarray, " _"]]) -> tuple[Int[np.ndarray, " t"], Int[np.ndarray, " t"]]:
    """A pack's tokens, and the document of each, of those that have any."""
    sizes = [len(tokens) for tokens in documents if len(tokens)]
    return np.concatenate(documents), np.repeat(np.arange(len(sizes)), sizes)


class PackedDocuments(grain.IterDataset[Labelled]):
    """Steps made of packs. Documents whose digests are in `held_out` are passed over.

    Args:
        sources: what gives each source's reader, by its name.
        drawn: the source of every row of the run, those of all processes (`draw_sources`).
    """

    def __init__(
        self,
        sources: Mapping[str, Callable[[], Reader]],
        encode: Encode,
        rows: Rows,
        step_lengths: Int[np.ndarray, " steps"],
        drawn: Int[np.ndarray, " n"],
        finish: Finish,
        held_out: frozenset[bytes] = frozenset(),
    ):
        super().__init__()
        self.sources, self.encode, self.rows, self.finish = sources, encode, rows, finish
        self.step_lengths, self.drawn, self.held_out = step_lengths, drawn, held_out

    def __iter__(self) -> "PackIterator":
        return PackIterator(self)


class PackIterator(grain.DatasetIterator[Labelled]):
    """`PackedDocuments`, running. Its position is the readers': a pack begins with a document."""

    def __init__(self, dataset: PackedDocuments):
        super().__init__()
        self._data, self._step = dataset, 0
        self._readers = [readers() for readers in dataset.sources.values()]

    def __next__(self) -> Labelled:
        if self._step >= len(self._data.step_lengths):
            raise StopIteration
        rows, length = self._data.rows, int(self._data.step_lengths[self._step])
        first = self._step * rows.total
        self._step += 1
        return stack([self._pack(first + row, length) for row in range(rows.start, rows.stop)])

    def _pack(self, index: int, length: int) -> Labelled:
        source, documents, missing = int(self._data.drawn[index]), [], length
        while missing:
            documents.append(self._data.encode(self._next(source))[:missing])
            missing -= len(documents[-1])
        return self._data.finish(index, *joined(documents))

    def _next(self, source: int) -> str:
        passes = 0
        while passes < 2:  # the first may have begun anywhere
            text = self._readers[source].next()
            passes += text is None
            if text and digest(text) not in self._data.held_out:
                return text
        raise UserError(
            f"--data {list(self._data.sources)[source]}: this process's share of the documents has none to train on: "
            "give more documents, or fewer processes"
        )

    def get_state(self) -> dict[str, Any]:
        return {"step": self._step, "positions": [reader.get_state() for reader in self._readers]}

    def set_state(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        for reader, position in zip(self._readers, state["positions"], strict=True):
            reader.set_state(position)


def hold_out_packs(
    reader: Reader, encode: Encode, wanted: Sequence[int], longest: int, source: str
) -> tuple[list[tuple[Int[np.ndarray, " t"], Int[np.ndarray, " t"]]], frozenset[bytes]]:
    """Held-out packs of the lengths `wanted`: of the second, fourth, … document in the reader's order, as far as they
    are needed; of what there is but once, no more than half. Independent of the mesh, the processes, and where a run
    stands.

    Returns:
        the packs, and the digests of their documents.

    Raises:
        UserError: no text at all, or not enough for one pack of `longest` tokens to train on and one to hold out.
    """
    packs, documents, held, others = [], [], set[bytes](), set[bytes]()
    begun = set[bytes]()  # of the pack that is not full yet
    trained = missing = 0
    while (text := reader.next()) is not None:
        name = digest(text) if text else b""
        if not text or name in held or name in others:
            continue
        if len(packs) < len(wanted) and len(others) > len(held):
            missing = missing or wanted[len(packs)]
            documents.append(encode(text)[:missing])
            held.add(name)
            begun.add(name)
            missing -= len(documents[-1])
            if not missing:
                packs.append(joined(documents))
                documents, begun = [], set()
        else:
            others.add(name)
            trained += len(encode(text)) if trained < longest else 0
        if len(packs) == len(wanted) and trained >= longest:
            break
    if trained < longest:
        raise _too_little(source, trained, "to train on,", longest)
    if wanted and not packs:
        found = sum(map(len, documents))
        raise _too_little(source, found, "to hold out, every second document,", wanted[0])
    return packs, frozenset(held - begun)


def _too_little(source: str, tokens: int, what: str, length: int) -> UserError:
    return UserError(
        f"--data {source}: there are {tokens} tokens {what} which fill no sequence of --lengths {length}"
    )


def open_packs(
    wanted: Wanted, sources: Sequence[str], weights: Sequence[float], encode: Encode, finish: Finish
) -> Data:
    """The run's data, of packs of several sources: `weights` are their shares of the tokens. Which source a row comes
    from does not depend on the processes.

    Raises:
        UserError: a source that is not there, or too little text in one.
    """
    rows, longest = wanted.rows, max(wanted.lengths)
    opened = {source: wanted.open(source) for source in sources}
    of = draw_sources(wanted.validation, weights, wanted.seed)
    packs, held_out = [], frozenset[bytes]()
    for index, (source, readers) in enumerate(opened.items()):
        lengths = wanted.validation[of == index].tolist()
        found, held = hold_out_packs(readers(0, 1), encode, lengths, longest, source)
        packs, held_out = packs + found, held_out | held
    drawn = draw_sources(np.repeat(wanted.step_lengths, rows.total), weights, wanted.seed)
    own = {source: partial(readers, rows.group, rows.groups) for source, readers in opened.items()}
    dataset = PackedDocuments(own, encode, rows, wanted.step_lengths, drawn, finish, held_out)
    return Data(prefetched(dataset), [finish(FIRST_HELD_OUT + i, *pack) for i, pack in enumerate(packs)])
