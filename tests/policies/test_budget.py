"""Test how layers share a budget, against PyramidKV's and PruLong's published numbers."""

import numpy as np
import pytest

from kvjax.errors import UserError
from kvjax.policies import Size
from kvjax.policies.budget import Shares, chunk_pyramid


def test_a_chunk_shorter_than_the_window_is_kept_whole_in_every_layer():
    np.testing.assert_array_equal(Shares(pyramid=2.0).chunk_counts([3], [3], [6], 3, 6), [[3], [3], [3]])


def test_many_layers_share_the_budget_of_a_small_chunk():
    """The paper's code rounds the step between layers down, here to nothing: all layers would get the first one's
    budget."""
    budgets = chunk_pyramid(6, 64, 0, 36, 0, 20.0)
    assert (budgets[0], budgets[-1]) == (12, 0)
    assert sum(budgets) / 36 == pytest.approx(6, abs=0.5)


def test_a_pyramid_leaves_every_layer_its_protected_entries():
    """Each layer keeps at least 12 of 30. With β 20 the last layer would get 2, and sinks and the newest entries would
    compete."""
    assert Shares(pyramid=20.0).counts([30.0], [60], 3, [12])[:, 0].tolist() == [48, 30, 12]
    assert Shares(pyramid=20.0).counts([30.0], [600], 3, [12])[:, 0].tolist() == [30, 30, 30]


def test_chunk_pyramids_match_the_papers_code():
    """The worked example has 32 layers and 32,768 tokens, 30% kept, in the naive and the patched form."""
    kept = int(0.3 * 32768)
    budgets = chunk_pyramid(kept - 64, 32768 - 64, 64, 32, 64, 20.0)
    assert (budgets[0], budgets[31]) == (19044 + 64, 506 + 64)
    assert sum(budgets) / 32 == 9775 + 64
    patched = chunk_pyramid(kept, 32768, 0, 32, 64, 20.0)
    low = kept // 20
    assert patched[0] == 2 * kept - low
    assert chunk_pyramid(7, 64, 0, 4, 0, 20.0) == [14, 10, 6, 2]
    # above one half a pyramid does not fit
    assert chunk_pyramid(70, 100, 0, 4, 8, 20.0) == [70] * 4


def test_an_invalid_size_is_refused_in_one_line():
    with pytest.raises(UserError) as error:
        Size("2GiG")
    assert str(error.value) == "budget: size must be a whole number of at least 1, got '2GiG'"
