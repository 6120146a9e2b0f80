"""StreamingLLM: the first tokens and the last ones (arXiv:2309.17453). Keys keep their original positions."""

import numpy as np

from kvjax.errors import whole_number
from kvjax.mesh import put
from kvjax.policies.admission.head_pattern import HeadPattern
from kvjax.policies.policy import Policy


def streaming_llm(*, layers: int, kv_heads: int, window: int, sink: int = 4) -> Policy:
    """Every head keeps the first `sink` tokens and the last `window`; sink 0 is plain local attention."""
    where = "streaming_llm"
    shape = whole_number(where, "layers", layers), whole_number(where, "kv_heads", kv_heads)
    sink, window = whole_number(where, "sink", sink, 0), whole_number(where, "window", window)
    pattern = HeadPattern(put(np.zeros(shape, bool), None, "tensor"), put(np.full(shape[0], sink, np.int32)))
    return Policy(pattern, name="streaming_llm", window=window)
