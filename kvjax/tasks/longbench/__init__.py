"""LongBench (Bai et al., ACL 2024, arXiv:2308.14508) and LongBench-E in their published form: a context, then one
question, with the official prompts, answer lengths and metrics.

tasks: prompts and metrics, a task an entry of `TASKS`; scores, chinese: the metrics; records: published rows as drafts.
"""

from kvjax.tasks.benchmark import BenchmarkSamples
from kvjax.tasks.longbench.records import DATA, OPTION, longbench_drafts
from kvjax.tasks.longbench.tasks import NAMES, longbench_task
from kvjax.tasks.suite import Dataset, Inputs, Suite

PREFIX = "longbench_"


def _open(name: str, inputs: Inputs) -> Dataset:
    own, data = name.removeprefix(PREFIX), inputs.data.get(DATA)
    drafts = longbench_drafts(own, data)
    where = f"{OPTION} {data or 'on the hub'}"
    return BenchmarkSamples(own, where, drafts, inputs.encode, longbench_task(own).metric.name)


SUITE = Suite(tuple(PREFIX + name for name in NAMES), _open, data=(DATA,))

__all__ = ["NAMES", "SUITE", "longbench_drafts", "longbench_task"]
