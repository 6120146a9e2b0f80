"""The table: cells are kept, and gone on with."""

from pathlib import Path

import pytest

from kvjax.errors import UserError
from kvjax.plan import table
from kvjax.plan.program import TEMPORARIES, Figures

ROOT = Path(__file__).parent.parent.parent


def test_cells_are_compiled_once_and_shown(tmp_path, monkeypatch, capsys):
    jobs = []

    def compiled(job):
        jobs.append(job)
        return Figures({TEMPORARIES: job.length * job.batch * 2**15}, 0.0, 0, {}, {}, 1.0)

    monkeypatch.setattr(table, "compiled", compiled)
    monkeypatch.setattr(table.Topology, "check_compiler", lambda self: None)
    told = table.TableConfig(
        models=("llama-3.1-8b",), topologies=("v5e:2x4", "v5p:2x2x1"), lengths=(32768,), contexts=(131072,),
        batches=(8,), kept=(1.0, 0.25), stages=("train", "decode"), out=tmp_path / "cells.jsonl",
    )  # fmt: skip
    table.write(told)
    assert {(job.mesh, job.length, job.batch) for job in jobs} == {
        ("tensor=8", 32768, 1), ("tensor=4", 32768, 1), ("tensor=8", 131072, 8), ("tensor=4", 131072, 8),
    }  # fmt: skip
    count = len(jobs)
    assert count == 6
    capsys.readouterr()
    table.write(told)
    assert len(jobs) == count
    said = capsys.readouterr().out
    assert "| train | 32K |\n|---|---|\n| llama-3.1-8b, v5e:2x4 | 1.0 |" in said
    assert "| decode | 8 × 128K, all | 8 × 128K, 0.25 |" in said
    assert "| llama-3.1-8b, v5e:2x4 | ~~32.0~~ | ~~32.0~~ |" in said
    assert "| llama-3.1-8b, v5p:2x2x1 | 32.0 | 32.0 |" in said


def test_the_documented_table_is_that_of_its_cells():
    made = table.markdown(table.TableConfig(), table.read(ROOT / "docs" / "memory.jsonl"))
    assert made.splitlines()[0].startswith("| train |")
    assert made in (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


def test_the_readme_s_table_is_of_the_same_cells():
    found, models = table.read(ROOT / "docs" / "memory.jsonl"), 0
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        model, *places = (cell.strip() for cell in line.strip("|").split("|"))
        if model.lower() not in table.TableConfig().models:
            continue
        models += 1
        for topology, place in zip(table.TableConfig().topologies, places, strict=True):
            cells = [
                table.Cell(model.lower(), "train", topology, 32768),
                table.Cell(model.lower(), "prefill", topology, 131072),
                *(table.Cell(model.lower(), "decode", topology, 131072, 8, kept) for kept in (1.0, 0.25)),
            ]
            assert place == " / ".join(table.shown(found[cell]) for cell in cells)
    assert models == len(table.TableConfig().models)


def test_another_file_is_refused(tmp_path):
    (tmp_path / "cells.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(UserError, match="cells.jsonl: holds something else than cells"):
        table.read(tmp_path / "cells.jsonl")


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ({"stages": ("nope",)}, "table: --stages is one of train, decode, prefill, got 'nope'"),
        ({"batches": ()}, "table: --batches must have one value at least"),
        ({"batches": (0,)}, "table: --batches must be a whole number of at least 1, got 0"),
        ({"kept": (0.0,)}, "table: --kept must be a finite number, above 0 and at most 1"),
        ({"minutes": float("nan")}, "table: --minutes must be a finite number"),
        ({"models": ("nobody",)}, "--model nobody: no such folder here"),
    ],
)
def test_what_is_no_cell_is_refused_before_anything_compiles(told, line, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "compiled", lambda job: pytest.fail("it compiled"))
    monkeypatch.setattr(table.Topology, "check_compiler", lambda self: None)
    with pytest.raises(UserError, match=f"^{line}"):
        table.write(table.TableConfig(**{"out": tmp_path / "cells.jsonl"} | told))
