"""The attacks of `make attack`, each with few trials; and that they notice what is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from speedrun.attacks import page
from speedrun.attacks.__main__ import ATTACKS, main
from speedrun.attacks.outcome import Outcome

ROOT = Path(__file__).parents[2]


def attacked(*arguments, patch="pass"):
    """The results of attacks in a process of their own, which has computed nothing yet."""
    code = f"import sys; from speedrun.attacks.__main__ import main; {patch}; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--json", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr
    return {name: (tried, lost) for name, (tried, *lost) in json.loads(done.stdout).items()}


def test_nothing_is_lost():
    names = ["states", "weights", "configurations", "curves", "threads", "shared_folders"]
    names += ["full_disks", "interrupts", "command_lines_train", "command_lines_plan"]
    found = attacked(*names, "--share", "0.005")
    assert list(found) == names
    assert all(tried for tried, _ in found.values())
    assert not {name: lost for name, (_, lost) in found.items() if lost}


def test_the_attacks_notice_what_is_lost():
    """A checkpoint is read without a look at its checksums."""
    patch = "from speedrun import checkpoints; checkpoints._verified = checkpoints._read_state"
    (_, lost) = attacked("states", "--share", "0.005", patch=patch)["states"]
    assert lost


def test_names_and_shares_that_cannot_be(capsys):
    assert main(["nothing"]) == 2
    assert "nothing: no such attack; there are kills, " in capsys.readouterr().err
    assert main(["--share", "0"]) == 2


def test_the_page_is_made_from_the_results(tmp_path, monkeypatch):
    rows = json.loads((ROOT / page.FIGURES).read_text())
    assert rows.keys() <= ATTACKS.keys()
    content = (ROOT / page.PAGE).read_text()
    assert page.table(rows) in content
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    (tmp_path / page.PAGE).write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    page.write({"kills": ("kills", Outcome(3, ("lost",)))})
    page.write({"states": ("states", Outcome(2000, ()))})
    text = (tmp_path / page.PAGE).read_text()
    assert "| kills | 3 | 1 |\n| states | 2,000 | 0 |" in text
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
