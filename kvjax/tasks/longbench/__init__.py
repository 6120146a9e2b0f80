"""LongBench (Bai et al., ACL 2024, arXiv:2308.14508) and LongBench-E in their published form: a context, then one
question, with the official prompts, answer lengths and metrics.

tasks: prompts and metrics, an entry of `TASKS` for each; scores, chinese: the metrics; records: published rows.
"""

from kvjax.tasks.benchmark import BenchmarkSamples
from kvjax.tasks.longbench.records import DATA, OPTION, longbench_examples
from kvjax.tasks.longbench.tasks import NAMES, longbench_task
from kvjax.tasks.suite import Dataset, Inputs, Suite

PREFIX = "longbench_"


def _open(name: str, inputs: Inputs) -> Dataset:
    task, data = name.removeprefix(PREFIX), inputs.data.get(DATA)
    examples = longbench_examples(task, data)
    where = f"{OPTION} {data or 'on the hub'}"
    return BenchmarkSamples(task, where, examples, inputs.encode, longbench_task(task).metric.name)


SUITE = Suite(tuple(PREFIX + name for name in NAMES), _open, data=(DATA,))

__all__ = ["NAMES", "SUITE", "longbench_examples", "longbench_task"]
