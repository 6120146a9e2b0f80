"""Test `--dry-run`: a wrong configuration gives one line, and a right one says how much it would train."""

import pytest

from kvjax.cli.options import packaged_configs, read_values
from kvjax.errors import UserError
from kvjax.train.__main__ import main

PACKAGED = sorted(path.stem for path in packaged_configs().glob("*.yaml"))


@pytest.fixture(autouse=True)
def nothing_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvjax.models.folder.fetch", None)
    monkeypatch.setattr("kvjax.train.run.train", None)


@pytest.mark.parametrize("name", PACKAGED)
@pytest.mark.filterwarnings("ignore:contexts of 130,000 tokens:UserWarning")
def test_every_packaged_config_whose_model_s_shape_is_known_passes(name, tmp_path, capsys):
    has_known_shape = not str(read_values(packaged_configs() / f"{name}.yaml").get("model", "")).startswith(
        "models/"
    )
    if has_known_shape:
        main(["--config", name, "--dry-run"])
        assert " updates of " in capsys.readouterr().out
    else:
        with pytest.raises(UserError, match="no such folder and no known shape"):
            main(["--config", name, "--dry-run"])
    assert not list(tmp_path.iterdir())


def test_the_output_says_how_much_would_be_trained(capsys):
    main(["--config", "llama-3.1-8b", "--mesh", "tensor=8", "--dry-run"])
    assert capsys.readouterr().out == (
        "wgkv for meta-llama/Llama-3.1-8B-Instruct: 32 layers × 8 KV heads; weights and data "
        "(HuggingFaceFW/fineweb-edu:sample-10BT) were not read\n"
        "33,825,024 parameters, 7,500 sequences, 65,536,000 tokens in all: 7500 updates of 1\n"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mesh", "1x3"], "tensor axis has size 3, which does not divide the model's kv heads"),
        (["--expand", "0.001"], "--expand 0.001 makes gates"),
        (["--model", "someone/unknown-9b"], "no such folder and no known shape"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(args, message):
    with pytest.raises(UserError, match=message):
        main(["--config", "llama-3.1-8b", "--dry-run", *args])
