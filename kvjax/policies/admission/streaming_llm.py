"""StreamingLLM: the first tokens and the last ones (arXiv:2309.17453). Keys keep their original positions."""

import dataclasses
from typing import Any

import numpy as np

from kvjax.policies.admission.head_pattern import HeadPattern
from kvjax.policies.numbers import whole_array
from kvjax.struct import assign, struct


@struct
class StreamingLLM(HeadPattern):
    """Every head keeps the first `sink` tokens and the last of the window; sink 0 is plain local attention.

    A policy that names no window has one of 1020 tokens, which is the paper's (Table 1): with its 4 sinks 1024 entries.
    """

    pattern: Any = dataclasses.field(default_factory=lambda: np.zeros((1, 1), bool), init=False, repr=False)
    """No head is whole."""
    sparsity: None = dataclasses.field(default=None, init=False, metadata={"static": True})
    """Nothing is taken of a pattern."""
    sink: Any = 4
    window: int = dataclasses.field(default=1020, init=False, metadata={"static": True})
    """Of policies that name none."""
    name = "streaming_llm"

    def __post_init__(self):
        assign(self, sink=whole_array(self.name, "sink", self.sink, 0))
