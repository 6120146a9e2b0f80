"""An evaluation of heads that stream between calls, which are its chunks."""

import re

import numpy as np
import pytest

from kvjax.evaluate.__main__ import main
from kvjax.evaluate.config import parse
from kvjax.evaluate.teacher_forcing import TeacherForcing
from kvjax.evaluate.workloads import workloads
from kvjax.models import load_model
from kvjax.policies.admission.pattern_folder import write_pattern
from tests.evaluate.whole_run import lines


@pytest.mark.thorough
def test_a_text_is_read_in_chunks_between_which_heads_stream(tmp_path):
    """Its perplexity is that under the masks of these calls, of the heads, sinks and window that were chosen."""
    write_pattern(tmp_path / "pattern", np.linspace(0, 1, 12).reshape(3, 4), 4, 16)
    sizes = ["--context", "126", "--chunk", "32", "--samples", "24", "--batch", "2"]
    asked = [
        *("--model", "builtin", "--dtype", "float32", *sizes, "--tasks", "text", "--budgets", "0.2"),
        *("--policies", "head_pattern:streaming=between_calls", "--pattern", str(tmp_path / "pattern")),
        *("--out", str(tmp_path / "run")),
    ]
    main(asked)
    (cell,) = lines(tmp_path / "run")
    assert cell["policy"] == "head_pattern:streaming=between_calls"
    assert cell["kv_ratio"] == pytest.approx(0.2, abs=0.02)
    whole = np.array(cell["kept"]) == 1
    said = re.match(r"(\d+) of 12 heads whole, window (\d+); .*sinks (\d+) ", cell["choice"])
    assert said is not None
    count, window, sink = map(int, said.groups())
    assert whole.sum() == count > 0
    config = parse(asked)
    model, (workload,) = load_model(config.model, "float32"), workloads(config)
    found = {}
    for chunk in (None, 32):
        found[chunk] = TeacherForcing(model, workload.samples, 2, chunk)(whole, sink, window).loss
    assert cell["perplexity"] == pytest.approx(np.exp(found[32]), rel=2e-5)
    assert abs(found[None] - found[32]) > 2e-4, "forgetting token by token is told apart"
