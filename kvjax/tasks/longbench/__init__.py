"""LongBench (Bai et al., ACL 2024, arXiv:2308.14508) and LongBench-E in their published form: a context, then one
question, with the official prompts, answer lengths and metrics.

tasks: prompts and metrics, task by task; scores, chinese: the metrics; records: published rows as drafts.
"""

from kvjax.tasks.longbench.records import OPTION, longbench_drafts
from kvjax.tasks.longbench.tasks import NAMES, longbench_task

__all__ = ["NAMES", "OPTION", "longbench_drafts", "longbench_task"]
