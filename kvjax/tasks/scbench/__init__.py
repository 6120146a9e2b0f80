"""SCBench (Li et al., ICLR 2025, arXiv:2412.10319) in its published form: a context, then several questions, each by
itself or in turn, with the official prompts, answer lengths and metrics.

tasks: prompts, task by task; scores: the metrics, for code with code; records: published rows as drafts, and the modes.
"""

from kvjax.tasks.scbench.records import OPTION, TURNS, scbench_drafts
from kvjax.tasks.scbench.tasks import TASKS

__all__ = ["OPTION", "TASKS", "TURNS", "scbench_drafts"]
