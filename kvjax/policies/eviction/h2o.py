"""H2O (Zhang et al., 2023, arXiv:2306.14048): heavy hitters, the entries that got most attention from all queries so
far."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvjax.errors import real_number
from kvjax.policies.base import Eviction, Metadata, Numbers, TokenMetadata
from kvjax.policies.schedule import Needs, Schedule
from kvjax.policies.views import Readout, Step, Stored, scaled_queries
from kvjax.struct import assign, host, struct
from pallas_kernels.attention_mass import attention_mass, paged_attention_mass

ENTRIES = 4096
"""The number of a head cache's stored entries that are processed at a time."""


@struct
class H2O(TokenMetadata, Eviction):
    """The sum of an entry's attention over all queries that saw it, in the prompt and the answer (Sec. 4.1, Alg. 1),
    averaged over a group's query heads."""

    recent: float = host(default=0.5)
    """The share of the budget that goes to the newest entries whatever their attention."""
    name = "h2o"

    def __post_init__(self):
        assign(self, recent=real_number(self.name, "recent", self.recent, 0.0, 1.0))

    @property
    def needs(self) -> Needs:
        return Needs(recent=self.recent)

    @property
    def metadata(self) -> Mapping[str, str]:
        return {"attention": "float32"}

    def refusal(self, schedule: Schedule, stores_all: bool) -> str:
        if stores_all:
            return ""
        return (
            "counts the attention that an entry gets from its first query on, and an admission's window does not "
            "count it"
        )

    def numbers(self, state: tuple[()], step: Step, readout: Readout) -> Numbers:
        """Return the attention that a call's tokens pay to each other."""
        q, options = _attention_options(step, readout)
        real = jnp.arange(q.shape[2]) < readout.valid[:, None]
        valid = jnp.broadcast_to(real[:, None], step.k.shape[:3])
        return {"attention": attention_mass(q, step.k.astype(q.dtype), valid=valid, **options)}

    def update(self, state: tuple[()], metadata: Metadata, step: Step, readout: Readout) -> Metadata:
        """Return the metadata with the attention that a call's tokens pay to the entries stored before the call.
        Entries are processed a block of pages at a time."""
        q, options = _attention_options(step, readout)
        q = scaled_queries(q, readout.key_scale)
        capacity, page_size, _ = readout.pool.shape
        table, columns = readout.page_table, readout.page_table.shape[-1]
        width = min(columns, -(-ENTRIES // page_size))
        table = table if readout.chosen is None else jnp.where(readout.chosen, table, capacity)
        table = jnp.pad(table, ((0, 0), (0, 0), (0, -columns % width)), constant_values=capacity)

        def block(i, sums):
            pages = lax.dynamic_slice_in_dim(table, i * width, width, 2)
            length = readout.length - i * width * page_size
            mass = paged_attention_mass(q, readout.pool, pages, length, scale=readout.scale, **options)
            return sums.at[pages].add(mass.reshape(*pages.shape, page_size), mode="drop")

        blocks = -(-readout.length.max() // (width * page_size))
        return metadata | {"attention": lax.fori_loop(0, blocks, block, metadata["attention"])}

    def score(self, state: tuple[()], stored: Stored) -> Float[Array, "b k s"]:
        return stored.metadata["attention"]


def _attention_options(step: Step, readout: Readout) -> tuple[Float[Array, "b n t h"], dict[str, Any]]:
    """Return the queries, and the options of `attention_mass` to count their attention. Padding pays no attention."""
    real = jnp.arange(step.q.shape[2]) < readout.valid[:, None]
    lse = jnp.where(real[:, None], readout.lse, -jnp.inf)
    return step.q.astype(readout.dtype), {"over": "sum", "group": "mean", "lse": lse}
