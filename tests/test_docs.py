"""The generated pages are current, and links between pages lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def make_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts/make_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cli.md", "errors.md"])
def test_generated_page_is_current(name: str) -> None:
    pages = {path.name: text for path, text in make_docs().pages().items()}
    assert (ROOT / "docs" / name).read_text() == pages[name], "run python scripts/make_docs.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page}: {target}"


NAMED = re.compile(r"`(?:([\w/]+\.py))?::(\w+)(?:\[[^`]*\])?`")
TABLES = [ROOT / "docs/reliability.md", ROOT / "docs/ecosystem.md"]


@pytest.mark.parametrize("page", TABLES, ids=lambda p: p.name)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    """A name without a file belongs to the last file named before it, also by a link."""
    sources = {p.relative_to(ROOT / "tests").as_posix(): p for p in (ROOT / "tests").rglob("*.py")}
    checked, file = 0, ""
    for line in page.read_text().splitlines():
        for found in re.finditer(rf"{NAMED.pattern}|([\w/]*\btest_\w+\.py)", line):
            file = (found[1] or found[3] or file).rpartition("tests/")[2]
            if found[2] is None:
                continue
            text = [p.read_text() for n, p in sources.items() if f"/{n}".endswith(f"/{file}")]
            assert text, f"{page.name}: there is no {file}: {line}"
            assert any(f"def {found[2]}" in t for t in text), f"{page.name}: {found[0]} of {file}"
            checked += 1
    assert checked > 10
