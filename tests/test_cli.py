"""The command line: what it writes, and that mistakes are told in one line."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from retrograd import cli
from retrograd.bench import matrix


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(
        matrix,
        "QUICK",
        [replace(matrix.SHOWN, name="depth", blocks=n, width=8, batch=1, tokens=8) for n in (2, 4)],
    )


@pytest.mark.filterwarnings("ignore")  # of the peers
def test_bench_measures_stores_and_draws(tiny, tmp_path, capsys):
    chosen = [
        "bench",
        "--quick",
        "--rounds",
        "1",
        "--contestants",
        "checkpoint",
        "retrograd",
        "retrograd, 50%",
        "--out",
        str(tmp_path),
    ]
    assert cli.main(chosen) == 0
    printed = capsys.readouterr().out
    assert "4 blocks, width 8, 1 x 8 tokens" in printed and "| retrograd |" in printed
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert {row["contestant"] for row in rows} >= {"plain", "checkpoint", "retrograd"}
    assert all(row["gradient_difference"] < 1e-5 for row in rows)
    pictures = [tmp_path / "memory.svg", tmp_path / "frontier.svg"]
    assert all(picture.stat().st_size > 5000 for picture in pictures)
    for picture in pictures:
        picture.unlink()
    assert cli.main(["bench", "--draw-only", "--out", str(tmp_path), "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert all(picture.exists() for picture in pictures)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--out", "{file}"], "is a file; name a folder"),
        (["--out", "{file}/inside"], "is a file; name a folder"),
        (["--draw-only", "--out", "{folder}"], "measure first"),
        (["--contestants", "nobody"], "no contestant nobody; there are plain, checkpoint"),
        (["--sizes", "huge"], "no size huge; there are"),
        (["--rounds", "0"], "one at least"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, text, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("mine")
    arguments = [a.format(file=file, folder=tmp_path) for a in arguments]
    assert cli.main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1
    assert file.read_text() == "mine"


@pytest.mark.parametrize("rows", ['{"a": 1', '{"a": 1}', "", None])
def test_rows_that_cannot_be_read(rows, tmp_path, capsys):
    steps = tmp_path / "steps.jsonl"
    steps.mkdir() if rows is None else steps.write_text(rows)
    assert cli.main(["bench", "--draw-only", "--out", str(tmp_path)]) == 2
    assert "measure first" in capsys.readouterr().err


def test_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "retrograd", "--help"], capture_output=True, text=True, check=True
    )
    assert "bench" in done.stdout
    wrong = subprocess.run(
        [sys.executable, "-m", "retrograd", "bunch"], capture_output=True, text=True
    )
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr
