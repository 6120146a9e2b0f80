"""Check that an eviction scores and keeps the entries that a formula selects, for a real prefill."""

import numpy as np

from kvjax import inference
from tests.policies import published
from tests.policies.captured import LENGTHS, PAGE, entries, scored

RATIO = 0.3
"""Budget of the policies that are tested."""


def assert_published(policy, formula, model, prompts, captured, *, first=0, last=0, recent=0.0):
    """Check that every layer's scores `[k t]` are those of `formula(layer, kept)`, and that the heads hold the best of
    them.

    captured: attention's results by sequence and layer. first, last: numbers of entries that always stay, and so have
    no score to compare; recent: the share of the kept entries that are reserved for the last ones.
    """
    scores = scored(model, policy, prompts)
    cache = inference.prefill(model, prompts, policy=policy, page_size=PAGE)
    for b, layers in enumerate(captured):
        length, kept = LENGTHS[b], int(RATIO * LENGTHS[b])
        place = np.arange(length)
        free = (place >= first) & (place < length - max(last, int(recent * kept)))
        for layer, c in enumerate(layers):
            want, got = formula(c, kept), scores[layer, b, :, -length:]
            np.testing.assert_allclose(got[:, free], want[:, free], rtol=1e-5, atol=1e-5)
            stays = published.best(np.where(free, want, np.inf), kept)
            for head, (keys, mask) in enumerate(zip(c.k, stays, strict=True)):
                np.testing.assert_allclose(entries(cache, layer, b, head), keys[mask], atol=1e-4)
