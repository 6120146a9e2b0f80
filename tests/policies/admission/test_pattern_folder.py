"""Pattern folders that are none, or not whole."""

import pytest

from kvjax.errors import UserError
from kvjax.policies.admission.pattern_folder import read_pattern


def test_a_pattern_file_with_words_in_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "full_attention_heads.tsv").write_text("0.1\tyes\n")
    with pytest.raises(UserError, match="table of numbers"):
        read_pattern(tmp_path)
    (tmp_path / "full_attention_heads.tsv").write_text("0.1\t0.2\n")
    with pytest.raises(UserError, match="sink_size"):
        read_pattern(tmp_path)
