"""The views of one layer that a policy's methods get: its shape, the tokens of a call, and the stored entries."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8, Int32, Shaped, UInt16

from kvjax.struct import static, struct


@dataclass(frozen=True)
class Shape:
    """The part of a layer that one device holds."""

    batch: int
    """The number of sequences."""
    kv_heads: int
    """The number of kv heads."""
    group: int
    """The number of query heads of each kv head."""
    head_dim: int
    """The width of queries, keys and values."""
    dtype: Any
    """The dtype of queries, keys and values."""


@struct
class Step:
    """One layer's view of the tokens being run."""

    hidden: Float[Array, "b t d"]
    """The layer's input after its attention norm."""
    q: Float[Array, "b n t h"]
    """Queries after RoPE."""
    k: Float[Array, "b k t h"]
    """Keys after RoPE."""
    q_pre: Float[Array, "b n t h"]
    """Queries before RoPE, after QK-norm if the model has one."""
    k_pre: Float[Array, "b k t h"]
    """Keys before RoPE, after QK-norm if the model has one."""
    v: Float[Array, "b k t h"]
    """Values."""
    position: Int[Array, "b t"]
    """The tokens' positions in their sequences, −1 for padding."""
    layer: Int[Array, ""]
    """The layer's index among those with full attention."""
    head: Int[Array, " k"]
    """The index of each kv head in the whole model. A device that holds a part of the heads sees its part."""
    token: Int[Array, "b t"] | None = None
    """The token ids; None if the call runs no policy."""
    sink: Float[Array, " n"] | None = None
    """An additional logit of each query head in every softmax (an attention sink); None: there is none."""
    earlier: tuple[Float[Array, "b k t h"], Float[Array, "b k t h"]] | None = None
    """Keys, after RoPE, and values of the tokens `Admission.revisits` positions before these, with zeros for those
    before the first; None: the admission revisits none."""

    def without_padding(self) -> "Step":
        """Return a copy with zeros for padding. NaN in padding would stay NaN even under a weight of zero."""
        real = self.position[:, None, :, None] >= 0
        names = "q", "k", "q_pre", "k_pre", "v"
        heads = {name: jnp.where(real, getattr(self, name), 0) for name in names}
        return dataclasses.replace(self, hidden=jnp.where(real[:, 0], self.hidden, 0), **heads)

    def revisiting(self, k: Float[Array, "b k r h"], v: Float[Array, "b k r h"]) -> "Step":
        """Return a copy with `earlier`. `k` and `v` belong to the `r` tokens that begin `Admission.revisits` positions
        before the call. `r` is that distance, or the number of the call's tokens if that is less. The call's own tokens
        follow."""
        tokens = self.k.shape[2]
        k, v = (jnp.concatenate(x, 2)[:, :, :tokens] for x in ((k, self.k), (v, self.v)))
        return dataclasses.replace(self, earlier=(k, v))


@struct
class Readout:
    """The results of one layer's attention, for methods that write entry metadata."""

    lse: Float[Array, "b n t"]
    """The log-sum-exp of each query's logits over all keys that it saw."""
    valid: Int[Array, " b"]
    """The number of the call's tokens that are real, by sequence."""
    pool: Float[Array, "p page kv"] | UInt16[Array, "p page kv"] | Int8[Array, "p page kv"]
    """The pages of entries."""
    page_table: Int[Array, "b k c"]
    """The pages of the retained entries before the call. An index one past the pool's end means no page."""
    length: Int[Array, "b k"]
    """The number of retained entries before the call."""
    chosen: Bool[Array, "b k c"] | None
    """The mask of the pages in `page_table` that were read; None: all were read."""
    scale: Int32[Array, "p page"] | None
    """The scales of int8 entries (`pallas_kernels.int8_entries`); None: entries are floats."""
    key_scale: Float[Array, "b k h"] | None
    """The factors by which queries are multiplied where keys are int8 numbers; None: keys are floats."""
    dtype: Any = static()
    """The dtype of the entries; the pool may hold their bits as integers."""


def scaled_queries(
    q: Float[Array, "b n t h"], key_scale: Float[Array, "b k h"] | None
) -> Float[Array, "b n t h"]:
    """Return queries to multiply with stored keys. For int8 keys they include the keys' scale
    (`kvjax.cache.LayerCache`)."""
    if key_scale is None:
        return q
    group = q.shape[1] // key_scale.shape[1]
    return (q * jnp.repeat(key_scale, group, 1)[:, :, None]).astype(q.dtype)


@struct
class Stored:
    """One layer's retained entries, to be scored. Each head cache is in order of position, with its newest entry at the
    right end."""

    k: Float[Array, "b k s h"]
    """Keys as they were written, after RoPE. Keys, values and metadata are unspecified where there is no entry."""
    v: Float[Array, "b k s h"]
    """Values as they were written."""
    place: Int[Array, "b k s"]
    """The index of an entry in its head cache, from 0; negative where there is none."""
    scored: Bool[Array, "b k s"]
    """The mask of the entries that are scored together: all stored entries, or those of a chunk."""
    eligible: Bool[Array, "b k s"]
    """The mask of the scored entries that compete for places. It excludes the newest entries that are dropped in any
    case or that the next compaction looks at."""
    forced: Bool[Array, "b k s"]
    """The mask of the entries that stay whatever their scores."""
    count: Int[Array, "b k_or_1"]
    """The number of eligible entries that stay in this layer, for each kv head or on average."""
    seen: Int[Array, " b"]
    """The number of tokens so far."""
    output: Float[Array, "n h d"]
    """The output projection of these query heads."""
    frequencies: Float[Array, " pairs"]
    """RoPE's frequency of each rotated pair, in radians per position."""
    rope_scale: Float[Array, ""]
    """The factor of RoPE's cosines and sines."""
    layer: Int[Array, ""]
    """The layer's index among those with full attention."""
    head: Int[Array, " k"]
    """The index of each kv head, as in `Step`."""
    metadata: dict[str, Shaped[Array, "b k s"]]
    """The method's own metadata of the entries, by name."""
    observations: Any
    """The observation buffer of the last tokens (`Observer.record`), [b w d] or [b n w d], oldest token first."""
    causal: bool = static()
    """True if the last entries of a head cache belong to the observed queries, because every token is stored as it
    comes. Otherwise these entries are still in the local window, or not stored, and no stored entry is newer than the
    queries."""


@struct
class PassEntries:
    """One layer's stored entries that a reconstruction pass looks at (`Reconstruction.passes`): first entries at the
    start of the sequence, then the entries of the pass's part."""

    k: Float[Array, "b k s h"]
    """Keys as they were written, after RoPE. Keys and values are unspecified where there is no entry."""
    v: Float[Array, "b k s h"]
    """Values as they were written."""
    exists: Bool[Array, "b s"]
    """True for places that hold an entry."""
    first: int = static()
    """The number of places for the start of the sequence."""
    valid: Int[Array, " b"]
    """The number of the pass's tokens that are real, by sequence; 0: the sequence has no such pass."""
    output: Float[Array, "n h d"]
    """The output projection of these query heads."""
