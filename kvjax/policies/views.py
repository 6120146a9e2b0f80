"""What one layer shows a cache policy: its shape, the tokens of a call, and the entries that are stored."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt16

from kvjax.struct import static, struct


@dataclass(frozen=True)
class Shape:
    """What one device holds of a layer."""

    batch: int
    """Sequences."""
    kv_heads: int
    """Key and value heads."""
    group: int
    """Query heads of a kv head."""
    head_dim: int
    """Of queries, keys and values."""
    dtype: Any
    """Of queries, keys and values."""


@struct
class Step:
    """One layer's view of the tokens being run."""

    hidden: Float[Array, "b t d"]
    """The layer's input after its attention norm."""
    q: Float[Array, "b n t h"]
    """After RoPE."""
    k: Float[Array, "b k t h"]
    """After RoPE."""
    q_pre: Float[Array, "b n t h"]
    """Before RoPE, after QK-norm where the model has one."""
    k_pre: Float[Array, "b k t h"]
    """Before RoPE, after QK-norm where the model has one."""
    v: Float[Array, "b k t h"]
    """Of the tokens."""
    position: Int[Array, "b t"]
    """True token positions, −1 for padding."""
    layer: Int[Array, ""]
    """The layer's index."""
    head: Int[Array, " k"]
    """The index of each kv head in the whole model (on a device that holds a part of them, its part)."""
    token: Int[Array, "b t"] | None = None
    """The token ids; None where no policy runs."""
    earlier: tuple[Float[Array, "b k t h"], Float[Array, "b k t h"]] | None = None
    """The keys, after RoPE, and values of the tokens `Admission.revisits` before these, zeros for those before the
    first; None: the admission revisits none."""

    def without_padding(self) -> "Step":
        """With zeros for the tokens that are padding: times a weight of zero, NaN would be NaN."""
        real = self.position[:, None, :, None] >= 0
        names = "q", "k", "q_pre", "k_pre", "v"
        heads = {name: jnp.where(real, getattr(self, name), 0) for name in names}
        return dataclasses.replace(self, hidden=jnp.where(real[:, 0], self.hidden, 0), **heads)

    def revisiting(self, k: Float[Array, "b k r h"], v: Float[Array, "b k r h"]) -> "Step":
        """With the tokens `r` or more before these, given the keys and values of the first `r` of them, or of as many
        as there are tokens, as `earlier`."""
        tokens = self.k.shape[2]
        k, v = (jnp.concatenate(x, 2)[:, :, :tokens] for x in ((k, self.k), (v, self.v)))
        return dataclasses.replace(self, earlier=(k, v))


@struct
class Readout:
    """What one layer's attention found, for methods that write numbers beside entries."""

    lse: Float[Array, "b n t"]
    """The log-sum-exp of each query's logits over all that it saw."""
    valid: Int[Array, " b"]
    """How many of the call's tokens are real, by sequence."""
    pool: Float[Array, "p page kv"] | UInt16[Array, "p page kv"]
    """The pages of entries."""
    page_table: Int[Array, "b k c"]
    """The pages of the global region before the call. One past the pool's end is none."""
    length: Int[Array, "b k"]
    """Entries in the global region before the call."""
    chosen: Bool[Array, "b k c"] | None
    """The pages of it that were read; None: all."""
    dtype: Any = static()
    """Of the entries; the pool may hold their bits."""


@struct
class Stored:
    """One layer's entries of the global region, to be scored: each row in order of position, its newest entry last (at
    the right end)."""

    k: Float[Array, "b k s h"]
    """As it was written, after RoPE; unspecified where there is no entry, as all that follows."""
    v: Float[Array, "b k s h"]
    """As it was written."""
    place: Int[Array, "b k s"]
    """An entry's place in its row, from its first one on; negative where there is none."""
    scored: Bool[Array, "b k s"]
    """The entries that are scored together: all that there are, or those of a chunk."""
    eligible: Bool[Array, "b k s"]
    """Those of them among which some will go: not the newest that go anyway, or that the next compaction looks at."""
    forced: Bool[Array, "b k s"]
    """Entries that stay whatever their score."""
    count: Int[Array, "b k_or_1"]
    """How many eligible entries are to stay in this layer, of each kv head or on average."""
    seen: Int[Array, " b"]
    """Tokens so far."""
    output: Float[Array, "n h d"]
    """The output projection of these query heads."""
    frequencies: Float[Array, " pairs"]
    """RoPE's radians a position of each rotated pair."""
    rope_scale: Float[Array, ""]
    """What RoPE multiplies cosines and sines by."""
    layer: Int[Array, ""]
    """Its index."""
    head: Int[Array, " k"]
    """As in `Step`."""
    planes: dict[str, Shaped[Array, "b k s"]]
    """The method's own numbers of the entries."""
    trail: Any
    """What the method remembers of the last tokens (`Observer.trace`), [b w d] or [b n w d], the oldest first."""
    causal: bool = static()
    """Whether the observed queries' own entries are the row's last (every token is stored as it comes). Otherwise they
    are still in the ring, or stored nowhere, and no stored entry is younger than they are."""


@struct
class Passage:
    """One layer's stored entries that a pass of tokens looks at (`Reconstruction.passes`): first those of the row's
    start, then those of the pass's own part of the row."""

    k: Float[Array, "b k s h"]
    """As it was written, after RoPE; unspecified where there is no entry."""
    exists: Bool[Array, "b s"]
    """Which of them there are."""
    first: int = static()
    """How many places are for the row's start."""
    valid: Int[Array, " b"]
    """How many of the pass's tokens are real, by sequence; 0: the sequence has none."""
