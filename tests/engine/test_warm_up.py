"""Warming up compiles every program that requests run, and leaves nothing behind."""

import jax
import pytest

from kvjax.mesh import use_mesh
from kvjax.sampling_params import SamplingParams
from tests.engine.serving import (
    Cycle,
    engine,
    model,
    questions_for,
    run,
    submit,
)
from tests.inference.delayed import delayed


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "full",
        *(
            pytest.param(x, marks=pytest.mark.thorough)
            for x in ("snapkv:ratio=0.5", "full:window=8,positions=true")
        ),
    ],
)
def test_no_program_is_compiled_after_warming_up(policy, caplog):
    served = engine(policy, slots=5, chunk=64)
    questions = [
        *questions_for(10, seed=5, longest=80),
        ([5] * 9, SamplingParams(max_new_tokens=9, temperature=0.5, top_k=3)),
        ([5] * 9 + [6] * 3, SamplingParams(max_new_tokens=9)),
        ([5] * 9 + [7] * 40, SamplingParams(max_new_tokens=9)),
    ]
    ended = SamplingParams(max_new_tokens=9, stop_token_ids=range(20), logit_bias={3: 1.0}, logprobs=4)

    def compiled():
        return [record.message for record in caplog.records if record.message.startswith("Compiling")]

    with jax.log_compiles():
        served.warm_up(constrained=True)
        assert compiled()
        caplog.clear()
        requests = submit(served, [*questions, ("Who?", ended)])
        requests += served.submit("Say it.", ended, constraint=lambda: Cycle("abc"))
        if policy == "full":
            requests += served.submit("Say it, do.", ended, score=True)
        if "positions" in policy:
            dropped = {"dropped": ((3, 40), (50, 55)), "dropped_at": 60}
            requests += served.submit([5] * 9 + [7] * 60, questions[-1][1], **dropped)
        for _ in range(10):
            served.step()
        with use_mesh(model()):
            served._scheduler.pause(served._slots.running[0][0])
        run(served, requests)
        assert not compiled()


@pytest.mark.slow
def test_warming_up_drops_no_span_if_the_policy_refuses_it():
    """With max_entries the positions of entries are known, but spans cannot be dropped."""
    served = engine(delayed(window=8, max_entries=9, delay=2), max_length=10)
    assert served._pool.knows_positions
    served.warm_up()
    run(served)
