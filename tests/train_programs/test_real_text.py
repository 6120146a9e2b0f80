"""Natural text from packages: pieces, and what a package lacks."""

import gzip
import itertools

import pytest

from kvjax.errors import UserError
from train.real_text import WORKS, Work, find_archives, pieces, read


def test_pieces_are_whole_paragraphs_of_sizes_in_turn():
    paragraphs = [f"{number:03} " + "x" * 96 for number in range(40)]  # 100 characters, and a break of two
    found = list(pieces("\n\n".join(paragraphs), (250, 450)))
    # at least 250 are three paragraphs, at least 450 five
    assert [piece.count("\n\n") + 1 for piece in found] == [3, 5] * 5
    assert "\n\n".join(piece.strip() for piece in found) == "\n\n".join(paragraphs)
    assert len(list(pieces("\n\n".join(paragraphs[:39]), (250, 450)))) == 9


def test_no_package_s_file_is_trained_on_and_held_out():
    trained, heldout = ([work for work in WORKS.values() if work.heldout is part] for part in (False, True))
    assert heldout
    for one, other in itertools.product(trained, heldout):
        assert (one.package, one.pattern, one.novel) != (other.package, other.pattern, other.novel)


def test_files_are_read_in_order_packed_or_not(tmp_path):
    (tmp_path / "doc").mkdir()
    (tmp_path / "doc" / "b.txt").write_text("second")
    (tmp_path / "doc" / "a.txt.gz").write_bytes(gzip.compress(b"first"))
    assert read(Work("some", "doc/*"), tmp_path) == "first\n\nsecond"
    with pytest.raises(UserError, match=r"package some holds no doc/\*\.rst: another version of it\?"):
        read(Work("some", "doc/*.rst"), tmp_path)


def test_a_missing_package_is_named_with_the_command_that_gets_it(tmp_path):
    packages = sorted({work.package for work in WORKS.values()})
    for package in packages[:-1]:
        (tmp_path / f"{package}_1_all.deb").touch()
    with pytest.raises(UserError, match=f"expected 1: apt-get download {packages[-1]}"):
        find_archives(tmp_path)
