"""Capture of arrays that the layers compute, layer by layer: training features that are too large for a device."""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.cache import Cache, check_alive, not_finite
from kvjax.errors import one_of
from kvjax.inference.allocation import new_cache
from kvjax.inference.checks import check_continues, check_in_front
from kvjax.inference.forward import CAPTURED, attending, bucket, padded, positions
from kvjax.inference.sliding import sliding
from kvjax.mesh import on_host, use_mesh
from kvjax.models.chat import token_rows
from kvjax.models.decoder import Decoder, layer_at, layer_body
from kvjax.policies.compiled import View
from kvjax.policies.policy import Policy


def captured_layers(
    model: Decoder,
    policy: Policy,
    cache: Cache | None,
    rows: Sequence[Int[np.ndarray, " _"]],
    names: Sequence[str],
) -> Iterator[dict[str, Shaped[np.ndarray, "b ..."]]]:
    """Run `rows` over the cache without writing to it, and yield the captured arrays of each layer with full attention
    in turn, on the host. Only one layer's arrays are on the devices at a time, and one program serves all such layers.

    Args:
        cache: the cache that the rows continue; None: the rows are whole sequences.
        rows: token ids, one row a sequence, padded to the longest.
        names: names from `kvjax.inference.forward.CAPTURED`.

    Raises:
        UserError: unknown names, rows that are not token ids, a cache of another model or policy, or activations that
            are not finite.
    """
    for name in names:
        one_of("captured_layers", "a name", name, CAPTURED)
    rows = token_rows(rows, model.config.vocab_size)
    longest = max(row.size for row in rows)
    with use_mesh(model):
        compiled = policy.compile(model)
        if cache is None:
            cache = new_cache(model, compiled, [row[:1] for row in rows])
        else:
            check_alive("captured_layers", cache)
            check_in_front("captured_layers", cache)
            check_continues(cache, model, compiled, rows)
        tokens, valid = padded(rows, bucket(longest))
        x = _embedded(model, tokens)
    layers_before = [0, 0]
    for index, slides in enumerate(model.config.slides):
        # the caller's code runs between the layers, so no mesh may stay set there
        with use_mesh(model):
            x, captured, finite = _layer(
                model, compiled.read, cache, x, tokens, valid, np.int32(index), np.int32(layers_before[slides]),
                slides=slides, names=tuple(names),
            )  # fmt: skip
        if not on_host(finite):
            raise not_finite(model.dtype)
        if not slides:
            yield {name: _real(name, on_host(x), len(rows), longest) for name, x in captured.items()}
        layers_before[slides] += 1


def _real(
    name: str, array: Shaped[np.ndarray, "b ..."], rows: int, tokens: int
) -> Shaped[np.ndarray, "b ..."]:
    """Return an array without the rows and tokens that are padding."""
    return array[:rows, :tokens] if name == "hidden" else array[:rows, :, :tokens]


@jax.jit
def _embedded(model: Decoder, tokens: Int[Array, "b t"]) -> Float[Array, "b t d"]:
    return model.embed_tokens(tokens, frozen=True)


@functools.partial(jax.jit, donate_argnums=3, static_argnames=("slides", "names"))
def _layer(
    model: Decoder,
    view: View,
    cache: Cache,
    x: Float[Array, "b t d"],
    tokens: Int[Array, "b t"],
    valid: Int[Array, " b"],
    index: Int[Array, ""],
    place: Int[Array, ""],
    *,
    slides: bool,
    names: tuple[str, ...],
) -> tuple[Float[Array, "b t d"], dict[str, Shaped[Array, "b ..."]], Bool[Array, ""]]:
    """Run one layer, the `place`-th of its kind. Returns x, the captured arrays, and True if x is finite."""
    position = positions(cache.seen, valid, tokens.shape[1])
    if slides:
        attend, layer_arguments, captured = sliding(cache, valid), None, {}
    else:
        attend = attending(cache, valid, False, names)
        layer_arguments = layer_at((cache.layers, view), place)
    body = layer_body(model, position, attend, tokens, slides=slides)
    (x, _), ys = body((x, None), (layer_at(model.layers, index), index, place, layer_arguments))
    if not slides:
        _, captured, _ = ys
    finite = jnp.isfinite(x).all(-1) | (position < 0)
    return x, captured, finite.all()
