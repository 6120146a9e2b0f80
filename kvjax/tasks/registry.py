"""Every task by its name. A suite is one line in `SUITES`, and one file."""

import difflib

from kvjax.errors import UserError
from kvjax.tasks import contests, helmet, longbench, longproc, own, ruler, scbench
from kvjax.tasks.suite import Dataset, Inputs, Suite

SUITES = tuple(one.SUITE for one in (own, ruler, contests, longbench, scbench, helmet, longproc))
TASKS: dict[str, Suite] = {name: suite for suite in SUITES for name in suite.tasks}


def suite_of(task: str) -> Suite:
    """Return the suite that a task belongs to. Raises UserError with the nearest names."""
    if task not in TASKS:
        near = difflib.get_close_matches(task, TASKS) or list(TASKS)
        raise UserError(f"--tasks: unknown task {task!r}; the nearest known: {', '.join(near)}")
    return TASKS[task]


def open_task(name: str, inputs: Inputs) -> Dataset:
    """Return a task's samples for a model. Raises UserError for an unknown task, a task that is not for the model, or a
    missing or invalid file."""
    return suite_of(name).open(name, inputs)


def check_data(names: list[str]) -> None:
    """Raise UserError, with the nearest known names, for a name of data that no suite reads."""
    known = sorted({name for suite in TASKS.values() for name in suite.data})
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known) or known
            raise UserError(f"--data: unknown name {name!r}; the nearest known: {', '.join(near)}")
