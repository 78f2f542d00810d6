"""`retrograd check`, `plan`, `info`: what they print, exit codes, mistakes in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from retrograd import cli
from retrograd.cli import colours

NETWORKS = """
import random
import torch
from torch import nn
import retrograd as rg

def sound():
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4)])
    return stack, torch.randn(2, 4)

def wrong():
    class Draws(nn.Linear):
        def forward(self, x):
            return super().forward(x) * random.random()
    stack = rg.ReversibleSequence([(Draws(4, 4), Draws(4, 4)) for _ in range(4)])
    return stack, (torch.randn(2, 4),)

def keywords():
    class Scaled(nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * scale
    pairs = [(Scaled(4, 4), Scaled(4, 4)) for _ in range(2)]
    return pairs, (torch.randn(2, 4),), {"scale": torch.rand(4)}

def fails():
    raise OSError("no such data set")

def shapes():
    return nn.Linear(4, 4), (torch.randn(2, 5),)

def one():
    return nn.Linear(4, 4)

def plain():
    return nn.Linear(4, 4), (torch.randn(2, 4),)

number = 3

def leaves():
    import sys
    sys.exit()

def leaves_late():
    import sys
    class Leaves(nn.Linear):
        def forward(self, x):
            sys.exit(0)
    return [(Leaves(4, 4), Leaves(4, 4))], torch.randn(2, 4)

def talks():
    print("loading")
    module, x = sound()
    module.register_forward_hook(lambda *_: print("running"))
    return module, x

def in_a_list():
    from retrograd.compat.reformer import ReversibleSequence
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stacks = [sound()[0], sound()[0]]
            self.compat = ReversibleSequence([(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)])
        def forward(self, x):
            for stack in self.stacks:
                x = stack(x)
            return self.compat(torch.cat((x, x), -1)[None])
    return Model(), torch.randn(2, 4)

class Awkward(Exception):
    def __str__(self):
        raise ValueError

def awkward():
    raise Awkward

def __getattr__(name):
    if name == "lazy":
        raise ImportError("its own reason")
    raise AttributeError(name)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "my_networks.py").write_text(NETWORKS)
    (tmp_path / "my_broken.py").write_text("import no_such_library_at_all\n")
    (tmp_path / "my_typo.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("my_networks", "my_broken", "my_typo"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "target", ["my_networks:sound", "my_networks.py:sound", "my_networks:keywords"]
)
def test_a_sound_network_ends_with_0(target, capsys):
    assert cli.main(["check", target]) == 0
    assert capsys.readouterr().out.startswith("retrograd check: ok.")


def test_a_wrong_one_ends_with_1_and_says_why(capsys):
    assert cli.main(["check", "my_networks:wrong"]) == 1
    printed = capsys.readouterr()
    assert "draws from Python's random" in printed.out and not printed.err


def test_json_and_nothing_else(capsys):
    for target, code in (("my_networks:sound", 0), ("my_networks:wrong", 1)):
        assert cli.main(["check", target, "--json"]) == code
        assert json.loads(capsys.readouterr().out)["ok"] == (code == 0)


@pytest.mark.parametrize("verb", ["check", "plan"])
def test_what_a_network_prints_is_no_json(verb, capsys):
    assert cli.main([verb, "my_networks:talks", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)
    assert "loading" in printed.err and "running" in printed.err


def test_nobody_reads():
    """As `| true` does, and a disk that is full."""
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    ends = {}
    for end in ("| true; exit ${PIPESTATUS[0]}", "> /dev/full"):
        command = f"{sys.executable} -m retrograd info {end}"
        ends[end[0]] = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, env=buffered
        )
    assert ends["|"].returncode in (0, 141) and "Exception" not in ends["|"].stderr
    assert (
        ends[">"].returncode == 2
        and "No space left" in ends[">"].stderr
        and ends[">"].stderr.count("\n") == 1
    )


def test_pictures_and_pages(tmp_path):
    assert (
        cli.main(["check", "my_networks:sound", "--plot", "report.PNG", "--html", "report.html"])
        == 0
    )
    assert (tmp_path / "report.PNG").stat().st_size > 5000
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>") and "<svg" in page


MISTAKES = {
    "no colon": ("my_networks", "write package.module:factory"),
    "no module": ("nowhere.at.all:f", "there is no module nowhere"),
    "no file": ("nowhere.py:f", "there is no file nowhere.py"),
    "no such name": ("my_networks:soudn", "Did you mean sound?"),
    "not a function": ("my_networks:number", "not a function that returns"),
    "a factory that fails": (
        "my_networks:fails",
        "OSError: no such data set (my_networks.py, line",
    ),
    "a module that cannot be imported": ("my_broken:f", "No module named 'no_such_library_at_all'"),
    "a module that cannot be read": ("my_typo:f", "SyntaxError"),
    "one thing": ("my_networks:one", "returned Linear, not (module, args)"),
    "a factory that leaves": ("my_networks:leaves", "SystemExit"),
    "a network that leaves": ("my_networks:leaves_late", "sys.exit(0)"),
    "an error without words": ("my_networks:awkward", "raised Awkward (my_networks.py"),
    "a name that raises": ("my_networks:lazy", "ImportError: its own reason"),
    "a network that fails": ("my_networks:shapes", "mat1 and mat2 shapes cannot be multiplied"),
}


