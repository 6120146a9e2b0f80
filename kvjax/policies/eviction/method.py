"""What `make_policy` is told of an eviction method."""

from dataclasses import dataclass

from kvjax.policies.interfaces import Eviction


@dataclass(frozen=True)
class Method:
    """eviction: the scores. last, first: of each kv head the newest and the very first entries that always stay, and
    take places of the budget. recent: the share of the budget that always goes to the newest, if that is more.
    observed: how many of the last tokens are looked back at. attended: whether it needs to know how much attention each
    entry got so far (`Stored.attended`), which is then counted with every call."""

    eviction: Eviction
    last: int = 0
    first: int = 0
    recent: float = 0.0
    observed: int = 0
    attended: bool = False
