"""Tests of entry metadata, the numbers stored with each entry, against a loop over head caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.metadata import appended, in_front

PAGE, PAGES, COLUMNS = 3, 20, 5


@pytest.mark.parametrize("tokens", [1, 4, 7])
def test_appended_writes_the_next_places_only(tokens):
    """Numbers for which a head cache has no page or no column are dropped."""
    rng = np.random.default_rng(tokens)
    for _ in range(20):
        field = rng.standard_normal((PAGES, PAGE)).astype(np.float32)
        length, count = rng.integers(0, 15, (2, 2)), rng.integers(0, tokens + 1, (2, 2))
        table = np.full((2, 2, COLUMNS), PAGES, np.int32)
        pages = rng.permutation(PAGES)
        new = rng.standard_normal((2, 2, tokens)).astype(np.float32)
        wanted = field.copy()
        for b, k in np.ndindex(2, 2):
            used = min(-(-(length[b, k] + count[b, k]) // PAGE), COLUMNS)
            table[b, k, :used], pages = pages[:used], pages[used:]
            if rng.random() < 0.3 and used:
                table[b, k, used - 1] = PAGES
            for i in range(count[b, k]):
                column, offset = divmod(length[b, k] + i, PAGE)
                if column < COLUMNS and table[b, k, column] < PAGES:
                    wanted[table[b, k, column], offset] = new[b, k, i]
        arrays = (jnp.asarray(x) for x in (field, table, length, new, count))
        np.testing.assert_array_equal(jax.jit(appended)(*arrays), wanted)


def test_appended_drops_numbers_if_the_table_has_no_columns():
    field, nothing = jnp.ones((2, PAGE)), jnp.zeros((1, 1), jnp.int32)
    written = appended(field, jnp.zeros((1, 1, 0), jnp.int32), nothing, jnp.ones((1, 1, 4)), nothing + 4)
    np.testing.assert_array_equal(written, field)


def test_in_front_puts_chosen_numbers_first_in_order():
    x, chosen = jnp.array([[[5, 6, 7, 8]]]), jnp.array([[[False, True, False, True]]])
    np.testing.assert_array_equal(in_front(x, chosen), [[[6, 8, 0, 0]]])
