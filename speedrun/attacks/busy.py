"""`python -m speedrun.attacks.busy`: the speed of training while all cores are busy.

PyTorch's threads wait for each other after each operation. By default they spin, which takes the
core from the thread that they wait for if there are more threads than free cores. The trainer has
them sleep (`OMP_WAIT_POLICY=passive`, see `speedrun/__main__.py`). Both are measured in turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from speedrun import metrics

WAYS = {"spinning": {"GOMP_SPINCOUNT": "300000"}, "sleeping": {}}  # the first is libgomp's default
TRAIN = "train --depth 12 --steps 8 --json --out".split()
ROUNDS = 2
LONGEST = 120  # seconds of a run


def speed(environment: dict[str, str], folder: Path) -> list[float]:
    """Bytes a second of the steps that a run takes within `LONGEST`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    command = [sys.executable, "-m", "speedrun", *TRAIN, str(folder)]
    process = subprocess.Popen(
        command, env={**own, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        process.wait(LONGEST)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    path = folder / "metrics.jsonl"
    return [row["bytes_per_second"] for row in metrics.read(path)] if path.exists() else []


def main() -> None:
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for i in range(ROUNDS):
                for way, environment in WAYS.items():
                    found[way] += speed(environment, Path(folder, f"{way}-{i}"))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    for way, speeds in found.items():
        middle = f"{statistics.median(speeds):,.0f} bytes/s" if speeds else "no step"
        print(f"{way}: {middle}, {len(speeds)} steps")


if __name__ == "__main__":
    main()
