"""The eviction: the entries that the gates score lowest are dropped, of all layers and kv heads together."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from kvjax.chat_template import opening
from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.errors import UserError, one_of, real_number, shown, whole_number
from kvjax.policies.base import Eviction, LateMetadata, Numbers, StoredScore
from kvjax.policies.eviction.fast_kvzip.files import Sizes, check_made_for, load_gates
from kvjax.policies.eviction.fast_kvzip.gate import INPUTS, SinkGate, inputs
from kvjax.policies.eviction.texts import check_tokenizer, token_ids
from kvjax.policies.schedule import Needs, Schedule, Undecided
from kvjax.policies.trigger import Trigger
from kvjax.policies.views import Readout, Shape, Step
from kvjax.struct import assign, changed, host, remembered, static, struct

CHUNK = 16_000
"""The number of tokens of a prompt between two compactions."""
FIRST, LAST = 4, 128
"""The default numbers of first and last entries of each kv head that always stay while decoding."""
PROMPT_FIELDS = {"window": "last", "short": "last", "share": "last", "prefix": "first"}
"""The fields that set which tokens of a prompt stay, and the argument of `protected` that does so while decoding."""
Waiting = Any
"""The gates' inputs of the last tokens; () if no token waits for its score."""


@struct
class FastKVzip(LateMetadata, StoredScore):
    """A gate's prediction of KVzip's score, which is stored with each entry (Sec. 3).

    A prompt is compacted chunk by chunk. The entries before its newest `window` tokens are compared once with a
    threshold for all layers and kv heads. Entries above it stay for good, and the window is kept whole. If the window
    alone exceeds the budget, only its newest tokens stay. While decoding, tokens wait until there are `buffer` of them,
    and one matrix product scores them all.
    """

    gates: Any = dataclasses.field(repr=False)
    """The gates, or the folder or the authors' .pt file that holds them."""
    window: int = host(default=4096)
    """The number of a prompt's newest tokens that a compaction passes over."""
    short: int = host(default=CHUNK)
    """The length of prompts in tokens below which `share` sets the window."""
    share: float = host(default=0.02)
    """The window as a share of the prompt's tokens, for prompts below `short` tokens."""
    prefix: int | None = host(default=None)
    """The number of a prompt's first tokens that stay in addition to the budget; None: those in common with `opening`,
    and at least the first 4."""
    opening: tuple[int, ...] = host(default=(), repr=False)
    """Token ids that come before a user's text, including a system prompt. Empty: those that the gates were trained
    with if they begin with the tokenizer's, else the tokenizer's."""
    tokenizer: Any = host(default=None, repr=False)
    """The model's tokenizer, whose chat template has the opening. It is not kept."""
    buffer: int = static(default=LAST)
    """The number of an answer's tokens that wait for their scores if answers are compacted; 1: none waits."""
    inputs: Any = dataclasses.field(default=None, repr=False, metadata={"static": True})
    """The gates' input, one of `gate.INPUTS`; by default the folder's, else the hidden states."""
    made_for: MadeFor | None = remembered()
    """The model that the folder's gates were made for; None: it does not say."""
    name = "fast_kvzip"

    def __post_init__(self):
        gates, description = self.gates, {}
        if isinstance(gates, str | Path):
            gates, description = load_gates(gates)
        if not isinstance(gates, SinkGate):
            raise UserError(
                f"{self.name}: gates must be a folder or a file of gates or a SinkGate, got {shown(gates)}"
            )
        chosen = description.get("inputs", "hidden") if self.inputs is None else self.inputs
        one_of(self.name, "inputs", chosen, INPUTS)
        assign(
            self,
            gates=gates,
            inputs=chosen,
            window=whole_number(self.name, "window", self.window, 0),
            short=whole_number(self.name, "short", self.short, 0),
            share=real_number(self.name, "share", self.share, 0.0, 1.0),
            prefix=None if self.prefix is None else whole_number(self.name, "prefix", self.prefix, 0),
            opening=self._opening(description.get("opening", ())),
            tokenizer=None,
            buffer=whole_number(self.name, "buffer", self.buffer),
            made_for=MadeFor.described(description),
        )

    def _opening(self, trained: Any) -> tuple[int, ...]:
        """Return the token ids before a user's text, given those that the gates were trained with."""
        given, trained = (token_ids(self.name, "opening", ids) for ids in (self.opening, trained))
        template: tuple[int, ...] = ()
        if self.tokenizer is not None:
            check_tokenizer(self.name, self.tokenizer)
            template = opening(self.tokenizer)
        # the trained opening may have an instruction after the template's own tokens
        return given or (trained if trained[: len(template)] == template else template)

    def refusal(self, schedule: Schedule, stores_all: bool) -> str:
        trigger = schedule.trigger
        for field in dataclasses.fields(self) if trigger.while_decoding else ():
            if field.name in PROMPT_FIELDS and getattr(self, field.name) != field.default:
                return (
                    f"takes {field.name} only for prompts, got when={trigger.when!r}: while decoding the argument is "
                    f"protected.{PROMPT_FIELDS[field.name]}"
                )
        if stores_all:
            return ""
        return "divides a budget among ranges of a prompt, and an admission does not store all of its tokens"

    def check(self, model: Any) -> None:
        check_made_for(Sizes.of(self.gates, self.inputs), model)

    @property
    def needs(self) -> Needs:
        undecided = Undecided(self.window, self.short, self.share)
        prefix, opening = (FIRST, self.opening) if self.prefix is None else (self.prefix, ())
        last = max(LAST, self.pending)
        return Needs(last=last, first=FIRST, undecided=undecided, prefix=prefix, opening=opening)

    @property
    def usual_trigger(self) -> Trigger:
        return Trigger("chunk", chunk=CHUNK)

    @property
    def pending(self) -> int:
        return self.buffer if self.buffer > 1 else 0

    @property
    def for_prompts(self) -> Eviction:
        return changed(self, buffer=1)

    def observations(self, shape: Shape) -> Waiting:
        if not self.pending:
            return ()
        heads = () if self.inputs == "hidden" else (shape.kv_heads,)
        return jnp.zeros((shape.batch, self.pending, *heads, self.gates.width), shape.dtype)

    def record(self, step: Step) -> Waiting:
        return inputs(step, self.inputs) if self.pending else ()

    def numbers(self, state: tuple[()], step: Step, readout: Readout) -> Numbers:
        """Return the scores of a prompt's tokens at once. A single token that waits gets 0; `late` scores it."""
        if self.pending and step.hidden.shape[1] == 1:
            return {"score": jnp.zeros_like(step.k[..., 0], jnp.float32)}
        return {"score": self.gates(inputs(step, self.inputs))}

    def late(self, observations: Waiting) -> Numbers:
        return {"score": self.gates(observations)}
