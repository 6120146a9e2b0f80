"""Triggers, which say when a cache is compacted."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvjax.errors import UserError, named_fields, one_of, real_number, shown, whole_number
from kvjax.struct import assign, short

ARGUMENTS = "chunk", "every", "drop", "observers"
"""The fields of a trigger besides `when`."""
TRIGGERS = {
    "prompt": ("observers",),
    "chunk": ("chunk", "observers"),
    "every": ("every",),
    "position": ("every",),
    "overflow": ("drop",),
}
"""The values of `when`, and the arguments that each takes."""
WHILE_DECODING = "every", "position", "overflow"
"""The values of `when` that compact while answers are decoded."""
OBSERVERS = "own", "prompt"
"""The values of `observers` that are no token ids. Only chunks take the second."""


@named_fields
@dataclass(frozen=True, repr=False)
class Trigger:
    """The rule that says when a cache is compacted.

    Args:
        when: "prompt": once, when the prompt has been read.
            "chunk": after every `chunk` tokens of a prompt and at its end, so that the cache never holds all of it.
            "every": at the prompt's end and after every `every` tokens of an answer (R-KV, arXiv:2505.24133).
            "position": at the prompt's end and, in the decoding loop itself, whenever a sequence has a multiple of
            `every` tokens (128 by default), each of a batch at its own time (Fast KVzip's code, arXiv:2601.17668).
            "overflow": as soon as there are more entries than the budget allows. Every head then loses the share `drop`
            (0.1 by default) of its entries outside the window (WG-KV's composition with SnapKV).
        observers: the tokens whose queries score the entries. "own": the last tokens that were read. Token ids
            (guidance, after OracleKV): they are read after the prompt, or after each chunk, and removed again.
            "prompt", for chunks: the prompt's own last tokens are read once more after each chunk but the last, and
            removed again (PruLong, arXiv:2506.17121, Sec. 4.3). `prefill(observers=…)` sets them by prompt.
    """

    when: str = "prompt"
    chunk: int = 0
    every: int = 0
    drop: float = None  # pyright: ignore[reportAssignmentType]
    observers: Any = "own"

    def __post_init__(self):
        one_of("eviction", "when", self.when, tuple(TRIGGERS))
        takes = TRIGGERS[self.when]
        for name in ARGUMENTS:
            value = getattr(self, name)
            triggers = [when for when, arguments in TRIGGERS.items() if name in arguments]
            if isinstance(value, str) and value == "prompt":
                triggers = ["chunk"]
            if self._is_given(name) and self.when not in triggers:
                raise UserError(f"{name}={shown(value)} needs when={' or '.join(map(repr, triggers))}")
        if "chunk" in takes:
            assign(self, chunk=whole_number("eviction", "chunk", self.chunk, 0))
        if "every" in takes:
            every = 128 if self.when == "position" and not self._is_given("every") else self.every
            assign(self, every=whole_number("eviction", "every", every))
        if "drop" in takes:
            drop = 0.1 if self.drop is None else self.drop
            assign(self, drop=real_number("eviction", "drop", drop, above=0.0, most=1.0))
        if "observers" in takes:
            choices = OBSERVERS if self.in_chunks else OBSERVERS[:1]
            assign(self, observers=_observers(self.observers, choices))

    def _is_given(self, name: str) -> bool:
        value = getattr(self, name)
        return not (isinstance(value, int | str | None) and value == getattr(Trigger, name))

    @property
    def guidance(self) -> tuple[int, ...]:
        """Token ids that are read after the scored tokens to look at them, and removed again."""
        return () if isinstance(self.observers, str) else self.observers

    @property
    def in_chunks(self) -> bool:
        return self.when == "chunk"

    @property
    def patched(self) -> bool:
        """True if chunks are scored by the queries of the whole prompt's last tokens."""
        return self.observers == "prompt"

    @property
    def while_decoding(self) -> bool:
        return self.when in WHILE_DECODING

    def __repr__(self) -> str:
        return short(self)


def _observers(given: Any, choices: tuple[str, ...]) -> str | tuple[int, ...]:
    """Return one of these words, or a tuple of token ids. Raises UserError for anything else."""
    if isinstance(given, str | bytes | bytearray) or not isinstance(given, Iterable):
        one_of("eviction", "observers", given, choices)
        return str(given)
    if getattr(given, "ndim", 1) != 1:
        raise UserError(f"eviction: observers must be a list of token ids, got {shown(given)}")
    tokens = tuple(whole_number("eviction", "a token id of observers", token, 0) for token in given)
    if not tokens:
        raise UserError("eviction: observers must be at least one token id, got none")
    return tokens
