"""KVzap (Jégou and Jeblick, 2026, arXiv:2601.07891) as an eviction: the entries of a whole prompt with the lowest
predicted scores are dropped."""

import dataclasses
from typing import Any

from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.policies.admission.kvzap.files import check_made_for
from kvjax.policies.admission.kvzap.policy import WINDOW, resolve_gates
from kvjax.policies.base import Numbers, State, StoredScore, TokenMetadata
from kvjax.policies.schedule import Needs
from kvjax.policies.views import Readout, Step
from kvjax.struct import assign, remembered, struct


@struct
class KVzapEviction(TokenMetadata, StoredScore):
    """A surrogate's prediction of the logarithm of KVzip+'s score, which is stored with each entry. With `threshold` it
    is what kvpress's DMSPress does with KVzapPress: attention over a prompt is dense, and the newest 128 entries stay.
    With a ratio all layers and heads share the budget, as in KVzip. The gates are those of `kvzap`.
    """

    gates: Any = dataclasses.field(repr=False)
    """The surrogate, or the folder to read it from."""
    made_for: MadeFor | None = remembered()
    """The model that the folder's gates were made for; None: it does not say."""
    name = "kvzap_eviction"

    def __post_init__(self):
        gates, description = resolve_gates(self.name, self.gates)
        assign(self, gates=gates, made_for=MadeFor.described(description))

    def check(self, model: Any) -> None:
        check_made_for(self.gates, model)

    @property
    def needs(self) -> Needs:
        return Needs(last=WINDOW)

    def numbers(self, state: State, step: Step, readout: Readout) -> Numbers:
        return {"score": self.gates(step.hidden)}
