"""Test the calibration of TriAttention: the statistics describe the queries, and the policy reads them."""

import numpy as np
import pytest

from kvjax.builtin import builtin_model
from kvjax.checkpoints.fingerprint import MadeFor
from kvjax.errors import UserError
from kvjax.models import load_model
from kvjax.models.rope import RopeConfig
from kvjax.policies import make_policy
from kvjax.policies.eviction.triattention import load_statistics
from tests.policies.captured import captured_layers, two_prompts, unnormed
from tests.tiny_models import tiny_model
from train.calibrate_triattention import main, query_statistics


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_statistics_are_those_of_the_queries(share):
    """With 0.75 RoPE turns the pairs (0, 3), (1, 4) and (2, 5), and the last two dimensions are one pair."""
    model = unnormed() if share == 1.0 else tiny_model(qk_norm=False, rope=RopeConfig(share=share))
    prompt = two_prompts()[0]
    statistics = query_statistics(model, prompt)
    first, second = ([0, 1, 2, 3], [4, 5, 6, 7]) if share == 1.0 else ([0, 1, 2, 6], [3, 4, 5, 7])
    for layer, c in enumerate(captured_layers(model, prompt)):
        q = c.q_pre[..., first] + 1j * c.q_pre[..., second]
        actual_arrays = (
            np.asarray(x[...])[layer] for x in (statistics.real, statistics.imaginary, statistics.length)
        )
        for actual, expected in zip(actual_arrays, (q.real, q.imag, np.abs(q)), strict=True):
            np.testing.assert_allclose(actual, expected.mean(1), atol=1e-5)


def test_one_command_calibrates(tmp_path, capsys):
    """The folder names the model, and a policy for it reads the statistics of as many tokens as were asked for."""
    text, out, path = tmp_path / "x.txt", tmp_path / "out", str(builtin_model("test_model"))
    text.write_text("def scores(keys):\n    return [key.norm() for key in keys]\n" * 4)
    main(["--model", path, "--text", str(text), "--out", str(out), "--tokens", "40"])
    assert capsys.readouterr().out == f"{out}: statistics of 40 queries of each head\n"
    model = load_model(path)
    statistics, description = load_statistics(out)
    assert (description["model"], description["data"], description["tokens"]) == (path, "x.txt", 40)
    length = np.asarray(statistics.length[...])
    assert length.max() > 1
    assert (np.hypot(statistics.real[...], statistics.imaginary[...]) <= length + 1e-5).all()
    policy = make_policy("triattention:entries=64", model=model, gates=out)
    assert policy.eviction.made_for == MadeFor.of(model)
    with pytest.raises(UserError, match="out already exists"):
        main(["--model", path, "--text", str(text), "--out", str(out)])
