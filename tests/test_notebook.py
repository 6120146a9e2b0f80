"""docs/tour.ipynb: executed at a small size, and kept as it was executed whole."""

import copy
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
SMALL = "SEQUENCES, CONTEXT, CONTEXTS = 16, 256, 1"


@pytest.fixture(scope="module")
def kept():
    return nbformat.read(ROOT / "docs" / "tour.ipynb", as_version=4)


def code(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


def printed(book):
    """What the cells print or show as text, one string a cell."""
    outputs = [cell.outputs for cell in code(book)]
    return ["".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in own) for own in outputs]


def row(book, policy):
    """The line of the table of compared policies: entries kept, footprint, right in percent."""
    line = re.search(rf"^{policy} +(\S+) +(\S+) +(\S+)%$", "\n".join(printed(book)), re.MULTILINE)
    assert line, f"no line for {policy}"
    return [float(number) for number in line.groups()]


@pytest.mark.thorough
def test_it_runs(kept, tmp_path, monkeypatch):
    book = copy.deepcopy(kept)
    (parameters,) = (cell for cell in code(book) if "parameters" in cell.metadata.get("tags", ()))
    parameters.source = SMALL
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    # two updates teach the gates nothing: they keep all, and nothing is forgotten
    assert (tmp_path / "runs" / "tour" / "gates" / "config.json").exists()
    assert row(book, "full") == row(book, "wgkv") == [1, 1, 100]
    assert "12 of 12 right" in printed(book)[-1]


def test_what_is_kept_was_executed_whole(kept):
    assert [cell.execution_count for cell in code(kept)] == list(range(1, len(code(kept)) + 1))
    assert all(output.output_type != "error" for cell in code(kept) for output in cell.outputs)
    assert sum("image/png" in output.get("data", {}) for cell in code(kept) for output in cell.outputs) == 2
    assert not re.search(r"/(home|root|tmp|opt|Users)/", "\n".join(printed(kept)))


def test_its_figures_are_those_of_the_readme(kept):
    (line,) = (x for x in (ROOT / "README.md").read_text().splitlines() if x.startswith("| **WG-KV** | **0."))
    assert row(kept, "wgkv") == [float(number) for number in re.findall(r"\*\*([\d.]+)%?\*\*", line)]
