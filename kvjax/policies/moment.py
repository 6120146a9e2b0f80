"""When a cache is compacted."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from kvjax.errors import UserError, named_fields, one_of, real_number, shown, whole_number
from kvjax.struct import assign, short

OBSERVERS = "own", "prompt"
"""Who looks at what is scored, if it is not tokens of their own: the last of what was read, or those of the whole
prompt."""


def observers(given: Any, words: tuple[str, ...]) -> str | tuple[int, ...]:
    """One of these words, or token ids. Raises UserError for anything else."""
    if isinstance(given, str | bytes | bytearray) or not isinstance(given, Iterable):
        one_of("eviction", "observers", given, words)
        return str(given)
    if getattr(given, "ndim", 1) != 1:
        raise UserError(f"eviction: observers are a list of token ids, got {shown(given)}")
    tokens = tuple(whole_number("eviction", "a token id of observers", token, 0) for token in given)
    if not tokens:
        raise UserError("eviction: observers are token ids, at least one, got none")
    return tokens


class Moment:
    """When a cache is compacted."""

    when: ClassVar[str]
    """Its name."""
    chunk: int = 0
    every: int = 0
    drop: float = 0.0
    observers: Any = "own"

    @property
    def guidance(self) -> tuple[int, ...]:
        """Token ids that look at what is scored, read behind it and dropped again."""
        return () if isinstance(self.observers, str) else self.observers

    @property
    def in_chunks(self) -> bool:
        return self.when == "chunk"

    @property
    def patched(self) -> bool:
        """Whether chunks are looked at by the whole prompt's last tokens."""
        return self.observers == "prompt"

    @property
    def while_decoding(self) -> bool:
        return self.when in ("every", "position", "overflow")

    def __repr__(self) -> str:
        return short(self)


@named_fields
@dataclass(frozen=True, repr=False)
class AtPrompt(Moment):
    """Once the prompt was read. `observers`: "own", or token ids that are read behind it, look at it, and are dropped
    again (guidance, after OracleKV)."""

    when = "prompt"
    observers: Any = "own"
    """Who looks."""

    def __post_init__(self):
        assign(self, observers=observers(self.observers, ("own",)))


@named_fields
@dataclass(frozen=True, repr=False)
class EveryChunk(Moment):
    """After every `chunk` tokens of a prompt and at its end, so that the cache never holds all of it.

    `observers`, one of `OBSERVERS`. "prompt": the prompt's own last tokens are read once more behind each chunk but the
    last, look at it, and are dropped again (a patch: PruLong, arXiv:2506.17121, Sec. 4.3). Token ids: they are read so
    behind every chunk. Other tokens for each prompt's end are given to `prefill(observers=…)`.
    """

    when = "chunk"
    chunk: int = 0
    """Tokens."""
    observers: Any = "own"
    """Who looks."""

    def __post_init__(self):
        looking = observers(self.observers, OBSERVERS)
        assign(self, observers=looking, chunk=whole_number("eviction", "chunk", self.chunk, 0))


@named_fields
@dataclass(frozen=True, repr=False)
class Every(Moment):
    """At the prompt's end and after `every` tokens of an answer, again and again (R-KV, arXiv:2505.24133)."""

    when = "every"
    every: int = 0
    """Tokens of an answer."""

    def __post_init__(self):
        assign(self, every=whole_number("eviction", "every", self.every))


@named_fields
@dataclass(frozen=True, repr=False)
class AtPositions(Moment):
    """At the prompt's end and, in the decoding loop itself, whenever a sequence has a multiple of `every` tokens, each
    of a batch at its own time (Fast KVzip's code, arXiv:2601.17668)."""

    when = "position"
    every: int = 128
    """Tokens of a sequence."""

    def __post_init__(self):
        assign(self, every=whole_number("eviction", "every", self.every))


@named_fields
@dataclass(frozen=True, repr=False)
class Overflow(Moment):
    """As soon as there are more entries than the budget allows, when every head loses a share `drop` of what it has
    beyond the window (WG-KV's composition with SnapKV)."""

    when = "overflow"
    drop: float = 0.1
    """Share of what a head has beyond the window."""

    def __post_init__(self):
        assign(self, drop=real_number("eviction", "drop", self.drop, above=0.0, most=1.0))


MOMENTS: dict[str, type[Moment]] = {
    kind.when: kind for kind in (AtPrompt, EveryChunk, Every, AtPositions, Overflow)
}
NOTHING = {"chunk": 0, "every": 0, "drop": None, "observers": "own"}
"""The words of moments, with what says nothing beside any of them."""


def names(kind: Any) -> list[str]:
    """Of a moment's own words."""
    return [field.name for field in fields(kind)]


def _says_nothing(name: str, value: Any) -> bool:
    return value is None if name == "drop" else isinstance(value, int | str) and value == NOTHING[name]


def moment(when: str = "prompt", **words: Any) -> Moment:
    """The one of `MOMENTS` called `when`, of the words of `NOTHING`. Raises UserError for a word of another."""
    one_of("eviction", "when", when, tuple(MOMENTS))
    given = {name: value for name, value in words.items() if not _says_nothing(name, value)}
    for name, value in given.items():
        owners = [kind.when for kind in MOMENTS.values() if name in names(kind)]
        owners = ["chunk"] if isinstance(value, str) and value == "prompt" else owners
        if when not in owners:
            raise UserError(f"{name}={shown(value)} needs when={' or '.join(map(repr, owners))}")
    return MOMENTS[when](**given)
