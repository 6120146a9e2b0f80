"""Tests of `tests.ahead.hlo`, which reads exchanges and launches from the text of compiled programs."""

import jax
import jax.numpy as jnp
import pytest

from kvjax.mesh import P, make_mesh
from tests.ahead.hlo import exchanged, launched

LOOPED = """HloModule m

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[8]{0:T(128)} get-tuple-element(%p), index=1
  %g = (f32[8]{0:T(128)}, f32[32]{0:T(128)}) all-gather-start(%x), channel_id=1, dimensions={0}
  %d = f32[32]{0:T(128)} all-gather-done(%g)
  %f = f32[8]{0:T(128)} fusion(%d), kind=kCustom, calls=%inside
  ROOT %t = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%i, %f)
}

%inside (q: f32[32]) -> f32[8] {
  %q = f32[32]{0:T(128)S(1)} parameter(0)
  ROOT %r = f32[8]{0:T(128)} reduce-scatter(%q), channel_id=2, dimensions={0}
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %n = s32[]{:T(128)} constant(TURNS)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%few (a: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} parameter(0)
}

%more (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %s = f32[8]{0} all-reduce(%a), channel_id=3, to_apply=%few
}

ENTRY %main (x: (s32[], f32[8]), c: pred[], y: f32[8]) -> f32[8] {
  %x = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %c = pred[] parameter(1)
  %y = f32[8]{0} parameter(2)
  %w = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%x), condition=%condition, body=%bodyKNOWN
  %z = f32[8]{0} conditional(%c, %y, %y), branch_computations={%few, %more}
  ROOT %o = f32[8]{0:T(128)} get-tuple-element(%w), index=1
}
"""


@pytest.mark.parametrize(
    ("turns", "known"), [("5", ""), ("9", ', backend_config={"known_trip_count":{"n":"5"}}')]
)
def test_exchanges_in_a_loop_count_once_per_iteration(turns, known):
    exchanges = exchanged(LOOPED.replace("TURNS", turns).replace("KNOWN", known))
    assert dict(exchanges) == {
        ("all-gather", "count"): 5,
        ("all-gather", "bytes"): 5 * 32 * 4,
        ("reduce-scatter", "count"): 5,
        ("reduce-scatter", "bytes"): 5 * 32 * 4,
        ("all-reduce", "count"): 1,
        ("all-reduce", "bytes"): 8 * 4,
    }


ASYNCHRONOUS = """\
%start (a: f32[8]) -> f32[32] {
  %a = f32[8]{0} parameter(0)
  %g = f32[32]{0} all-gather(%a), channel_id=1, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %s = f32[32]{0} custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%beside (a: f32[8]) -> f32[32] {
  %a = f32[8]{0} parameter(0)
  ROOT %g = f32[32]{0} all-gather(%a), channel_id=1, dimensions={0}, frontend_attributes={chain_id="0"}
}

%done (a: f32[8]) -> f32[32] {
  %a = f32[8]{0} parameter(0)
  %g = f32[32]{0} all-gather(%a), channel_id=1, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %d = f32[32]{0} custom-call(%g), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: f32[8]) -> f32[32] {
  %x = f32[8]{0} parameter(0)
  %s = f32[32]{0} fusion(%x), kind=kCustom, calls=%start
  %b = f32[32]{0} fusion(%x), kind=kOutput, calls=%beside
  ROOT %d = f32[32]{0} fusion(%x), kind=kCustom, calls=%done
}
"""
"""The text that libtpu writes for one all-gather that overlaps with a product."""


def test_an_asynchronous_exchange_counts_once():
    assert dict(exchanged(ASYNCHRONOUS)) == {("all-gather", "count"): 1, ("all-gather", "bytes"): 128}


def test_exchanges_of_a_program_compiled_here():
    """The weights of six layers are gathered one after another."""
    mesh = make_mesh(fsdp=4)

    def program(x, weights):
        def layer(x, w):
            return jnp.tanh(
                jnp.einsum("bd,de->be", x, jax.sharding.reshard(w, P()), out_sharding=P("fsdp"))
            ), None

        return jax.lax.scan(layer, x, weights)[0]

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 16)), P("fsdp"))
        weights = jax.device_put(jnp.ones((6, 16, 16)), P(None, "fsdp"))
        exchanges = exchanged(jax.jit(program).lower(x, weights).compile().as_text())
    assert dict(exchanges) == {("all-gather", "count"): 6, ("all-gather", "bytes"): 6 * 16 * 16 * 4}


def test_launches_and_writes_of_a_loop():
    """Each iteration takes a layer's weights out of their stack and computes the product."""

    def program(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    text = jax.jit(program).lower(jnp.ones((8, 64)), jnp.ones((6, 64, 64))).compile().as_text()
    inside = [x for x in launched(text) if x.loops == (6,)]
    assert [x.written for x in inside if x.sliced and x.written > 64] == [64 * 64 * 4]
    assert 8 * 64 * 4 in [x.written for x in inside if not x.sliced]
