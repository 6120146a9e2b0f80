"""Tests of a mesh over several processes, whose results are those of one process."""

import json
import os
import subprocess
import sys

import pytest

from kvjax.evaluate.__main__ import main as evaluate
from tests.evaluate.whole_run import SMALL, lines, without_speeds
from tests.processes import ROOT, run_processes

pytestmark = pytest.mark.slow

ANSWERS = """
import json
import sys

import jax

from kvjax import LLM, SamplingParams
from kvjax.cli.launch import MeshShape, start
from kvjax.engine import Engine

mesh, found = start(MeshShape.parse(sys.argv[1])), {}
for policy, gates in json.loads(sys.argv[2]).items():
    llm = LLM(sys.argv[3], policy, gates=gates, mesh=mesh)
    document = llm.prefill(["x = 1\\n" * 30, "import os\\n" * 20])
    params = [SamplingParams(max_new_tokens=8), SamplingParams(max_new_tokens=8, temperature=1.0, seed=3)]
    answers = llm.generate(["print(", "import "], params, context=document)
    found[policy] = [[one.tokens, one.kv_ratio] for one in answers]

llm = LLM(sys.argv[3], mesh=mesh)
engine = Engine(llm.model, llm.policy, tokenizer=llm.tokenizer, slots=3, max_length=250, capacity=150)
params, requests, paused = SamplingParams(max_new_tokens=150, ignore_eos=True), [], 0
for text in ("x = 1\\n" * 6, "import os\\n" * 5, "print('a')\\n" * 3, "pass\\n" * 9):
    requests += engine.submit(text, params, expected=8)
while engine.busy:
    engine.step()
    paused = max(paused, engine.stats.paused)
found["engine"] = [[request.tokens, request.finish_reason] for request in requests]
assert paused > 0, "the pool is for pausing"
print(json.dumps(found))
"""
OTHERS = {
    "snapkv:ratio=0.4,observed=8,adakv": None,
    "h2o:entries=64,when=every,every=4": None,
    "quest:ratio=0.5": None,
    "kvzip:ratio=0.4": None,
}
EVALUATE = """
from kvjax.cli.launch import run_command
from kvjax.evaluate.__main__ import main

run_command(main)
"""


@pytest.mark.parametrize(
    ("policies", "mesh", "count"),
    [
        ({"wgkv": "builtin"}, "tensor=2", 2),
        pytest.param(OTHERS, "tensor=2", 2, marks=pytest.mark.thorough),
        pytest.param({"wgkv": "builtin"}, "tensor=2,replica=2", 4, marks=pytest.mark.thorough),
    ],
    ids=["wgkv", "others", "four"],
)
def test_answers_are_those_of_one_process(policies, mesh, count):
    arguments = json.dumps(policies), "builtin"
    single = subprocess.run(
        [sys.executable, "-c", ANSWERS, "1", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        stdout=-1,
    )
    printed, messages = run_processes(ANSWERS, mesh, *arguments, count=count)
    assert [json.loads(output) for output in printed] == [json.loads(single.stdout)] * count
    assert messages[0].startswith(f"JAX_COORDINATOR_ADDRESS: {count} processes, {count} devices.\n")


def test_an_evaluation_equals_that_of_one_process(tmp_path):
    arguments = [
        *SMALL,
        "--policies",
        "full",
        "snapkv",
        "head_pattern:calibrated",
        "--budgets",
        "0.5",
        "--tasks",
        "needle",
    ]
    evaluate([*arguments, "--out", str(tmp_path / "one")])
    two = [*arguments, "--mesh", "tensor=2", "--out", str(tmp_path / "two")]
    for _ in range(2):  # the second finds everything finished
        printed, messages = run_processes(EVALUATE, *two)
        assert f"report.md and the pictures are in {tmp_path / 'two'}" in printed[0]
        assert printed[1] == ""
        assert "needle" not in messages[1]
        assert without_speeds(lines(tmp_path / "two")) == without_speeds(lines(tmp_path / "one"))


@pytest.mark.thorough
def test_only_one_process_prints():
    code = "from kvjax.generate import main, run_command; run_command(main)"
    arguments = "--prompt", "import", "--max-new-tokens", "4", "--policy", "snapkv:ratio=0.5"
    printed, messages = run_processes(code, *arguments, "--mesh", "tensor=2")
    assert printed[0]
    assert printed[1] == ""
    assert "decode" in messages[0]
    assert "decode" not in messages[1]
    _, messages = run_processes(code, *arguments, "--mesh", "tensor=2", "--save-cache", "here", exit_code=2)
    assert all(
        "save_cache: a cache is saved by one process, this run has several" in message for message in messages
    )
