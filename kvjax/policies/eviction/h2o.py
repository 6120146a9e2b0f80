"""H2O (Zhang et al., 2023, arXiv:2306.14048): heavy hitters, the entries that all queries so far attended to."""

from jaxtyping import Array, Float

from kvjax.errors import real_number
from kvjax.policies.eviction.method import Method
from kvjax.policies.eviction.unobserved import Unobserved
from kvjax.step import Stored
from kvjax.struct import struct


@struct
class H2O(Unobserved):
    """The sum of an entry's attention over all queries that saw it, in the prompt and the answer (Sec. 4.1, Alg. 1),
    averaged over a group's query heads."""

    def score(self, state: tuple[()], stored: Stored) -> Float[Array, "b k s"]:
        assert stored.attended is not None
        return stored.attended


def h2o(*, recent: float = 0.5) -> Method:
    """`recent`: the share of the budget that goes to the newest entries whatever their attention."""
    recent = real_number("h2o", "recent", recent, 0.0, 1.0)
    return Method(H2O(), recent=recent, attended=True)
