"""First and newest entries of each kv head that always stay."""

from kvjax.errors import whole_number
from kvjax.policies.eviction.wrapper import Wrapper
from kvjax.policies.schedule import Needs, Schedule
from kvjax.struct import assign, host, struct


@struct
class Protected(Wrapper):
    """A wrapper that sets how many of the first and of the newest entries of each kv head always stay, in place of the
    method's own numbers."""

    first: int | None = host(default=None)
    """The number of first entries that always stay; None: the method's own."""
    last: int | None = host(default=None)
    """The number of newest entries that always stay; None: the method's own."""
    name = "protected"

    def __post_init__(self):
        super().__post_init__()
        for name in ("first", "last"):
            if (number := getattr(self, name)) is not None:
                assign(self, **{name: whole_number("eviction", name, number, 0)})

    def refusal(self, schedule: Schedule, stores_all: bool) -> str:
        for name, for_prompts in (("first", "prefix"), ("last", "window")):
            if getattr(self, name) is not None and schedule.in_ranges:
                return (
                    f"takes {name} only while decoding, got when={schedule.trigger.when!r}: for prompts the argument "
                    f"is {for_prompts}"
                )
        return super().refusal(schedule, stores_all)

    @property
    def needs(self) -> Needs:
        needs = self.eviction.needs
        if self.first is not None:
            needs = needs._replace(first=self.first)
        return needs if self.last is None else needs._replace(last=self.last, recent=0.0)
