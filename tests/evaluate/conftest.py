"""Fixtures that run the whole evaluation of `whole_run` once."""

import jax
import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.evaluate.__main__ import main
from kvjax.evaluate.results import Results
from kvjax.models import load_model
from kvjax.policies.admission.wgkv import save_gates
from tests.evaluate.whole_run import POLICIES, SMALL, TASKS
from tests.tiny_models import tiny_gates


@pytest.fixture(autouse=True, scope="module")
def no_pictures(request):
    """Leave pictures undrawn, because they would take most of a report's time, except for those of `evaluated` and in
    the tests of pictures."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.module.__name__.endswith("test_pictures"):
            patch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
        yield


@pytest.fixture(scope="session")
def arguments(tmp_path_factory):
    """Return the arguments of all runs: three policies, one of them with gates that split tokens."""
    gates = tmp_path_factory.mktemp("gates")
    model = load_model(builtin_model("test_model"))
    save_gates(gates, tiny_gates(model), {"tau": 0.5, "window": 4, "rate": np.full((2, 4), 0.5).tolist()})
    return [*SMALL, "--gates", str(gates), "--policies", *POLICIES]


@pytest.fixture(scope="session")
def evaluated(arguments, tmp_path_factory):
    """Return the folder of a run, and how many programs were compiled until each of its results was finished."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    compiled, compile_counts = [0], []

    def count(event, duration, **_):
        compiled[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.clear_caches()  # a program that another test compiled would not be counted
    jax.monitoring.register_event_duration_secs_listener(count)
    with pytest.MonkeyPatch.context() as patch:
        add = Results.add
        patch.setattr(
            Results, "add", lambda self, result: (compile_counts.append(compiled[0]), add(self, result))
        )
        main([*arguments, *TASKS, "--out", str(folder)])
    return folder, compile_counts
