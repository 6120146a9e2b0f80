"""Contexts for which features are computed: FineWeb-Edu's documents as Fast KVzip picks them (`load_fineweb` of its
code), local text picked in the same way, and the built-in model's tasks.

Text contexts are made of documents within a range of lengths, in their order. Each of the first documents is a context
by itself. Then documents, again from the first one on, are joined by empty lines into longer contexts.
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
from kvjax.train.conversation import Conversation
from kvjax.train.data import FIRST_HELD_OUT, SHORTEST_BUILTIN, plain_tokens
from kvjax.train.documents import Documents, digest
from kvjax.train.readers import Records, local_path, open_hub

TokenRow = Int[np.ndarray, " _"]
JOINED_BY = "\n\n"
"""The text before each document of a joined context."""
BYTES_PER_TOKEN = 4
"""The approximate bytes of a token, from which the size of the pieces of a long .txt file follows."""


@dataclasses.dataclass(frozen=True)
class Context:
    """A context and the questions about it."""

    prefix: TokenRow
    """The tokens before the context, which always stay in the cache. Gates are not trained on them."""
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
        parts = [self.prefix, self.tokens, *self.questions]
        text = b"|".join(np.ascontiguousarray(x, np.int32).tobytes() for x in parts)
        return hashlib.blake2b(text, digest_size=8).hexdigest()


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choice of documents that become contexts."""

    shortest: int
    """The minimum number of tokens of a document."""
    longest: int
    """The exclusive upper limit of the number of tokens of a document."""
    joined: int
    """The minimum number of tokens of a context of joined documents."""
    single: int
    """The number of contexts that are one document each."""
    joins: int
    """The number of contexts of joined documents."""


Document = tuple[str, int]
"""A text and its number of tokens, which the dataset may give itself."""


def context_texts(documents: Callable[[], Iterator[Document]], choice: Choice) -> Iterator[str]:
    """Yield the texts of the contexts, as `load_fineweb` of the authors' code makes them.

    Single and joined contexts both begin with the first document, so the joined ones mostly repeat the single ones.
    Documents are added to a joined context until it has `choice.joined` tokens. The document after it is dropped.
    """

    def suitable() -> Iterator[Document]:
        return (
            (text.strip(), count) for text, count in documents() if choice.shortest <= count < choice.longest
        )

    yield from (text for text, _ in itertools.islice(suitable(), choice.single))
    remaining = suitable() if choice.joins else iter(())
    for _ in range(choice.joins):
        joined, tokens = "", 0
        for text, count in remaining:
            joined, tokens = joined + JOINED_BY + text, tokens + count
            if tokens >= choice.joined:
                break
        else:
            return
        yield joined
        next(remaining, None)


def source_documents(source: str, seed: int, tokens: int, count: Callable[[str], int]) -> Iterator[Document]:
    """Yield each document once. A hub dataset is read in its own order, local files in an order drawn from the seed. A
    long .txt file is cut into pieces of about `tokens` tokens."""
    if (path := local_path(source)) is not None:
        documents = Documents(path, seed, piece=BYTES_PER_TOKEN * tokens, check=_refuse_chat)
        texts = (documents[index] for index in range(len(documents)))
        yield from ((text, count(text)) for text in texts if text)
        return
    for text, row in Records(iter(open_hub(source)), source, _refuse_chat):
        if text:
            token_count = row.get("token_count")
            yield text, token_count if isinstance(token_count, int) else count(text)


def _refuse_chat(text: str) -> None:
    if isinstance(text, Conversation):
        raise UserError("is a chat, but contexts are texts in a user's turn of their own: give texts")


def text_contexts(
    source: str, choice: Choice, held_out: int, *, seed: int, tokenizer: Any, instruction: str
) -> tuple[list[Context], list[TokenRow]]:
    """Return the contexts of a dataset, and `held_out` sequences made of the documents that follow and are in no
    context.

    Raises:
        UserError: there is no such data, or it has too few documents of these lengths.
    """

    def documents() -> Iterator[Document]:
        tokens = round(math.sqrt(choice.shortest * choice.longest))
        return source_documents(source, seed, tokens, lambda text: len(plain_tokens(tokenizer, text)))

    # documents that are read twice are tokenized once
    read: list[Document] = []
    unread = documents()

    def read_documents() -> Iterator[Document]:
        for index in itertools.count():
            if index == len(read):
                document = next(unread, None)
                if document is None:
                    return
                read.append(document)
            yield read[index]

    texts = list(context_texts(read_documents, choice))
    fitting = sum(choice.shortest <= count < choice.longest for _, count in read)
    if len(texts) < choice.single + choice.joins:
        raise UserError(
            f"--data {source}: {fitting} documents have {choice.shortest} to {choice.longest - 1} tokens, too few for "
            f"{choice.single} contexts of one document and {choice.joins} of at least {choice.joined} tokens: change "
            "--shortest, --longest, --joined, --single or --joins"
        )
    used = {digest(text) for text, _ in read}
    unused = ((text, count) for text, count in unread if digest(text) not in used)
    suitable = (text for text, count in unused if choice.shortest <= count < choice.longest)
    held_out_rows = [
        _with_prefix(tokenizer, instruction, text) for text in itertools.islice(suitable, held_out)
    ]
    if not held_out_rows:
        raise UserError(
            f"--data {source}: all its documents of {choice.shortest} to {choice.longest - 1} tokens are trained on: "
            "validation needs another, so lower --single or --joined"
        )
    opening_tokens = prefix(tokenizer, instruction)
    return [Context(opening_tokens, plain_tokens(tokenizer, text)) for text in texts], held_out_rows


def builtin_contexts(
    lengths: Sequence[int], held_out: Sequence[int], seed: int
) -> tuple[list[Context], list[TokenRow]]:
    """Return contexts of the built-in tasks with their questions, made from sequences of `lengths`, and held-out
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
    mixture, contexts = builtin_mixture(), []
    for index, length in enumerate(lengths):
        sample = mixture.sample(seed, index, length)
        questions = tuple(np.concatenate([q.prompt, q.answer]).astype(np.int32) for q in sample.questions)
        contexts.append(Context(sample.context[:1], sample.context[1:], questions))
    held_out_mixture = Mixture(builtin_vocabulary(), builtin_text("evaluate"))
    others = [held_out_mixture(seed, FIRST_HELD_OUT + i, length)[0] for i, length in enumerate(held_out)]
    return contexts, others


def prefix(tokenizer: Any, instruction: str) -> TokenRow:
    """Return the tokens before every context: the beginning of the chat template with the instruction or, if there is
    no template, the tokens with which the tokenizer begins every text."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    text = f"{instruction}\n\n" if instruction else ""
    ids = encode(tokenizer, text, "beginning") if has_template else opening(tokenizer)
    return np.asarray(ids, np.int32)


def _with_prefix(tokenizer: Any, instruction: str, text: str) -> TokenRow:
    return np.concatenate([prefix(tokenizer, instruction), plain_tokens(tokenizer, text)]).astype(np.int32)
