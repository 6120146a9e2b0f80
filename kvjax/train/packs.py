"""Packs: sequences of separate documents. The documents of a sequence come from one of several sources, which are mixed
by weights.

Packs are made as in ProLong (arXiv:2410.02660, Sec. 4), the data of PruLong. Each sequence starts with the beginning of
a document. Documents follow one another until the sequence is full, and the last one is cut; its rest is dropped. A
document that is longer than the sequence fills it alone.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grain
import numpy as np
from jaxtyping import Bool, Int, Shaped

from kvjax.train.batches import Rows, stack
from kvjax.train.data import FIRST_HELD_OUT, Data, DataRequest, apportion, prefetched
from kvjax.train.documents import digest
from kvjax.train.packing import Encode, too_little_text
from kvjax.train.readers import Reader, next_to_train_on

Labelled = dict[str, Shaped[np.ndarray, "*b t"]]
"""A sequence [t] or several [b t]: `tokens` int32; `document` int32, the index of each token's document in its
sequence, from 0 on; `labelled` bool, True if the prediction of the token is learned."""
Finish = Callable[[int, Int[np.ndarray, " t"], Int[np.ndarray, " t"]], Labelled]
"""A function that makes a training sequence from a pack's index in the run, its tokens and their documents."""


def labelled(
    tokens: Int[np.ndarray, " t"], document: Int[np.ndarray, " t"], learned: Bool[np.ndarray, " t"]
) -> Labelled:
    """Return a sequence as a mapping."""
    return {"tokens": tokens.astype(np.int32), "document": document.astype(np.int32), "labelled": learned}


def natural(index: int, tokens: Int[np.ndarray, " t"], document: Int[np.ndarray, " t"]) -> Labelled:
    """Return a pack in which all tokens are learned except the first of each document, which nothing predicts."""
    return labelled(tokens, document, np.diff(document, prepend=-1) == 0)


def draw_sources(
    lengths: Int[np.ndarray, " n"], weights: Sequence[float], seed: int
) -> Int[np.ndarray, " n"]:
    """Return the index of each sequence's source, in an order drawn from `seed`. The sequences of each length are split
    by `weights`, so that the weights are shares of tokens."""
    sources, rng = np.zeros(len(lengths), int), np.random.default_rng((seed, 44))
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        sources[rows] = apportion(len(rows), weights, rng)
    return sources


def joined(documents: Sequence[Int[np.ndarray, " _"]]) -> tuple[Int[np.ndarray, " t"], Int[np.ndarray, " t"]]:
    """Return a pack's tokens and the document of each token. Documents without tokens are not counted."""
    sizes = [len(tokens) for tokens in documents if len(tokens)]
    return np.concatenate(documents), np.repeat(np.arange(len(sizes)), sizes)


class PackedDocuments(grain.IterDataset[Labelled]):
    """The steps of a run, made of packs. Documents with digests in `held_out` are skipped.

    Args:
        sources: the function that opens each source's reader, by the source's name.
        row_sources: the source of every row of the run, in all processes (`draw_sources`).
    """

    def __init__(
        self,
        sources: Mapping[str, Callable[[], Reader]],
        encode: Encode,
        rows: Rows,
        step_lengths: Int[np.ndarray, " steps"],
        row_sources: Int[np.ndarray, " n"],
        finish: Finish,
        held_out: frozenset[bytes] = frozenset(),
    ):
        super().__init__()
        self.sources, self.encode, self.rows, self.finish = sources, encode, rows, finish
        self.step_lengths, self.row_sources, self.held_out = step_lengths, row_sources, held_out

    def __iter__(self) -> "PackIterator":
        return PackIterator(self)


class PackIterator(grain.DatasetIterator[Labelled]):
    """The iterator of `PackedDocuments`. Its position is that of the readers, since a pack begins with a document."""

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
        return stack([self._pack(first + row, length) for row in rows.own.tolist()])

    def _pack(self, index: int, length: int) -> Labelled:
        source, documents, missing = int(self._data.row_sources[index]), [], length
        while missing:
            documents.append(self._data.encode(self._next(source))[:missing])
            missing -= len(documents[-1])
        return self._data.finish(index, *joined(documents))

    def _next(self, source: int) -> str:
        return next_to_train_on(self._readers[source], self._data.held_out, list(self._data.sources)[source])

    def get_state(self) -> dict[str, Any]:
        return {"step": self._step, "positions": [reader.get_state() for reader in self._readers]}

    def set_state(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        for reader, position in zip(self._readers, state["positions"], strict=True):
            reader.set_state(position)


def hold_out_packs(
    reader: Reader, encode: Encode, lengths: Sequence[int], longest: int, source: str
) -> tuple[list[tuple[Int[np.ndarray, " t"], Int[np.ndarray, " t"]]], frozenset[bytes]]:
    """Hold out packs of the given lengths, made of the second, fourth, … document in the reader's order. Only as
    many documents are held out as are needed, and at most half of the distinct ones. The result does not depend on the
    mesh, the processes or the step of the run.

    Returns:
        the packs, and the digests of their documents.

    Raises:
        UserError: there is not enough text for a pack of `longest` tokens to train on and for one to hold out.
    """
    packs, documents, held_out, trained_on = [], [], set[bytes](), set[bytes]()
    unfinished = set[bytes]()  # documents of the pack that is not full yet
    trained_tokens = missing = 0
    while (text := reader.next()) is not None:
        key = digest(text) if text else b""
        if not text or key in held_out or key in trained_on:
            continue
        if len(packs) < len(lengths) and len(trained_on) > len(held_out):
            missing = missing or lengths[len(packs)]
            documents.append(encode(text)[:missing])
            held_out.add(key)
            unfinished.add(key)
            missing -= len(documents[-1])
            if not missing:
                packs.append(joined(documents))
                documents, unfinished = [], set()
        else:
            trained_on.add(key)
            trained_tokens += len(encode(text)) if trained_tokens < longest else 0
        if len(packs) == len(lengths) and trained_tokens >= longest:
            break
    if trained_tokens < longest:
        raise too_little_text(source, trained_tokens, "to train on,", longest)
    if lengths and not packs:
        tokens = sum(map(len, documents))
        raise too_little_text(source, tokens, "to hold out, every second document,", lengths[0])
    return packs, frozenset(held_out - unfinished)


def open_packs(
    request: DataRequest, sources: Sequence[str], weights: Sequence[float], encode: Encode, finish: Finish
) -> Data:
    """Open the run's data: packs from several sources, which have shares of the tokens by `weights`. The source of a
    row does not depend on the number of processes.

    Raises:
        UserError: a source does not exist, or has too little text.
    """
    rows, longest = request.rows, max(request.lengths)
    readers_by_source = {source: request.open(source) for source in sources}
    validation_sources = draw_sources(request.validation, weights, request.seed)
    packs, held_out = [], frozenset[bytes]()
    for index, (source, readers) in enumerate(readers_by_source.items()):
        lengths = request.validation[validation_sources == index].tolist()
        source_packs, source_digests = hold_out_packs(readers(0, 1), encode, lengths, longest, source)
        packs, held_out = packs + source_packs, held_out | source_digests
    row_sources = draw_sources(np.repeat(request.step_lengths, rows.total), weights, request.seed)
    own_readers = {
        source: partial(readers, rows.group, rows.groups) for source, readers in readers_by_source.items()
    }
    dataset = PackedDocuments(own_readers, encode, rows, request.step_lengths, row_sources, finish, held_out)
    return Data(prefetched(dataset), [finish(FIRST_HELD_OUT + i, *pack) for i, pack in enumerate(packs)])
