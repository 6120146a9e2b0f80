"""SCBench's tasks: their prompts, answer lengths and metrics. Prompts are cut where the context ends.

The prompts are the published ones (scbench/eval_utils.py, the templates of the multi-request mode), word for word. Two
things differ. The official context of scbench_mf begins with the first question; here it does not, so that it can be
read before any question is known. And later turns have the wording of the first. In the official program, later turns
ask for a choice as "The letter of …" without a chat template, and a summary begins "This paper" with one.
"""

from dataclasses import dataclass

from kvjax.tasks.prompt import Scoring
from kvjax.tasks.scbench.scores import (
    character_overlap,
    contains_expected,
    first_integer,
    share_contained,
    summary_overlap,
)

KV, FUNCTION, SUMMARY, PASSKEY = "scbench_kv", "scbench_repoqa", "scbench_summary", "scbench_passkey"
"""Kinds of questions that several tasks have."""
CONTEXT, ASKED = "{context}", "{input}"


@dataclass(frozen=True)
class SCBenchTask:
    """A task, with its prompt in two parts: the context, and the question after it."""

    reserved: int | dict[str, int]
    """The most tokens of an answer, by kind of question if a task has several kinds."""
    metric: str
    """Description of the score."""
    context: str = CONTEXT
    """The first part, with the field `{context}`."""
    question: str = ASKED
    """The second part, with `{input}`; also `{A}` to `{D}` for multiple choice and `{target}` in scbench_mf."""

    def reserved_for(self, kind: str) -> int:
        return self.reserved if isinstance(self.reserved, int) else self.reserved[kind]


HELD = "answers that hold the expected string"
PASS = "functions repeated (pass@1 at a BLEU of 0.8)"
ROUGE = "ROUGE-L of the summary's lines"
BOOK = "Read the book and answer the question."

TASKS = {
    KV: SCBenchTask(
        150,
        HELD,
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}",
    ),
    "scbench_prefix_suffix": SCBenchTask(150, HELD),
    "scbench_vt": SCBenchTask(30, "share of the expected strings that the answer holds"),
    FUNCTION: SCBenchTask(
        1024,
        PASS,
        "Based on the function description and code context, please retrieve and repeat the exact described function "
        "from the code context in a code block wrapped by ```:\n\n{context}",
    ),
    "scbench_qa_eng": SCBenchTask(
        40, HELD, f"{BOOK} Be very concise in your answer.\n\n{{context}}", "Question: {input}\nAnswer:"
    ),
    "scbench_qa_chn": SCBenchTask(
        40, "F1 of the characters", "阅读以下书籍然后回答问题。\n\n{context}", "问题：{input}\n答案："
    ),
    "scbench_choice_eng": SCBenchTask(
        40,
        "choices right",
        f"{BOOK}\n\n{{context}}",
        "Question: {input}\nA. {A}\nB. {B}\nC. {C}\nD. {D}\n\nThe the correct answer is",
    ),
    "scbench_many_shot": SCBenchTask(10, HELD),
    SUMMARY: SCBenchTask(200, ROUGE),
    "scbench_mf": SCBenchTask(5, "first numbers right", question="What is {target}?\n\n{input}"),
    "scbench_summary_with_needles": SCBenchTask(
        {SUMMARY: 800, PASSKEY: 15}, f"{ROUGE}, and numbers found right"
    ),
    "scbench_repoqa_and_kv": SCBenchTask({FUNCTION: 1024, KV: 80}, f"{PASS}, and {HELD}"),
}

SCORING: dict[str, Scoring | str] = {
    KV: contains_expected,
    "scbench_prefix_suffix": contains_expected,
    "scbench_vt": share_contained,
    "scbench_qa_eng": "any",
    "scbench_qa_chn": character_overlap,
    "scbench_many_shot": "any",
    SUMMARY: summary_overlap,
    PASSKEY: first_integer,
}
"""Scorings by kind of question. Kinds whose scoring depends on the row are scored in `records`."""
