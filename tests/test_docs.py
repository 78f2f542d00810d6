"""Documentation: its code runs as written, and its links lead somewhere."""

import importlib.util
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import retrograd as rg
from benchmarks import __main__ as benchmarks
from benchmarks import gpu
from retrograd import cli
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
FUSED_LOSS = "LinearCrossEntropyOptions"  # since torch 2.13
SITE = ("mkdocs", "material", "mkdocstrings")


@pytest.mark.parametrize(
    "page", [p for p in PAGES if "```python" in p.read_text()], ids=lambda page: page.stem
)
@pytest.mark.filterwarnings("ignore")  # of the packages that pages start from
def test_the_code_runs_as_written(page):
    if FUSED_LOSS in page.read_text() and not hasattr(torch.nn, FUSED_LOSS):
        pytest.skip(f"torch {torch.__version__} has no torch.nn.{FUSED_LOSS}")
    load("nuwa_pytorch")  # with a stand-in for torchvision
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
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


def test_the_tour_shows_what_it_prints(capsys):
    names = {}
    page = (DOCS / "tour.md").read_text()
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


def test_each_option_of_the_command_line_is_documented(capsys, monkeypatch):
    """As its help says it, however the lines are broken."""
    monkeypatch.setenv("COLUMNS", "1000")

    def told(*arguments):
        with pytest.raises(SystemExit):
            cli.main([*arguments, "--help"])
        return capsys.readouterr().out

    page = "".join((DOCS / "api" / "cli.md").read_text().split())
    for verb in re.findall(r"^    (\w+)\b", told(), re.MULTILINE):
        assert f"##retrograd{verb}" in page
        options = re.findall(r"^  (--.*)$", told(verb), re.MULTILINE)
        assert not [option for option in options if "".join(option.split()) not in page], verb


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, SITE)),
    reason="what builds the site is not installed: make docs does",
)
def test_the_site_builds_without_a_warning(tmp_path):
    """Every page in the navigation, every link and anchor, every name that the reference
    asks for.
    """
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ReversibleSequence" in (tmp_path / "site" / "api" / "stacks" / "index.html").read_text()
