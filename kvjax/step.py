"""What one layer shows a cache policy: the tokens of a call, and the entries that are stored."""

from jaxtyping import Array, Bool, Float, Int

from kvjax.struct import static, struct


@struct
class Step:
    """One layer's view of the tokens being run.

    hidden: the layer's input after its attention norm. q, k: after RoPE. q_pre, k_pre: before RoPE (after QK-norm where
    the model has one). position: true token positions, −1 for padding. layer: the layer's index. head: the index
    of each kv head in the whole model (on a device that holds a part of them, its part). token: the token ids; None
    where no policy runs.
    """

    hidden: Float[Array, "b t d"]
    q: Float[Array, "b n t h"]
    k: Float[Array, "b k t h"]
    q_pre: Float[Array, "b n t h"]
    k_pre: Float[Array, "b k t h"]
    v: Float[Array, "b k t h"]
    position: Int[Array, "b t"]
    layer: Int[Array, ""]
    head: Int[Array, " k"]
    token: Int[Array, "b t"] | None = None


@struct
class Stored:
    """One layer's entries of the global region, to be scored: each row in order of position, its newest entry last (at
    the right end).

    k, v: as they were written, keys after RoPE; unspecified where there is no entry. place: an entry's place in its row
    from its first one on; negative where there is none. eligible: the entries among which some will go. forced: entries
    that stay whatever their score. count: how many eligible entries of a kv head are to stay in this layer, on average
    or of each. attended: the attention that each entry got so far, its group's mean; None where it is not counted.
    seen: tokens so far. causal: the last tokens are the last entries; else they are elsewhere, and no entry is newer
    than any query that is looked back at. output: the output projection of these query heads. layer, head: as in
    `Step`.
    """

    k: Float[Array, "b k s h"]
    v: Float[Array, "b k s h"]
    place: Int[Array, "b k s"]
    eligible: Bool[Array, "b k s"]
    forced: Bool[Array, "b k s"]
    count: Int[Array, "b k_or_1"]
    seen: Int[Array, " b"]
    output: Float[Array, "n h d"]
    layer: Int[Array, ""]
    head: Int[Array, " k"]
    attended: Float[Array, "b k s"] | None
    causal: bool = static()
