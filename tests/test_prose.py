"""Prose that people read in an editor is at most 100 columns wide; tables, code and pictures may be wider."""

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