@pytest.mark.parametrize("verb", ["check", "plan"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_in_one_line(verb, mistake, capsys):
    target, text = MISTAKES[mistake]
    assert cli.main([verb, target]) == 2
    printed = capsys.readouterr()
    assert text in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--plot", "nowhere/report.png"], "there is no folder nowhere"),
        (["--html", "."], "that is a folder"),
        (["--plot", "report.doc"], "no such kind of picture"),
    ],
)
def test_files_that_cannot_be_are_told_before_the_work(arguments, text, capsys):
    assert cli.main(["check", "my_networks:fails", *arguments]) == 2  # the factory is not called
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["check", "plan"])
def test_a_picture_that_cannot_be_drawn_fails(verb, monkeypatch, capsys):
    """Before the work, with what to type."""
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert cli.main([verb, "my_networks:fails", "--plot", "report.png"]) == 1
    printed = capsys.readouterr()
    assert "pip install 'retrograd[plots]'" in printed.err
    assert printed.err.count("\n") == 1 and not printed.out


def test_colours_are_for_terminals(monkeypatch, capsys):
    text = "retrograd check: ok. Fine.\n  drift    ok  none\n  buffers  WRONG  one"
    colours.show(text)
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    colours.show(text)
    printed = capsys.readouterr().out
    assert "\x1b[32mok" in printed and "\x1b[1;31mWRONG" in printed
    assert re.sub(r"\x1b\[[\d;]*m", "", printed) == f"{text}\n"
    monkeypatch.setitem(sys.modules, "rich.console", None)
    colours.show(text)
    assert capsys.readouterr().out == f"{text}\n"


def test_a_plan(tmp_path, capsys):
    modes = ["own", "reverse", "anchor=2", "16 KiB", "keep"]
    assert cli.main(["plan", "my_networks:sound", "--memory", *modes, "--plot", "plan.svg"]) == 0
    printed = capsys.readouterr().out
    for mode in ("Reverse(", "Anchor(every=2", "Budget(limit='16 KiB')", "Keep()"):
        assert mode in printed
    assert (tmp_path / "plan.svg").stat().st_size > 5000
    assert cli.main(["plan", "my_networks:keywords", "--json"]) == 0
    [own, kept] = json.loads(capsys.readouterr().out)
    assert kept["peak"] == kept["plain"] >= own["peak"] and len(own["rows"]) == 4


def test_stacks_are_planned_wherever_they_are(capsys):
    assert cli.main(["plan", "my_networks:in_a_list", "--memory", "own", "--json"]) == 0
    [plan] = json.loads(capsys.readouterr().out)
    stacks = dict.fromkeys(row["name"].partition(".blocks")[0] for row in plan["rows"])
    assert list(stacks) == ["ReversibleSequence 1", "ReversibleSequence 2", "compat"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["my_networks:sound", "--memory", "lots"], "own, reverse, keep, anchor=16, or a budget"),
        (
            ["my_networks:sound", "--memory", "9" * 500],
            "own, reverse, keep, anchor=16, or a budget",
        ),
        (
            ["my_networks:sound", "--memory", "anchor=0"],
            "own, reverse, keep, anchor=16, or a budget",
        ),
        (["my_networks:sound", "--memory", "3 B"], "are less than the"),
        (["my_networks:plain"], "no stack of retrograd ran"),
    ],
)
def test_plans_that_cannot_be(arguments, text, capsys):
    assert cli.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


def test_info(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["retrograd"] in text and facts["torch"] in text and facts["packages"]["numpy"]


def test_every_verb_has_json_and_a_description():
    [commands] = [action for action in cli.parser()._actions if action.dest == "command"]
    for name, verb in commands.choices.items():
        assert "--json" in verb.format_help(), name
        assert verb.description, name


def test_no_command_and_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2 and "which command" in capsys.readouterr().err
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("retrograd ")


def test_as_a_program():
    help = subprocess.run(
        [sys.executable, "-m", "retrograd", "--help"], capture_output=True, text=True, check=True
    )
    assert "check" in help.stdout
    wrong = subprocess.run(
        [sys.executable, "-m", "retrograd", "chekc"], capture_output=True, text=True
    )
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr
