"""`python -m kvjax.train --help`."""

import subprocess
import sys


def test_help_imports_little_and_names_every_option():
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kvjax.train", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.startswith("usage: python -m kvjax.train")
    options = "mesh", "config", "model", "data", "lambda", "window", "sequences", "seed", "out", "resume"
    for option in options:
        assert f"--{option}" in shown.stdout
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    # jax and flax come with the recipe, which is one file with its maths
    assert not imported & {"transformers", "grain", "datasets", "matplotlib"}
