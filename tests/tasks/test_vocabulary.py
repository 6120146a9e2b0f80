"""Test the bytes that tokens stand for."""

from kvjax.tasks import (
    builtin_text,
    heldout_files,
)


def test_token_bytes_are_the_bytes_of_the_decoded_text(vocabulary):
    sources = list(heldout_files().values())
    ends = len(sources[1::2])
    text = builtin_text("evaluate")
    assert vocabulary.bytes_of(text) == sum(len(s.encode()) for s in sources[1::2])
    assert int((text == vocabulary.end).sum()) == ends
