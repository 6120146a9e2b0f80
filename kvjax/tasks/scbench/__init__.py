"""SCBench (Li et al., ICLR 2025, arXiv:2412.10319) in its published form: a context, then several questions, each by
itself or in turn, with the official prompts, answer lengths and metrics.

tasks: the prompts, with an entry of `TASKS` for each task; scores: the metrics; code: the function in an answer;
records: published rows, and the ways to ask their questions.
"""

from kvjax.tasks.benchmark import BenchmarkSamples
from kvjax.tasks.scbench.records import DATA, OPTION, scbench_examples
from kvjax.tasks.scbench.tasks import TASKS
from kvjax.tasks.suite import Dataset, Inputs, Suite


def _open(name: str, inputs: Inputs) -> Dataset:
    data = inputs.data.get(DATA)
    examples = scbench_examples(name, data, inputs.turns, inputs.encode)
    where = f"{OPTION} {data or 'on the hub'}"
    return BenchmarkSamples(name, where, examples, inputs.encode, TASKS[name].metric)


SUITE = Suite(tuple(TASKS), _open, data=(DATA,), takes_turns=True, note="{tasks}: {turns}.")

__all__ = ["SUITE", "TASKS", "scbench_examples"]
