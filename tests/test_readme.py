"""The README: it is short, what it shows runs as written, and what it names exists."""

import re
import subprocess
import sys
from pathlib import Path

import torch

import retrograd as rg

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROMISES = (ROOT / "docs" / "promises.md").read_text()

# A model as nanoGPT writes it: the lines that the diff takes out are its own.
GPT = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = nn.Linear(config.n_embd, config.n_embd)
        self.mlp = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte = nn.Embedding(config.vocab_size, config.n_embd),
            h = nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, idx):
        x = self.transformer.wte(idx)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(x)
"""


def test_it_is_short():
    assert len(README.split()) <= 700


def test_the_example_runs_as_written_in_an_empty_folder(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", block], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.startswith("retrograd check: ok."), done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def patched(source, diff):
    """The source after a diff without line numbers: each run of taken lines stands there once."""
    hunks = re.findall(r"((?:^-.*\n)*)((?:^\+.*\n)+)", diff, re.MULTILINE)
    for taken, given in hunks:
        old, new = (re.sub("^[-+]", "", lines, flags=re.MULTILINE) for lines in (taken, given))
        assert not old or source.count(old) == 1, old
        source = source.replace(old, new) if old else new + source
    return source


def test_the_diff_makes_such_a_model_reversible():
    diff = re.search(r"```diff\n(.*?)```", README, re.DOTALL).group(1)
    assert len(diff.splitlines()) == 8
    names = {}
    exec(patched(GPT, diff), names)
    config = type("Config", (), {"n_embd": 4, "n_layer": 3, "vocab_size": 9})
    torch.manual_seed(0)
    model = names["GPT"](config).double()
    assert list(rg.stacks_of(model)) == ["transformer.h"]
    report = rg.check(model, torch.randint(9, (2, 5)), progress=False)
    assert report.ok, str(report)


def test_every_test_file_of_the_promises_exists_and_every_make_target_too():
    files = set(re.findall(r"`((?:speedrun/tests/)?test_\w+\.py)`", PROMISES))
    assert "speedrun/tests/test_train.py" in files
    assert all((ROOT / name).exists() or (ROOT / "tests" / name).exists() for name in files)
    targets = set(re.findall(r"^make (\w+)", README, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
