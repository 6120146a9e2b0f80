"""Checks that a run can end with a report, made before it starts."""

from typing import TYPE_CHECKING

from kvjax.errors import UserError
from kvjax.train.recipe import Recipe

if TYPE_CHECKING:
    from kvjax.policies import Policy


def measured(policy: "Policy") -> bool:
    """Return True if `kvjax.evaluate` can measure the policy."""
    return not policy.compacts_answers


def without_report(policy: "Policy | None" = None) -> str:
    """Return why this run can have no report, an empty text if it can. `policy`: the one that it deploys, if known."""
    import jax

    if jax.process_count() > 1:
        return f"one process makes it, and this run has {jax.process_count()}"
    if policy is not None and not measured(policy):
        return f"{policy.name} compacts while it decodes, which is not measured"
    return ""


def check_report(config: Recipe, policy: "Policy | None" = None) -> str:
    """Return the line that says that a run cannot have its report, empty if it can or if none is wanted.

    Raises:
        UserError: the options ask for a report that cannot be made.
    """
    why = "" if config.report == "none" else without_report(policy)
    if why and (config.report == "full" or config.tasks):
        told = "--report full" if config.report == "full" else f"--tasks {' '.join(config.tasks)}"
        raise UserError(f"{told}: there can be no report ({why}): leave it out")
    return f"there will be no report: {why}" if why else ""
