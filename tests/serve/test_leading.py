"""Test that an engine over two processes, a leader and a follower, gives the answers of one process."""

import json
import os
import subprocess
import sys

import pytest

from tests.processes import ROOT, run_processes

SCENARIO = """
import json
import os

import jax

from kvjax import LLM, SamplingParams
from kvjax.cli.launch import MeshShape, start
from kvjax.engine import Engine
from kvjax.errors import UserError
from kvjax.serve.grammar import Grammars
from kvjax.serve.leading import LeadingEngine, follow

several = "JAX_COORDINATOR_ADDRESS" in os.environ
llm = LLM("builtin", "snapkv:ratio=0.5,observed=8", mesh=start(MeshShape(tensor=2 if several else 1)))
grammars = Grammars(llm.tokenizer, llm.model.config.vocab_size, llm.model.config.eos_ids)
first = jax.process_index() == 0
engine = (LeadingEngine if several and first else Engine)(
    llm.model, llm.policy, tokenizer=llm.tokenizer, slots=2, max_length=600, chunk=64
)
if not first:
    follow(engine, grammars.format)
    assert not engine.busy
else:
    plain, kind = SamplingParams(max_new_tokens=20), {"type": "object", "properties": {"a": {"type": "integer"}}}
    requests = [engine.read_context("imports", "import os\\n" * 20)]
    while engine.busy:
        engine.step()
    requests += engine.submit("import", plain, context="imports")
    requests += engine.submit("x = ", plain, constraint=grammars.schema(kind | {"required": ["a"]}))
    requests += engine.submit("def f", SamplingParams(max_new_tokens=9, temperature=1.0, seed=4, n=2))
    (cancelled,) = engine.submit("y = 2\\n" * 60, SamplingParams(max_new_tokens=200, ignore_eos=True))
    for turn in range(1000):
        if turn == 4:
            cancelled.cancel()
        if engine.busy:
            engine.step()
    longest = engine.longest_answer(20, "imports")
    try:
        engine.submit("x" * 5000, plain)
    except UserError as error:
        requests.append(cancelled)
        refused = str(error)
    assert engine.stats.forks > 0
    engine.forget("imports")
    print(json.dumps([[x.tokens, x.text, x.finish_reason] for x in requests] + [longest, refused]))
    if several:
        engine.release()
jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_two_processes_give_the_answers_of_one():
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    single = subprocess.run(
        [sys.executable, "-c", SCENARIO], env=env, text=True, stdout=subprocess.PIPE, check=True
    )
    (output, follower_output), _ = run_processes(SCENARIO)
    assert json.loads(output) == json.loads(single.stdout)
    assert follower_output == ""
    *answers, longest, refused = json.loads(output)
    assert answers[-1][2] == "abort"
    assert answers[2][1].startswith('{"a": ')
    assert longest > 1
    assert "are longer than max_length" in refused
