"""A row of RULER's own data as a draft, in either of the two forms in which it is published.

As RULER's programs write it: `input`, `outputs` and sometimes `answer_prefix`. `input` holds context and question in
one. All thirteen tasks end with their question, on a line that starts with one of `QUESTION_STARTS`; there it is cut.
Where the end has no such line, nothing is: the draft's context is empty, the whole input is its question, and it can
only be evaluated question-aware. Without `answer_prefix` the answer's beginning is part of `input`, the question's end.

As NVIDIA kvpress reads it from the hub: `context`, `question`, `answer` and sometimes `answer_prefix` and
`max_new_tokens` (of the answer). There the context is cut off already.

Data may be written with a model's chat template. No task begins with what `TEMPLATE_START` finds, templates do: such a
draft is read `as_is`.
"""

import re
from collections.abc import Mapping
from typing import Any

from kvjax.errors import whole_number
from kvjax.tasks.datasets import row_text, row_texts
from kvjax.tasks.prompt import Draft, DraftQuestion

QUESTION_STARTS = ("Question:", "What is ", "What are ")
LONGEST_QUESTION = 1500
"""Characters, with a chat template's end. What is further from the end is part of the context."""

TEMPLATE_START = re.compile(
    r"""\s*(
        <[|｜]?[\w ▁]+[|｜]?>        # <s>, <|im_start|>, <start_of_turn>, <BOS_TOKEN>
        | \[(INST|gMASK)\]
        | (USER|User|Human|System):
        | A\ chat\ between\ a\       # Vicuna
        | You\ are\ a\ helpful\      # LWM
    )""",
    re.VERBOSE,
)
"""A mark of a turn or of a text's beginning, or one of the two system prompts of RULER's templates that have none."""


def published_draft(row: Mapping[str, Any], task: str, reserved: int, at: str) -> Draft:
    """A row of published data as a draft.

    Args:
        row: needs `input` (a string) and `outputs` (a list of strings), or `context`, `question` (strings) and `answer`
            (a list of strings, or one).
        task: one of the thirteen; its kind, and how it is scored.
        reserved: answer tokens, where the row does not say.
        at: where the row stands, for errors.

    Raises:
        UserError: a field that is missing or of another kind.
    """
    prefix = row_text(row, "answer_prefix", at) if row.get("answer_prefix") is not None else ""
    if "context" in row:
        context, question = row_text(row, "context", at), row_text(row, "question", at)
        expected = row_texts(row, "answer", at, single=True)
    else:
        text = row_text(row, "input", at).removesuffix(prefix)
        cut = 1 + max(text.rfind(f"\n{start}", -LONGEST_QUESTION) for start in QUESTION_STARTS)
        context, question = text[:cut], text[cut:]
        expected = row_texts(row, "outputs", at)
    if row.get("max_new_tokens") is not None:
        reserved = whole_number(at, "`max_new_tokens`", row["max_new_tokens"])
    scoring = "any" if task.startswith("qa_") else "all"
    one = DraftQuestion(question, prefix, expected, scoring, reserved, task)
    templated = TEMPLATE_START.match(context or question) is not None
    return Draft(context, (one,), as_is=templated)
