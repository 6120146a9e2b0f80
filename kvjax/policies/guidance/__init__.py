"""Guidance: a text that stands for the coming questions. It is read after a context to look at it, and removed again.
The files in this folder are the texts of OracleKV's Table A4."""

from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from kvjax.errors import UserError, check_unicode, shown
from kvjax.policies.eviction.texts import check_tokenizer
from kvjax.policies.trigger import Trigger

TEXTS = {file.stem: file for file in sorted(Path(__file__).parent.glob("*.txt"))}
"""The files of the published texts by name: G1 to G7 are general, T1 is for summaries, and T2 is for numbers."""
BEFORE = "\n\n"
"""The separator between a context and its guidance."""


def text(guidance: str) -> str:
    """Return a published text by its name, or else the text that was given."""
    return TEXTS[guidance].read_text("utf-8").strip() if guidance in TEXTS else guidance


def token_ids(guidance: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids of guidance: one of `TEXTS`, any other text, or ids. A text comes after an empty line and is
    tokenized by itself, so that the context's own tokens do not change.

    Raises:
        UserError: if guidance is empty or neither a text nor ids, or if there is a text without a valid tokenizer.
    """
    if not isinstance(guidance, str):
        ids = guidance.tolist() if hasattr(guidance, "tolist") else guidance
        is_list = isinstance(ids, Sequence) and not isinstance(ids, bytes | bytearray)
        if not is_list or not ids or not all(isinstance(x, Integral) for x in ids):
            given = "none" if isinstance(ids, Sequence) and not ids else shown(guidance)
            raise UserError(f"guidance must be a text or at least one token id, got {given}")
        return Trigger(observers=ids).guidance
    if not guidance.strip():
        raise UserError(
            f"guidance must be one of {', '.join(TEXTS)}, a text or token ids, got the text {guidance!r}"
        )
    if tokenizer is None:
        raise UserError(
            f"guidance={shown(guidance)} is a text, which needs tokenizer= (or give its token ids)"
        )
    check_tokenizer("guidance", tokenizer)
    check_unicode(guidance, "guidance")
    return tuple(tokenizer(BEFORE + text(guidance), add_special_tokens=False, verbose=False)["input_ids"])
