"""All tasks by name. A new suite is one file and an entry in `SUITES`."""

from kvjax.errors import UserError, nearest
from kvjax.tasks import contests, helmet, kvjax_tasks, longbench, longproc, ruler, scbench
from kvjax.tasks.suite import Dataset, Inputs, Suite

SUITES = tuple(
    module.SUITE for module in (kvjax_tasks, ruler, contests, longbench, scbench, helmet, longproc)
)
TASKS: dict[str, Suite] = {name: suite for suite in SUITES for name in suite.tasks}


def suite_of(task: str) -> Suite:
    """Return the suite of a task. Raises UserError, with the nearest names, for an unknown task."""
    if task not in TASKS:
        near = nearest(task, TASKS) or list(TASKS)
        raise UserError(f"--tasks: unknown task {task!r}; the nearest known: {', '.join(near)}")
    return TASKS[task]


def open_task(name: str, inputs: Inputs) -> Dataset:
    """Return the dataset of a task for a model.

    Raises UserError for an unknown task, a task that the model cannot have, or a missing or invalid file.
    """
    return suite_of(name).open(name, inputs)


def check_data(names: list[str]) -> None:
    """Raise UserError, with the nearest names, for a name in --data that no suite reads."""
    known = sorted({name for suite in TASKS.values() for name in suite.data})
    for name in names:
        if name not in known:
            near = nearest(name, known) or known
            raise UserError(f"--data: unknown name {name!r}; the nearest known: {', '.join(near)}")
