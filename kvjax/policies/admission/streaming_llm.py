"""StreamingLLM: the first tokens and the last ones (arXiv:2309.17453). Keys keep their original positions."""

import numpy as np

from kvjax.errors import whole_number
from kvjax.policies.admission.head_pattern import HeadPattern
from kvjax.policies.policy import Policy


def streaming_llm(*, window: int, sink: int = 4) -> Policy:
    """Every head keeps the first `sink` tokens and the last `window`; sink 0 is plain local attention."""
    where = "streaming_llm"
    sink, window = whole_number(where, "sink", sink, 0), whole_number(where, "window", window)
    pattern = HeadPattern(np.zeros((1, 1), bool), np.array(sink, np.int32))
    return Policy(pattern, name="streaming_llm", window=window)
