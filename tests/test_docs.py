"""Every Python snippet of the documentation runs; those of one page share their names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p)], ids=lambda p: p.name)
def test_the_snippets_of_a_page_run(page):
    names: dict[str, object] = {}
    for snippet in snippets(page):
        exec(compile(snippet, page.name, "exec"), names)
    assert "taut" in names


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing
