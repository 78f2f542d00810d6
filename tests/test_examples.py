"""The examples run as a user would run them, learn something, draw it, and save memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_and_saves_memory(example, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # A third of the steps of the example: enough to learn something.
    steps = {"vision_digits": "70", "reformer_text": "50"}[example.stem]
    command = [sys.executable, str(example), "--out", str(tmp_path), "--steps", steps]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "100%" in done.stderr  # the progress bar
    (picture,) = tmp_path.glob("*.png")
    assert picture.stat().st_size > 10_000
    ours, plain = re.search(
        r"([\d.]+) MiB with retrograd, ([\d.]+) MiB without", done.stdout
    ).groups()
    assert float(ours) < 0.7 * float(plain)
    result = re.search(r"^held out: .*", done.stdout, re.MULTILINE)
    assert result, done.stdout
    if example.stem == "vision_digits":
        assert float(re.search(r"([\d.]+)%", result[0])[1]) >= 93.0


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short_and_uses_public_names(example):
    text = example.read_text()
    assert len(text.splitlines()) < 100
    assert "retrograd.core" not in text
    assert not re.search(r"\b_\w+\(", text.replace("__init__(", "").replace("__getitem__(", "")), (
        "a private name"
    )


def test_there_are_two_kinds():
    """An installed package on retrograd, and a network built with retrograd."""
    reformer, vision = EXAMPLES
    assert 'rg.compat.install("reformer_pytorch")' in reformer.read_text()
    assert "from retrograd.models.vision import" in vision.read_text()
