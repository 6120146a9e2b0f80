"""Whole contexts to take features of: FineWeb-Edu's documents as Fast KVzip picks them (`load_fineweb` of its code),
any local text likewise, and the built-in model's own tasks.

Documents of some length in the order in which they come: so many of them alone, and some of the same ones again, joined
by empty lines until they have a longer length.
"""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.chat_template import opening
from kvjax.errors import UserError
from kvjax.models.chat import encode
from kvjax.train.data import FIRST_HELD_OUT, SHORTEST_BUILTIN
from kvjax.train.documents import Documents, digest
from kvjax.train.readers import Records, local_path, open_hub

TokenRow = Int[np.ndarray, " _"]
JOINED_BY = "\n\n"
"""Stands before each document of a joined context."""
BYTES = 4
"""Of a token, about: what a long .txt file is cut into makes documents between the shortest and the longest."""


@dataclasses.dataclass(frozen=True)
class Context:
    """What is read, and what would be asked of it."""

    prefix: TokenRow
    """Tokens before it that are always kept, and that nothing is trained on."""
    tokens: TokenRow
    """Its own."""
    questions: tuple[TokenRow, ...] = ()
    """Each question with its answer, as it stands behind the context."""

    @property
    def row(self) -> TokenRow:
        """What the model reads."""
        return np.concatenate([self.prefix, self.tokens]).astype(np.int32)

    @property
    def digest(self) -> str:
        """What it is known by."""
        whole = [self.prefix, self.tokens, *self.questions]
        text = b"|".join(np.ascontiguousarray(x, np.int32).tobytes() for x in whole)
        return hashlib.blake2b(text, digest_size=8).hexdigest()


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which documents become contexts."""

    shortest: int
    """Tokens of a document, at least."""
    longest: int
    """Tokens of a document, below this."""
    joined: int
    """Tokens from which on a context of joined documents is long enough."""
    single: int
    """Documents that are contexts alone."""
    joins: int
    """Contexts that are documents joined."""


Document = tuple[str, int]
"""A text and its tokens, by the data set's own count where it has one."""


def chosen(documents: Callable[[], Iterator[Document]], choice: Choice) -> Iterator[str]:
    """Yield the texts of the contexts, as `load_fineweb` of the authors' code makes them.

    Both kinds begin with the first document, so that the long ones are mostly made of the single ones. A joined context
    takes documents until it has `choice.joined` tokens, and the document after it is dropped.
    """

    def fitting() -> Iterator[Document]:
        return ((text.strip(), n) for text, n in documents() if choice.shortest <= n < choice.longest)

    yield from (text for text, _ in itertools.islice(fitting(), choice.single))
    following = fitting() if choice.joins else iter(())
    for _ in range(choice.joins):
        whole, tokens = "", 0
        for text, count in following:
            whole, tokens = whole + JOINED_BY + text, tokens + count
            if tokens >= choice.joined:
                break
        else:
            return
        yield whole
        next(following, None)


def source_documents(source: str, seed: int, tokens: int, count: Callable[[str], int]) -> Iterator[Document]:
    """A hub data set's documents in its own order, or local ones in an order drawn from the seed, each once; of a long
    .txt file pieces of about so many tokens."""
    if (path := local_path(source)) is not None:
        documents = Documents(path, seed, piece=BYTES * tokens)
        texts = (documents[index] for index in range(len(documents)))
        yield from ((text, count(text)) for text in texts if text)
        return
    for text, row in Records(iter(open_hub(source)), source):
        if text:
            known = row.get("token_count")
            yield text, known if isinstance(known, int) else count(text)


def text_contexts(
    source: str, choice: Choice, held_out: int, *, seed: int, tokenizer: Any, instruction: str
) -> tuple[list[Context], list[TokenRow]]:
    """The contexts of a data set, and `held_out` sequences of documents that are in none of them: the next ones in its
    order.

    Raises:
        UserError: nothing there, or too few documents of the wanted length.
    """

    def documents() -> Iterator[Document]:
        tokens = round(math.sqrt(choice.shortest * choice.longest))
        return source_documents(source, seed, tokens, lambda text: len(_tokens(tokenizer, text)))

    # what is looked at twice is tokenized once
    seen: list[Document] = []
    rest = documents()

    def again() -> Iterator[Document]:
        for index in itertools.count():
            if index == len(seen):
                one = next(rest, None)
                if one is None:
                    return
                seen.append(one)
            yield seen[index]

    texts = list(chosen(again, choice))
    wanted = choice.single + choice.joins
    fitting = sum(choice.shortest <= count < choice.longest for _, count in seen)
    if len(texts) < wanted:
        raise UserError(
            f"--data {source}: {fitting} documents have {choice.shortest} to {choice.longest - 1} tokens, too few for "
            f"{choice.single} contexts of one and {choice.joins} of at least {choice.joined} tokens: change "
            "--shortest, --longest, --joined, --single or --joins"
        )
    used = {digest(text) for text, _ in seen}
    others = ((text, count) for text, count in rest if digest(text) not in used)
    later = (text for text, count in others if choice.shortest <= count < choice.longest)
    held = [_whole(tokenizer, instruction, text) for text in itertools.islice(later, held_out)]
    if not held:
        raise UserError(
            f"--data {source}: all its documents of {choice.shortest} to {choice.longest - 1} tokens are trained on: "
            "validation needs another, so lower --single or --joined"
        )
    before = prefix(tokenizer, instruction)
    return [Context(before, _tokens(tokenizer, text)) for text in texts], held


def builtin_contexts(
    lengths: Sequence[int], held_out: Sequence[int], seed: int
) -> tuple[list[Context], list[TokenRow]]:
    """Contexts of the built-in tasks, each with its questions, for sequences of these lengths; and held-out sequences,
    of other text.

    Raises:
        UserError: a length that holds no questions.
    """
    from kvjax.tasks.builtin import builtin_text, builtin_vocabulary
    from kvjax.tasks.mixture import Mixture, builtin_mixture

    if min(lengths) < SHORTEST_BUILTIN:
        raise UserError(
            f"--lengths {min(lengths)}: the built-in tasks need sequences of at least {SHORTEST_BUILTIN} tokens"
        )
    stream, made = builtin_mixture(), []
    for index, length in enumerate(lengths):
        sample = stream.sample(seed, index, length)
        asked = tuple(np.concatenate([q.prompt, q.answer]).astype(np.int32) for q in sample.questions)
        made.append(Context(sample.context[:1], sample.context[1:], asked))
    other = Mixture(builtin_vocabulary(), builtin_text("evaluate"))
    return made, [other(seed, FIRST_HELD_OUT + index, length)[0] for index, length in enumerate(held_out)]


def _tokens(tokenizer: Any, text: str) -> TokenRow:
    return np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32)


def prefix(tokenizer: Any, instruction: str) -> TokenRow:
    """What always stands before a context: the chat template's own with the instruction, or what the tokenizer begins
    every text with."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    ids = encode(tokenizer, f"{instruction}\n\n", "beginning") if has_template else opening(tokenizer)
    return np.asarray(ids, np.int32)


def _whole(tokenizer: Any, instruction: str, text: str) -> TokenRow:
    return np.concatenate([prefix(tokenizer, instruction), _tokens(tokenizer, text)]).astype(np.int32)
