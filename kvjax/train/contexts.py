"""Contexts to compute features of: FineWeb-Edu's documents as Fast KVzip picks them (`load_fineweb` of its code), local
text picked in the same way, and the built-in model's own tasks.

Text contexts are made of the documents within a range of lengths, in their order. The first ones are contexts by
themselves. Then documents from the first one on are joined by empty lines into longer contexts.
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
"""The text before each document of a joined context."""
BYTES = 4
"""The approximate bytes of a token. They size the pieces of a long .txt file, so that these are neither too short nor
too long as documents."""


@dataclasses.dataclass(frozen=True)
class Context:
    """A context and the questions about it."""

    prefix: TokenRow
    """The tokens before the context that are always kept. Gates are not trained on them."""
    tokens: TokenRow
    """The context's own tokens."""
    questions: tuple[TokenRow, ...] = ()
    """The tokens of each question with its answer, as they follow the context."""

    @property
    def row(self) -> TokenRow:
        """The tokens that the model reads: prefix and context."""
        return np.concatenate([self.prefix, self.tokens]).astype(np.int32)

    @property
    def digest(self) -> str:
        """A hash of all tokens, questions included, which identifies the context."""
        whole = [self.prefix, self.tokens, *self.questions]
        text = b"|".join(np.ascontiguousarray(x, np.int32).tobytes() for x in whole)
        return hashlib.blake2b(text, digest_size=8).hexdigest()


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choice of documents that become contexts."""

    shortest: int
    """The minimum number of tokens of a document."""
    longest: int
    """A document has fewer tokens than this."""
    joined: int
    """The minimum number of tokens of a context of joined documents."""
    single: int
    """The number of contexts that are one document each."""
    joins: int
    """The number of contexts of joined documents."""


Document = tuple[str, int]
"""A text and its number of tokens, by the data set's own count where it has one."""


def chosen(documents: Callable[[], Iterator[Document]], choice: Choice) -> Iterator[str]:
    """Yield the texts of the contexts, as `load_fineweb` of the authors' code makes them.

    Single and joined contexts both begin with the first document, so the joined ones mostly repeat the single ones. A
    joined context takes documents until it has `choice.joined` tokens, and the document after it is dropped.
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
    """Yield each document once: a hub data set's in its own order, local ones in an order drawn from the seed. A long
    .txt file is cut into pieces of about `tokens` tokens."""
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
    """Return the contexts of a data set and `held_out` sequences, of the next documents in its order that are in no
    context.

    Raises:
        UserError: there is no such data, or it has too few documents of the wanted length.
    """

    def documents() -> Iterator[Document]:
        tokens = round(math.sqrt(choice.shortest * choice.longest))
        return source_documents(source, seed, tokens, lambda text: len(_tokens(tokenizer, text)))

    # documents that are read twice are tokenized once
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
    """Return contexts of the built-in tasks, each with its questions, for sequences of `lengths`, and held-out
    sequences of other text.

    Raises:
        UserError: a length is too short for questions.
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
    """Return the tokens before every context: the chat template's own with the instruction, or, without a template,
    those with which the tokenizer begins every text."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    text = f"{instruction}\n\n" if instruction else ""
    ids = encode(tokenizer, text, "beginning") if has_template else opening(tokenizer)
    return np.asarray(ids, np.int32)


def _whole(tokenizer: Any, instruction: str, text: str) -> TokenRow:
    return np.concatenate([prefix(tokenizer, instruction), _tokens(tokenizer, text)]).astype(np.int32)
