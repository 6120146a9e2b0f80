"""Checks, before a run starts, that it can end with a report."""

from typing import TYPE_CHECKING

from kvjax.errors import UserError
from kvjax.train.recipe import Recipe

if TYPE_CHECKING:
    from kvjax.policies import Policy


def can_measure(policy: "Policy") -> bool:
    """Return True if `kvjax.evaluate` can measure the policy."""
    return not policy.compacts_answers


def reason_without_report(policy: "Policy | None" = None) -> str:
    """Return why this run cannot have a report, an empty text if it can. `policy`: its deployed policy, if known."""
    import jax

    if jax.process_count() > 1:
        return f"one process makes it, and this run has {jax.process_count()}"
    if policy is not None and not can_measure(policy):
        return f"{policy.name} compacts while it decodes, which is not measured"
    return ""


def check_report(recipe: Recipe, policy: "Policy | None" = None) -> str:
    """Return a line that says that a run cannot have its report, empty if it can or if no report is asked for.

    Raises:
        UserError: the options ask for a report that cannot be made.
    """
    reason = "" if recipe.report == "none" else reason_without_report(policy)
    if reason and (recipe.report == "full" or recipe.tasks):
        option = "--report full" if recipe.report == "full" else f"--tasks {' '.join(recipe.tasks)}"
        raise UserError(f"{option}: there can be no report ({reason}): leave it out")
    return f"there will be no report: {reason}" if reason else ""
