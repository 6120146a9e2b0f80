"""Test natural text from packages: its pieces, and the errors for missing packages."""

import gzip
import itertools
import json
import sys
from types import ModuleType

import pytest

from kvjax.errors import UserError
from kvjax.tasks.prompt import PromptEncoder
from kvjax.tasks.scbench import scbench_examples
from tests.tasks.model_tokenizers import byte_tokenizer
from train.code_records import QUESTIONS, Function, code_records, units
from train.real_text import WORKS, Work, find_archives, main, pieces, read


def test_pieces_are_whole_paragraphs_of_sizes_in_turn():
    paragraphs = [
        f"{number:03} " + "x" * 96 for number in range(40)
    ]  # 100 characters each, and a break of two
    actual = list(pieces("\n\n".join(paragraphs), (250, 450)))
    # at least 250 characters are three paragraphs, at least 450 five
    assert [piece.count("\n\n") + 1 for piece in actual] == [3, 5] * 5
    assert "\n\n".join(piece.strip() for piece in actual) == "\n\n".join(paragraphs)
    assert len(list(pieces("\n\n".join(paragraphs[:39]), (250, 450)))) == 9


def test_no_file_is_both_trained_on_and_held_out():
    trained, heldout = ([work for work in WORKS.values() if work.heldout is part] for part in (False, True))
    assert heldout
    for trained_work, heldout_work in itertools.product(trained, heldout):
        assert (trained_work.package, trained_work.pattern, trained_work.novel) != (
            heldout_work.package,
            heldout_work.pattern,
            heldout_work.novel,
        )


def test_files_are_read_in_order_compressed_or_not(tmp_path):
    (tmp_path / "doc").mkdir()
    (tmp_path / "doc" / "b.txt").write_text("second")
    (tmp_path / "doc" / "a.txt.gz").write_bytes(gzip.compress(b"first"))
    assert read(Work("some", "doc/*"), tmp_path) == ["first", "second"]
    with pytest.raises(UserError, match=r"package some holds no doc/\*\.rst: another version of it\?"):
        read(Work("some", "doc/*.rst"), tmp_path)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return arguments with which every package is found, but no program."""
    for package in {work.package for work in WORKS.values()}:
        (tmp_path / f"{package}_1_all.deb").write_bytes(b"no package")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setitem(sys.modules, "rdata", ModuleType("rdata"))
    return ["--packages", str(tmp_path), "--out", str(tmp_path / "text")]


def test_without_the_package_that_reads_novels_nothing_is_unpacked(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "rdata", None)
    with pytest.raises(UserError, match=r"need the package rdata, .*: pip install '\.\[text\]'$"):
        main(command)


def test_a_missing_dpkg_deb_is_an_error(command):
    with pytest.raises(UserError, match="unpacked with dpkg-deb, which this machine lacks"):
        main(command)


def test_a_damaged_package_is_named(command, tmp_path):
    program = tmp_path / "bin" / "dpkg-deb"
    program.write_text("#!/bin/sh\necho 'not a Debian\nformat archive' >&2\nexit 2\n")
    program.chmod(0o755)
    with pytest.raises(UserError, match=r"_1_all\.deb: cannot be unpacked \(not a Debian format archive\)"):
        main(command)
    assert not (tmp_path / "text").exists()


def test_a_missing_package_is_named_with_the_command_that_gets_it(tmp_path):
    packages = sorted({work.package for work in WORKS.values()})
    for package in packages[:-1]:
        (tmp_path / f"{package}_1_all.deb").touch()
    with pytest.raises(UserError, match=f"expected 1: apt-get download {packages[-1]}"):
        find_archives(tmp_path, WORKS.values())


FUNCTION = '''def {name}(values):
    """Return the {name} of some values, counted from the smallest.

    More is said here.
    """
    result = sorted(values)
    # a comment
    return result[{number}]
'''


def module(functions: int) -> str:
    names = [f"rank{number}" for number in range(functions)]
    return '"""A module."""\n\nimport os\n\n\n' + "\n\n".join(
        FUNCTION.format(name=name, number=number) for number, name in enumerate(names)
    )


def test_a_module_s_functions_lose_their_docstrings():
    module_units = units(module(1) + "\n\n@property\ndef described(self):\n    return 1\n")
    code = "def rank0(values):\n    result = sorted(values)\n    # a comment\n    return result[0]"
    assert [unit.code for unit in module_units] == [code, "@property\ndef described(self):\n    return 1"]
    assert module_units[0].function == Function(
        "rank0", code, "Return the rank0 of some values, counted from the smallest."
    )
    assert module_units[1].function is None


def test_records_of_code_load_as_scbench_examples(tmp_path):
    pytest.importorskip("tree_sitter_python")
    records = list(code_records([module(12), module(QUESTIONS - 1)], "some", characters=700))
    contexts = [json.loads(record)["context"] for record in records]
    # a function has 84 characters or more, so that seven fit; too few are left of each module
    assert len(contexts) == 1
    assert len(contexts[0]) <= 700
    (tmp_path / "scbench_repoqa.jsonl").write_text("\n".join(records))
    (example,) = scbench_examples("scbench_repoqa", tmp_path, "each", PromptEncoder(byte_tokenizer()))
    assert [question.kind for question in example.questions] == ["scbench_repoqa"] * QUESTIONS
    for question in example.questions:
        (answer,) = question.expected
        assert answer in example.context
        assert '"""' not in answer
        assert question.score(f"```python\n{answer}\n```") == 1
