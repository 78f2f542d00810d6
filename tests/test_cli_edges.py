"""The edges of the command line: names, terminals, streams that are closed, files that exist."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from retrograd import cli
from retrograd.cli.terminal import one_printable_line, printable

NETWORK = """
import random
from collections import OrderedDict
import torch
from torch import nn
import retrograd as rg

def pairs():
    net = rg.ReversibleSequence([(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)])
    return net, torch.randn(2, 4)

def named(a, b):
    updates = [rg.Update(a, nn.Linear(4, 4), reads=(b,)), rg.Update(b, nn.Linear(4, 4), reads=(a,))]
    return rg.Reversible(updates), ({a: torch.randn(2, 4), b: torch.randn(2, 4)},)

def dollars():
    return named("$x_{", "y$")

class Draws(nn.Linear):
    def forward(self, x):
        return super().forward(x) * random.random()

def controls():
    pairs = [(Draws(4, 4), nn.Linear(4, 4)) for _ in range(3)]
    return nn.Sequential(OrderedDict({"\\x1b[2J": rg.ReversibleSequence(pairs)})), torch.randn(2, 4)

def says():
    raise ValueError("\\x1b]0;title\\x07")
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "edge_networks.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("edge_networks", None)


def retrograd(*arguments, shell=""):
    command = f'"$0" -m retrograd "$@" {shell}'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )


def test_a_page_is_written_through_a_link_and_to_a_device(tmp_path):
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to("real.html")
    (tmp_path / "real.part").write_text("mine")
    assert cli.main(["check", "edge_networks:pairs", "--html", "link.html"]) == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "real.part").read_text() == "mine"
    assert cli.main(["check", "edge_networks:pairs", "--html", "/dev/null"]) == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_picture_is_there_as_a_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    (tmp_path / "picture.svg").write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert cli.main(["check", "edge_networks:pairs", "--plot", "picture.svg"]) == 2
    assert capsys.readouterr().err == "retrograd check: No space left on device: picture.svg.\n"
    assert (tmp_path / "picture.svg").read_text() == "old"


def test_names_with_dollars_are_drawn(tmp_path):
    arguments = ["check", "edge_networks:dollars", "--plot", "a.svg", "--html", "a.html"]
    assert cli.main(arguments) == 0
    assert (tmp_path / "a.svg").stat().st_size > 5000
    assert "<svg" in (tmp_path / "a.html").read_text()
    assert cli.main(["plan", "edge_networks:dollars", "--plot", "b.svg"]) == 0


@pytest.mark.parametrize(("verb", "code"), [("check", 1), ("plan", 0)])
def test_names_with_control_characters(verb, code, capsys):
    assert cli.main([verb, "edge_networks:controls"]) == code
    printed = capsys.readouterr()
    assert r"\x1b[2J" in printed.out
    assert not {"\x1b", "\r"} & {*printed.out, *printed.err}


def test_an_error_cannot_write_to_the_terminal(capsys):
    assert cli.main(["check", "edge_networks:says"]) == 2
    told = capsys.readouterr().err
    assert r"\x1b]0;title\x07" in told and told.count("\n") == 1 and "\x1b" not in told


def test_printable():
    assert printable("a\tb\nc ünï \N{EARTH GLOBE EUROPE-AFRICA}") == (
        "a\tb\nc ünï \N{EARTH GLOBE EUROPE-AFRICA}"
    )
    assert printable("\x1b[2J\r\x9b\x7f\u202e\u2028\x00") == r"\x1b[2J\r\x9b\x7f\u202e\u2028\x00"
    assert one_printable_line("a\tb\nc") == r"a\tb\nc"


def test_a_file_in_the_current_folder_does_not_run_in_place_of_a_package(tmp_path):
    (tmp_path / "matplotlib.py").write_text("open('was here', 'w')\nraise ImportError('mine')\n")
    for target in ("edge_networks:pairs", "edge_networks.py:pairs"):
        done = retrograd("check", target, "--html", "page.html")
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "was here").exists()
        assert "<svg" in (tmp_path / "page.html").read_text()


def test_streams_that_are_closed():
    assert retrograd("info", shell="<&- >&- 2>&-").returncode == 0
    done = retrograd("check", "nowhere:f", shell="2>&-")
    assert done.returncode == 2
    assert done.stdout == ""  # a mistake for a stderr that is closed does not go to stdout


def test_a_broken_pipe_ends_quietly():
    done = retrograd("check", "--help", shell="| true; exit ${PIPESTATUS[0]}")
    assert done.returncode in (0, 141)
    assert done.stderr == ""


def test_a_stderr_that_nobody_reads():
    done = retrograd("check", "nowhere:f", shell="2> /dev/full")
    assert done.returncode == 2


def test_a_file_that_is_named_in_another_encoding(tmp_path):
    name = os.fsdecode(b"n\xff.py")
    Path(tmp_path, name).write_text(NETWORK)
    for target in (f"{name}:pairs", f"{name}:nothing"):
        done = retrograd("plan", target)
        assert done.returncode == (0 if target.endswith("pairs") else 2), done.stderr
        assert "Traceback" not in done.stderr
