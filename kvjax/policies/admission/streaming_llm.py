"""StreamingLLM: the first tokens and the last ones (arXiv:2309.17453). Keys keep their original positions."""

import dataclasses
from typing import Any

import numpy as np

from kvjax.policies.admission.head_pattern import HeadPattern
from kvjax.policies.numbers import whole_array
from kvjax.struct import assign, struct


@struct
class StreamingLLM(HeadPattern):
    """Admission of the first `sink` tokens alone: every head keeps them and the local window. `sink=0` is plain local
    attention.

    The default window is the paper's 1020 tokens (Table 1). With 4 sinks this makes 1024 entries.
    """

    pattern: Any = dataclasses.field(default_factory=lambda: np.zeros((1, 1), bool), init=False, repr=False)
    """A pattern without retrieval heads."""
    sparsity: None = dataclasses.field(default=None, init=False, metadata={"static": True})
    """Unused, since the pattern is fixed."""
    sink: Any = 4
    window: int = dataclasses.field(default=1020, init=False, metadata={"static": True})
    """The window of policies that name none."""
    name = "streaming_llm"

    def __post_init__(self):
        assign(self, sink=whole_array(self.name, "sink", self.sink, 0))
