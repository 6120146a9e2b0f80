"""Settings that follow from others."""

from kvjax.evaluate.config import default_chunk, default_observed


def test_defaults_are_the_documented():
    assert (default_chunk(1024), default_chunk(10**6), default_chunk(3)) == (256, 32768, 1)
    assert (default_observed(256), default_observed(32768), default_observed(8)) == (16, 64, 1)
