"""What one layer shows a cache policy about the tokens of a call."""

from jaxtyping import Array, Float, Int

from kvjax.struct import struct


@struct
class Step:
    """One layer's view of the tokens being run.

    hidden: the layer's input after its attention norm. q, k: after RoPE. k_pre: the key before RoPE (after QK-norm
    where the model has one). position: true token positions, −1 for padding. layer: the layer's index. head: the index
    of each kv head in the whole model (on a device that holds a part of them, its part).
    """

    hidden: Float[Array, "b t d"]
    q: Float[Array, "b n t h"]
    k: Float[Array, "b k t h"]
    k_pre: Float[Array, "b k t h"]
    v: Float[Array, "b k t h"]
    position: Int[Array, "b t"]
    layer: Int[Array, ""]
    head: Int[Array, " k"]
