"""Prose that people read in an editor is at most 100 columns wide; tables, code and pictures may be wider. Every field
of a public class says what it is."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "pallas_kernels/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "gates").rglob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_at_most_100_columns_wide(page):
    fenced, wide = False, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and len(line) > 100 and not line.startswith(("|", "<img", "![")):
            wide.append(f"{page.name}:{number}: {len(line)} columns")
    assert not wide


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def unexplained(source):
    """The public fields of public dataclasses and named tuples that have no docstring, and that their class's does not
    mention in backquotes."""
    for kind in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        made = [ast.unparse(x) for x in (*kind.decorator_list, *kind.bases)]
        if kind.name.startswith("_") or not re.search(r"\b(dataclass|struct|NamedTuple)\b", " ".join(made)):
            continue
        mentioned = re.findall(r"\w+", " ".join(re.findall(r"`[^`]*`", ast.get_docstring(kind) or "")))
        for field, after in zip(kind.body, [*kind.body[1:], None], strict=True):
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and not ast.unparse(field.annotation).startswith("ClassVar"):
                name = ast.unparse(field.target)
                if not (said or name.startswith("_") or name in mentioned):
                    yield f"{kind.name}.{name}"


def test_every_field_says_what_it_is():
    found = {
        str(file.relative_to(ROOT)): list(unexplained(file.read_text(encoding="utf-8")))
        for package in ("kvjax", "pallas_kernels")
        for file in sorted((ROOT / package).rglob("*.py"))
    }
    assert len(found) > 100
    assert not {file: names for file, names in found.items() if names}
    assert list(unexplained('@struct\nclass A:\n    a: int\n    b: int\n    "One."')) == ["A.a"]
