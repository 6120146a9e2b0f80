"""What `make_policy` is told of an eviction method."""

from dataclasses import dataclass, replace

from kvjax.errors import whole_number
from kvjax.policies.interfaces import Eviction


@dataclass(frozen=True)
class Method:
    """An eviction, and what always stays whatever its scores."""

    eviction: Eviction
    last: int = 0
    """The newest entries of each kv head that always stay. They take places of the budget."""
    first: int = 0
    """The very first entries of each kv head that always stay. They take places of the budget, too."""
    recent: float = 0.0
    """The share of the budget that always goes to the newest, if that is more than `last`."""
    observed: int = 0
    """How many of the last tokens are looked back at."""


@dataclass(frozen=True)
class Protected:
    """What always stays, in place of the method's own numbers."""

    first: int | None = None
    """So many of the very first entries of each kv head."""
    last: int | None = None
    """So many of its newest."""

    def __post_init__(self):
        for name in ("first", "last"):
            number = getattr(self, name)
            if number is not None:
                object.__setattr__(self, name, whole_number("eviction", name, number, 0))

    def within(self, method: Method) -> Method:
        """The method with these numbers."""
        first, last = self.first, self.last
        return replace(
            method,
            first=method.first if first is None else first,
            last=method.last if last is None else last,
            recent=method.recent if last is None else 0.0,
        )
