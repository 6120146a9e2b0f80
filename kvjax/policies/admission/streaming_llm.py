"""StreamingLLM: the first tokens and the last ones (arXiv:2309.17453). Keys keep their original positions."""

import numpy as np

from kvjax.errors import UserError
from kvjax.mesh import put
from kvjax.policies.admission.head_pattern import HeadPattern
from kvjax.policies.policy import Policy, check_window


def streaming_llm(*, layers: int, kv_heads: int, window: int, sink: int = 4) -> Policy:
    """Every head keeps the first `sink` tokens and the last `window`; sink 0 is plain local attention."""
    if sink < 0:
        raise UserError(f"streaming_llm: sink must be at least 0, got {sink}")
    pattern = HeadPattern(
        put(np.zeros((layers, kv_heads), bool), None, "tensor"), put(np.full(layers, sink, np.int32))
    )
    return Policy(pattern, name="streaming_llm", window=check_window("streaming_llm", window))
