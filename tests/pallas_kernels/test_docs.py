"""The examples of docs/kernels.md run."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels

TEXT = Path(pallas_kernels.__path__[0]).with_name("docs").joinpath("kernels.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=[re.findall(r"pallas_kernels\.(\w+)", x)[0] for x in EXAMPLES]
)
def test_the_examples_run(example):
    names = {"jax": jax, "jnp": jnp}
    exec(example, names)
    results = [names[name] for name in ("o", "lse", "tau", "end", "snapkv", "h") if name in names]
    assert results
    assert all(jnp.isfinite(x).all() for x in results)
