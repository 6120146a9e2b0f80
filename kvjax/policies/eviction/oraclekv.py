"""OracleKV (LCFM workshop at ICML 2025): what a text about the questions to come looks at, before there is one."""

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
"""Who shares the budget: nobody, a layer's heads (AdaKV's α), or layers by depth (PyramidKV's β)."""


@struct
class OracleKV(SnapKV):
    """SnapKV whose queries are those of `guidance`, a text that stands for the questions to come: it is read behind the
    context, looks at it, and leaves nothing (Sec. 4; eq. 2). Nothing stays but by its score, no window and no sinks.

    `allocation`: every kv head has its share ("uniform"), those of a layer compete ("ada"), or layers have less with
    depth ("pyramid").
    """

    allocation: str = host(default="uniform")
    """One of `ALLOCATIONS`."""
    name = "oraclekv"
    guidance: ClassVar[str] = "G1"

    def __post_init__(self):
        super().__post_init__()
        one_of(self.name, "allocation", self.allocation, tuple(ALLOCATIONS))

    @property
    def shares(self) -> Shares:
        return ALLOCATIONS[self.allocation]

    def refuses(self, schedule: Schedule, stores_all: bool) -> str:
        if not schedule.trigger.guidance:
            return "needs guidance: a text or token ids that are read behind a prompt to look at it"
        return super().refuses(schedule, stores_all)
