"""A policy: the window and the methods that decide what is stored, as one pytree."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float

from kvjax.errors import UserError, one_of, shown, whole_number
from kvjax.mesh import on_host, use_mesh
from kvjax.policies.admission.full import Full
from kvjax.policies.base import Admission, Eviction, LateMetadata, Method, Selection
from kvjax.policies.budget import BUDGETS
from kvjax.policies.compiled import CompiledPolicy, compile_policy, observes_tokens, stores_every_token
from kvjax.policies.eviction.refit import refitting
from kvjax.policies.eviction.wrapper import innermost, metadata_of
from kvjax.policies.schedule import Schedule
from kvjax.struct import assign, changed, short, static, struct

EXAMPLES = {
    "admission": "StreamingLLM()",
    "eviction": "SnapKV()",
    "selection": "Quest(tokens=1024)",
    "schedule": "Schedule(Ratio(0.25))",
}

DEFAULT_ADMISSION = Full()
"""The admission of policies that name none. It is compared by identity, since a policy may also name `Full`."""


@struct
class Policy:
    """The methods that decide what a model keeps of its context: the last `window` tokens, and those that `admission`
    retains until `eviction` drops them, as `schedule` says.

        Policy(WGKV("builtin"), eviction=Adaptive(SnapKV(observed=16)), schedule=Schedule(Ratio(0.1)))

    A query at position i sees exactly the tokens j ≤ i with i − j < window or j admitted and not evicted. While
    decoding, it reads only the pages of retained tokens that `selection` chooses.

    Raises:
        UserError: if the methods cannot be combined, or a part is not an object of its kind.
    """

    admission: Admission = DEFAULT_ADMISSION
    """The admission; by default every token is stored."""
    window: Any = static(default=None)
    """The number of last tokens that are always visible, a query's own included; by default the admission's window."""
    eviction: Eviction | None = None
    """The method that scores entries; None: no entry is evicted."""
    schedule: Schedule | None = static(default=None)
    """The eviction's budget and trigger. An eviction needs a schedule."""
    selection: Selection | None = None
    """The method that chooses the pages that a decoded token reads; None: it reads all."""
    positions: bool = static(default=False)
    """True: every retained entry has its position as entry metadata, 4 bytes, so that spans of tokens can be dropped
    (`Cache.without`)."""
    name: str = dataclasses.field(default="", repr=False, metadata={"static": True})
    """The policy's name in reports; by default the names of its methods."""

    def __post_init__(self):
        kinds = {"admission": Admission, "eviction": Eviction, "selection": Selection, "schedule": Schedule}
        parts = {part: getattr(self, part) for part in kinds}
        given = {part: x for part, x in parts.items() if x is not None and x is not DEFAULT_ADMISSION}
        if self.admission is None:
            raise UserError(f"policy: admission must be an object such as {EXAMPLES['admission']}, got None")
        for part, x in given.items():
            if not isinstance(x, kinds[part]):
                raise UserError(f"policy: {part} must be an object such as {EXAMPLES[part]}, got {shown(x)}")
        labels = [given[part].label for part in ("admission", "eviction", "selection") if part in given]
        name = self.name or "+".join(label for label in labels if label != "full") or "full"
        window = self.admission.window if self.window is None else self.window
        assign(self, name=name)
        one_of(name, "positions", self.positions, (True, False))
        if window is None:
            raise UserError(f"{name} needs window: how many of the last tokens are always visible")
        assign(self, window=whole_number(name, "window", window))
        if self.admission.owns_window and window != self.admission.window:
            raise UserError(
                f"{name}: the admission depends on its window of {self.admission.window}, which the policy cannot "
                f"change: make {type(self.admission).__name__} with window={window}"
            )
        if self.eviction is None and self.schedule is not None:
            raise UserError(f"{name}: schedule={shown(self.schedule)} is for an eviction, and there is none")
        if self.eviction is not None:
            if self.schedule is None:
                raise UserError(f"{name} needs a budget: one of {', '.join(BUDGETS)}")
            trigger = self.schedule.trigger or self.eviction.usual_trigger
            details = {"trigger": trigger, "needs": self.eviction.needs, "shares": self.eviction.shares}
            assign(self, schedule=dataclasses.replace(self.schedule, **details))
            self._check(self.eviction, self.schedule)
        if self.admission.keep().max_entries is not None:
            self._check_max_entries()

    def _check_max_entries(self) -> None:
        """Raise UserError for methods that need entries in order of position, and for a bad `max_entries`."""
        for role, method in (("an eviction", self.eviction), ("a selection of pages", self.selection)):
            if method is not None:
                raise UserError(
                    f"{self.name}: an admission with max_entries keeps its entries in no order, and {role} needs them "
                    "in order of position"
                )
        max_entries = self.admission.keep().max_entries
        if not np.issubdtype(getattr(max_entries, "dtype", None) or object, np.integer):
            raise UserError(
                f"{self.name}: max_entries must be an array of whole numbers, got {shown(max_entries)}"
            )
        if isinstance(max_entries, np.ndarray | np.generic) and np.min(max_entries).item() < 0:
            raise UserError(f"{self.name}: max_entries must be at least 0, got {shown(max_entries)}")
        if self.admission.updates:
            raise UserError(
                f"{self.name}: an admission with max_entries cannot update its metadata, because entries change places"
            )

    def _check(self, eviction: Eviction, schedule: Schedule) -> None:
        """Raise UserError if the eviction cannot be used with its schedule, the window or the admission."""
        name, trigger, last = self.name, schedule.trigger, schedule.needs.last
        observed = schedule.observed_in_context
        if refusal := eviction.refusal(schedule, self.stores_all):
            raise UserError(f"{eviction.label} {refusal}")
        if self.selection is not None and refitting(eviction):
            raise UserError(
                f"{name}: refit fits all entries together, and a selection reads some pages of them"
            )
        schedule.check()
        method = innermost(eviction)
        if trigger.while_decoding and isinstance(method, LateMetadata) and (waiting := method.pending):
            if last < waiting:
                raise UserError(
                    f"{name}: the last {waiting} tokens may have no score yet, so they must stay: last must be at "
                    f"least {waiting}, got {last}"
                )
            if not 0 < trigger.every <= waiting:
                raise UserError(
                    f"{name}: {waiting} tokens wait for their scores at most, so a compaction must come after every "
                    f"{waiting} or fewer, got {trigger}"
                )
        if self.stores_all:
            if trigger.when != "prompt" and last < observed:
                raise UserError(
                    f"{name}: when={trigger.when!r} looks back at the last {observed} tokens at every compaction, so "
                    f"they must stay: last must be at least {observed}, got {last}"
                )
            return
        # the observed queries must be newer than all stored entries, which have left the window
        if self.window < observed:
            raise UserError(
                f"{eviction.label} looks back at the last {observed} tokens, which must still be in the window: "
                f"window must be at least {observed}, got {self.window}"
            )
        if trigger.patched:
            raise UserError(
                f"{name}: observers='prompt' reads tokens after a chunk, which would push the chunk's own tokens out "
                "of the admission's window"
            )
        if schedule.by_chunk:
            raise UserError(
                f"{name}: this budget is a share of each chunk's tokens, and an admission does not store them all: "
                "give entries or size"
            )
        if shared := set(self.admission.metadata) & set(metadata_of(eviction)):
            raise UserError(
                f"{name}: its admission and its eviction both have metadata called {min(shared)!r}"
            )

    def __repr__(self) -> str:
        defaults: dict[str, Any] = {"window": None} if self.window == self.admission.window else {}
        usual = None if self.eviction is None else self.eviction.usual_trigger
        if self.schedule is not None and self.schedule.trigger == usual:
            defaults["schedule"] = changed(self.schedule, trigger=None)
        return short(changed(self, **defaults))

    @property
    def stores_all(self) -> bool:
        """True if every token is stored for good as it comes (`stores_every_token`)."""
        return stores_every_token(self.admission, self.window)

    @property
    def compacts_answers(self) -> bool:
        """True if the cache is compacted while answers are decoded."""
        return self.schedule is not None and self.schedule.trigger.while_decoding

    @property
    def observes(self) -> bool:
        """True if the eviction looks at tokens as they come."""
        return self.schedule is not None and observes_tokens(self.eviction)

    def compile(self, model: Any) -> CompiledPolicy:
        """Check the policy against a model and return the views of it that inference needs, on the current mesh or else
        the model's.

        Raises UserError if the policy is for another model.
        """
        self.check(model.config)
        for method in self._methods:
            if method.made_for is not None:
                method.made_for.check(method.label, model)
        with use_mesh(model):
            config = model.config
            return compile_policy(self, config.num_full_layers, config.num_kv_heads, config.head_order)

    def check(self, config: Any) -> None:
        """Raise UserError if the policy is not for a model of this configuration (`num_full_layers`, `num_kv_heads`,
        `head_dim`, `vocab_size`)."""
        is_full = isinstance(self.admission, Full) and self.eviction is None and self.selection is None
        if not config.num_full_layers and not is_full:
            raise UserError(
                f"policy {self.name}: every layer of this model has a sliding window, beyond which nothing is stored: "
                "the policy must be full"
            )
        for method in self._methods:
            method.check(config)
        if self.eviction is not None:
            self.eviction.shares.check(config.num_full_layers)
        largest = max(() if self.schedule is None else self.schedule.trigger.guidance, default=0)
        if largest >= config.vocab_size:
            raise UserError(
                f"{self.name}: observers have token id {largest}, the model's vocabulary is 0 … "
                f"{config.vocab_size - 1}"
            )

    @property
    def _methods(self) -> list[Method]:
        return [x for x in (self.admission, self.eviction, self.selection) if x is not None]

    @property
    def metadata(self) -> dict[str, str]:
        """The names and dtypes of the entry metadata."""
        position = {"position": "int32"} if self.positions else {}
        return {**self.admission.metadata, **metadata_of(self.eviction), **position}

    @property
    def max_entries(self) -> int | None:
        """The most entries that a head cache retains; None: there is no limit. For use outside jit."""
        max_entries = self.admission.keep().max_entries
        return None if max_entries is None else int(on_host(max_entries).max())

    @property
    def rewrites_entries(self) -> bool:
        """True if retained entries or their metadata may be changed or moved after the prompt."""
        return self.max_entries is not None or self.admission.updates or self.compacts_answers

    def expected_entries(self, tokens: int, entry_bytes: int) -> Float[np.ndarray, "#l #k"]:
        """Return the largest number of entries expected at one time while `tokens` tokens are read, local window
        included, by layer and kv head. `entry_bytes`: the bytes of one token's key and value in all layers and
        heads."""
        local = min(tokens, self.window - 1)
        stored = np.minimum(self.admission.admitted(tokens - local), tokens - local)
        stored = stored if self.max_entries is None else np.minimum(stored, self.max_entries)
        if self.schedule is not None:
            stored = np.minimum(stored, self.schedule.peak_entries(tokens, entry_bytes))
        return local + stored
