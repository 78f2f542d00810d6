"""The README: its code runs as written, and what it names exists."""

import re
from pathlib import Path

import retrograd as rg

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_examples_run_as_written():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 4
    names = {}
    try:
        for block in blocks:
            exec(block, names)
    finally:
        rg.compat.uninstall("reformer_pytorch")
    assert names["streams"]["v1"].shape == (2, 9, 16)


def test_the_first_example_is_twelve_lines():
    first = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    assert len(first.strip().splitlines()) <= 12


def test_every_test_file_of_the_promises_exists_and_every_make_target_too():
    files = set(re.findall(r"`((?:speedrun/tests/)?test_\w+\.py)`", README))
    assert "speedrun/tests/test_train.py" in files
    assert all((ROOT / name).exists() or (ROOT / "tests" / name).exists() for name in files)
    targets = set(re.findall(r"^make (\w+)", README, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
