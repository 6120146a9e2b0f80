"""Tests of the cache of compiled programs. It is on by default, which is reported once; the environment can move or
disable it."""

import os
import subprocess
import sys
import zlib

import pytest

from kvjax.builtin import builtin_model
from kvjax.cli.compile_cache import remove_broken

pytestmark = pytest.mark.slow

SAMPLES = f"""
import jax
jax.jit(lambda x: x + 1)(1.0)  # a program of the user's, before anything is kept
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
import kvjax
from kvjax.cli.compile_cache import keep_programs
keep_programs()
llm = kvjax.LLM({str(builtin_model("test_model"))!r})
llm.generate([[1, 2]], kvjax.SamplingParams(max_new_tokens=2))
print(sum(event == "/jax/compilation_cache/cache_hits" for event in hits))
"""


def run(code, tmp_path, **environment):
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMPIL", "JAX_PERS"))
    }
    env |= {"XDG_CACHE_HOME": str(tmp_path)} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)


def test_second_process_uses_cached_programs(tmp_path):
    folder = tmp_path / "kvjax" / "programs"
    first, second = (run(SAMPLES, tmp_path) for _ in range(2))
    assert first.stdout == "0\n"
    assert first.stderr.count("\n") == 1
    assert f"kept in {folder} for later runs (not with JAX_ENABLE_COMPILATION_CACHE=false)" in first.stderr
    assert list(folder.glob("*-cache"))
    assert int(second.stdout) > 0
    assert second.stderr == ""


@pytest.mark.parametrize(
    "environment", [{"JAX_ENABLE_COMPILATION_CACHE": "false"}, {"JAX_COMPILATION_CACHE_DIR": "elsewhere"}]
)
def test_environment_can_move_or_disable_the_cache(tmp_path, environment):
    code = """
import jax
from kvjax.cli.compile_cache import keep_programs
keep_programs()
print(jax.config.jax_compilation_cache_dir)
"""
    done = run(code, tmp_path, **environment)
    assert done.stdout.strip() == environment.get("JAX_COMPILATION_CACHE_DIR", "None")
    assert done.stderr == ""
    assert not any(tmp_path.iterdir())


def test_partially_written_programs_are_removed(tmp_path):
    whole = zlib.compress(b"program" * 100)
    for name, content, used in (
        ("whole", whole, True), ("cut", whole[:-9], True), ("empty", b"", True), ("killed", whole, False),
    ):  # fmt: skip
        (tmp_path / f"jit_{name}-0a-cache").write_bytes(content)
        if used:
            (tmp_path / f"jit_{name}-0a-atime").write_bytes(bytes(8))
    remove_broken(tmp_path)
    assert {x.name for x in tmp_path.iterdir()} == {".checked", "jit_whole-0a-cache", "jit_whole-0a-atime"}
    # a program is read only once
    (tmp_path / "jit_whole-0a-cache").write_bytes(whole[:-9])
    os.utime(tmp_path / "jit_whole-0a-cache", (0, 0))
    remove_broken(tmp_path)
    assert (tmp_path / "jit_whole-0a-cache").exists()
