"""Documentation: its code runs as written, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

import retrograd as rg
from tests.packages import load

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text()], ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore")  # of the packages that pages start from
def test_the_code_runs_as_written(page):
    load("nuwa_pytorch")  # with a stand-in for torchvision
    names = {}
    try:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            exec(block, names)
    finally:
        for package in ("reformer_pytorch", "axial_attention"):
            rg.compat.uninstall(package)


@pytest.mark.parametrize("page", [*PAGES, DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
