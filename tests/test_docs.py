"""Documentation: its code runs as written, and its links lead somewhere."""

import importlib.util
import pkgutil
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import retrograd as rg
from benchmarks import __main__ as benchmarks
from benchmarks import gpu
from retrograd import cli
from retrograd.compiling.seams import TOO_OLD
from speedrun import __main__ as speedrun
from speedrun.attacks import __main__ as attacks
from tests.packages import load
from tests.test_house import PUBLIC

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OTHERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "speedrun" / "README.md"]
PARSERS = {
    "retrograd": cli.parser,
    "speedrun": speedrun.parser,
    "speedrun.attacks": attacks.parser,
    "benchmarks": benchmarks.parser,
    "benchmarks.gpu": gpu.parser,
}
PRINTED = ("tour", "how-it-works")  # pages whose output is compared, too
SITE = ("mkdocs", "material", "mkdocstrings")


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if "```python" in p.read_text() and p.stem not in PRINTED],
    ids=lambda page: page.stem,
)
@pytest.mark.filterwarnings("ignore")  # of the packages that pages start from
def test_the_code_runs_as_written(page):
    load("nuwa_pytorch")  # with a stand-in for torchvision
    text = page.read_text()
    if TOO_OLD:  # stacks break the graph
        text = text.replace("fullgraph=True", "fullgraph=False")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    if any(
        "init_process_group" in block for block in blocks
    ):  # in a process of its own, which gloo's threads end badly
        code = "\n".join([*blocks, "import os", "os._exit(0)"])
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return
    names = {}
    try:
        for block in blocks:
            exec(block, names)
    finally:
        for package in ("reformer_pytorch", "axial_attention"):
            rg.compat.uninstall(package)


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: page.stem)
def test_every_block_says_what_it_is_and_every_command_is_one(page):
    """Python is run, text is output, diffs are read. The programs and options of shell commands
    exist, and so do the modules that the text names.
    """
    makefile = (ROOT / "Makefile").read_text()
    for language, block in re.findall(
        r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        assert language in ("python", "text", "sh", "diff"), block
        for line in block.splitlines() if language == "sh" else ():
            words = shlex.split(line, comments=True)
            if words[:1] == ["make"]:
                assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
            elif words and words[0] != "pip":
                program = next(word for word in words if word in PARSERS)
                PARSERS[program]().parse_args(words[words.index(program) + 1 :])
    modules = r"`python -m\s(benchmarks(?:\.\w+)?|compatibility|speedrun)\b"
    for module in re.findall(modules, page.read_text()):
        assert importlib.util.find_spec(module), module


@pytest.mark.parametrize("name", PRINTED)
def test_the_page_shows_what_it_prints(name, capsys):
    names = {}
    page = (DOCS / f"{name}.md").read_text()
    for block, shown in re.findall(
        r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", page, re.DOTALL
    ):
        exec(block, names)
        printed = capsys.readouterr().out
        assert not shown or printed == shown


def test_each_public_name_is_documented_on_one_page():
    """And once there: `::: retrograd.Name` on a page of docs/api."""
    pages = [page.read_text() for page in sorted((DOCS / "api").glob("*.md"))]
    documented = [
        pkgutil.resolve_name(path)
        for page in pages
        for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    ]
    times = {name: sum(value is getattr(rg, name) for value in documented) for name in PUBLIC}
    assert times == dict.fromkeys(PUBLIC, 1)


def test_each_command_and_each_of_its_options_is_documented(capsys):
    page = (DOCS / "api" / "cli.md").read_text()
    sections = dict(re.findall(r"^## retrograd (\w+)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.M))
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    verbs = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert verbs == list(sections)
    for verb in verbs:
        with pytest.raises(SystemExit):
            cli.main([verb, "--help"])
        options = re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
        assert options and not [name for name in options if f"`{name}" not in sections[verb]]


# --- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. `--strict`: every page in the navigation, every link and anchor, and every
    name that the reference asks for.
    """
    if not all(map(importlib.util.find_spec, SITE)):
        pytest.skip("what builds the site is not installed: make docs does")
    site = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return site


class References(HTMLParser):
    """What a page links to and shows, and the anchors that it has."""

    def __init__(self, page):
        super().__init__()
        self.found, self.anchors = [], set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes.get("id"), attributes.get("name")}
        self.found += [attributes[name] for name in ("href", "src") if attributes.get(name)]


def test_the_site_has_no_broken_link_and_no_missing_image(site):
    pages = {page: References(page) for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(pages) > 50
    for page, references in pages.items():
        for reference in references.found:
            target, _, anchor = unquote(reference).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            file = (page.parent / target).resolve() if target else page
            file = file / "index.html" if file.is_dir() else file
            assert file.exists(), (page, reference)
            if anchor and file in pages:
                assert anchor in pages[file].anchors, (page, reference)


def test_the_site_shows_what_it_should(site):
    home, stacks, compatibility, index = (
        (site / page / "index.html").read_text()
        for page in ("", "api/stacks", "compatibility", "api")
    )
    assert home.index("Get started") < home.index("<img")
    assert "ReversibleSequence" in stacks
    assert "/edit/main/docs/index.md" in home
    results = (DOCS / "figures" / "compatibility.jsonl").read_text().splitlines()
    cells = re.findall(r'<td class="(equal|wrong|raised|not-run)"', compatibility)
    assert len(cells) == len(results)
    links = set(re.findall(r'href="[^"]*#retrograd\.(\w+)"', index))
    assert links >= set(PUBLIC)
    assert "about twenty steps in all" in (site / "api" / "cli" / "index.html").read_text()
    words = (site / "search" / "search_index.json").read_text()
    assert "ReversibleSequence" in words and "Glossary" in words
