"""The package's own names: imported when first used."""

import subprocess
import sys

import kvjax
from kvjax.policies import POLICIES


def test_importing_the_package_imports_nothing():
    heavy = "'jax', 'numpy', 'flax', 'transformers', 'tyro'"
    code = (
        f"import sys, kvjax; kvjax.__version__; dir(kvjax); print([x for x in ({heavy}) if x in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_name_is_there():
    for name in kvjax.__all__:
        assert getattr(kvjax, name) is not None
    assert set(kvjax.__all__) <= set(dir(kvjax))


def test_policies_are_listed_with_a_line_each():
    listed = kvjax.policies()
    assert tuple(listed) == POLICIES
    assert all(line.endswith(".") and "\n" not in line and len(line) < 160 for line in listed.values())
    assert "what the last queries looked at" in listed["snapkv"]
    done = subprocess.run(
        [sys.executable, "-m", "kvjax.policies"], capture_output=True, text=True, check=True, timeout=120
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(POLICIES)
