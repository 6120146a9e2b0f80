"""OracleKV (LCFM workshop at ICML 2025): the entries that a text about the coming questions looks at, before they are
asked."""

from typing import ClassVar

from kvjax.errors import one_of
from kvjax.policies.budget import Shares
from kvjax.policies.eviction.snapkv import SnapKV
from kvjax.policies.schedule import Schedule
from kvjax.struct import host, struct

ALLOCATIONS = {
    "uniform": Shares(),
    "ada": Shares(over="layer", pinned=0.2),
    "pyramid": Shares(pyramid=20.0),
}
"""The ways of sharing the budget: none, among a layer's heads (AdaKV's α), or by depth (PyramidKV's β)."""


@struct
class OracleKV(SnapKV):
    """SnapKV with the queries of `guidance`, a text that stands for the coming questions. The text is read after the
    context, looks at it, and is removed again (Sec. 4; eq. 2). Entries stay by their scores alone: no window and no
    sinks are protected.

    With `allocation` "uniform" every kv head has its own share of the budget, with "ada" the heads of a layer compete,
    and with "pyramid" deeper layers have less.
    """

    allocation: str = host(default="uniform")
    """The way of sharing the budget, one of `ALLOCATIONS`."""
    name = "oraclekv"
    guidance: ClassVar[str] = "G1"

    def __post_init__(self):
        super().__post_init__()
        one_of(self.name, "allocation", self.allocation, tuple(ALLOCATIONS))

    @property
    def shares(self) -> Shares:
        return ALLOCATIONS[self.allocation]

    def refusal(self, schedule: Schedule, stores_all: bool) -> str:
        if not schedule.trigger.guidance:
            return "needs guidance: a text or token ids that are read after a prompt to look at it"
        return super().refusal(schedule, stores_all)
