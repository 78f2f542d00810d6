"""The examples run as a user would run them, learn something, draw it, and save memory."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import retrograd as rg

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PRETRAINED = ROOT / "examples" / "pretrained_sentences.py"
ADAPTORS = ROOT / "examples" / "adaptors.py"  # see test_compat_others.py
DRAWN = [example for example in EXAMPLES if example not in (PRETRAINED, ADAPTORS)]


@pytest.mark.parametrize("example", DRAWN, ids=lambda path: path.stem)
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


@pytest.mark.integration
def test_a_pretrained_network_converts():
    """Embeddings keep their bits under `Euler` and `Bdia`, and `Euler` trains to the bit."""
    from examples import pretrained_sentences as example

    draw = random.Random(0)
    train = [example.batch(example.NAMES[:12], 4, draw) for _ in range(2)]
    tokens, _ = example.batch(example.NAMES[12:], 8, draw)
    trained = []
    for name in ("plain", "Euler()", "Bdia(0.25)"):
        model = example.Classifier()
        with torch.no_grad():
            before = model.eval().embed(tokens)
        if example.RULES[name]:
            rg.convert(model, example.RULES[name])
        with torch.no_grad():
            assert torch.equal(before, model.embed(tokens))
        torch.manual_seed(0)
        model.head.reset_parameters()
        example.fine_tune(model, train)
        with torch.no_grad():
            trained.append(model.eval().embed(tokens))
    assert torch.equal(trained[0], trained[1])
    assert not torch.equal(trained[0], trained[2])


@pytest.mark.integration
def test_the_pretrained_example_runs():
    command = [sys.executable, str(PRETRAINED), "--steps", "2", "--rule", "Midpoint(1)"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"^held out: [\d.]+% of 256 pairs right", done.stdout, re.MULTILINE)
    ours, plain = re.findall(r"([\d.]+) MiB", done.stdout)
    assert float(ours) < 0.7 * float(plain)


def test_there_are_four_kinds():
    """Adaptors for other libraries, a pretrained network, an installed package on retrograd, a
    network built with retrograd.
    """
    adaptors, pretrained, reformer, vision = EXAMPLES
    assert "rg.Reversible(" in adaptors.read_text()
    assert "rg.convert(model" in pretrained.read_text()
    assert 'rg.compat.install("reformer_pytorch")' in reformer.read_text()
    assert "from retrograd.models.vision import" in vision.read_text()
