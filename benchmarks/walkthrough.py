"""How far a reader has to walk: the functions and files that one training step enters.

    python -m benchmarks.walkthrough [--source ../before/src]

Traces one forward and one backward of a `ReversibleSequence` of 8 pairs of small functions that
keeps nothing, and counts what is entered of the package `retrograd`. A step runs before, so that
caches are filled, as in all but the first step of a training run. Comprehensions do not count as
functions. With `--source`, it traces the retrograd in another folder.

- functions, files: how many different ones are entered;
- calls an update: how often a function is entered, divided by the 16 updates;
- switches an update: how often a function is entered that is in another file than the one entered
  before it, divided by the 16 updates.

Each is printed twice: for everything, and without the guards and what they look at (modules,
generators, buffers).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BLOCKS = 8
UPDATES = 2 * BLOCKS
WIDTH = 4

# What protects an update, and what that looks at. Two of these files were one concept each before
# there were guards: replay.py and waypoints.py.
GUARDS = ("core/guard", "core/structure", "core/holdings", "core/replay", "core/waypoints")


class Entered(NamedTuple):
    """A function that was entered, and its file, relative to the package."""

    file: str
    function: CodeType


def trace(run: Callable[[], Any], package: Path) -> tuple[Any, list[Entered]]:
    """What `run()` returns, and the functions of the package that it entered, in order."""
    entered: list[Entered] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or is_comprehension(code):
            return
        path = Path(code.co_filename)
        if path.is_relative_to(package):
            entered.append(Entered(path.relative_to(package).as_posix(), code))

    sys.setprofile(profile)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return result, entered


def is_comprehension(code: CodeType) -> bool:
    return code.co_name.startswith("<") and code.co_name != "<lambda>"


def is_guard(entered: Entered) -> bool:
    return entered.file.startswith(GUARDS)


def files_of(entered: list[Entered]) -> list[str]:
    """The files, in the order in which they are first entered."""
    return list(dict.fromkeys(e.file for e in entered))


def row(name: str, entered: list[Entered]) -> str:
    switches = sum(a.file != b.file for a, b in itertools.pairwise(entered))
    numbers = (
        f"{len({e.function for e in entered})}",
        f"{len(files_of(entered))}",
        f"{len(entered) / UPDATES:.1f}",
        f"{switches / UPDATES:.1f}",
    )
    return f"| {name} | {' | '.join(numbers)} |"


def function() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, help="the folder that holds another retrograd")
    options = parser.parse_args()
    if options.source is not None:
        sys.path.insert(0, str(options.source.resolve()))
    import retrograd as rg

    package = Path(rg.__file__).parent
    torch.manual_seed(0)
    pairs = [(function(), function()) for _ in range(BLOCKS)]
    stack = rg.ReversibleSequence(pairs, memory=rg.Reverse(keep_last=False))
    x = torch.randn(2, WIDTH)
    stack(x).sum().backward()
    output: Tensor
    output, forward = trace(lambda: stack(x), package)
    loss = output.sum()
    _, backward = trace(loss.backward, package)

    print("| | functions | files | calls an update | switches an update |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, entered in (("forward", forward), ("backward", backward)):
        print(row(name, entered))
        print(row(f"{name}, without guards", [e for e in entered if not is_guard(e)]))
    for name, entered in (("forward", forward), ("backward", backward)):
        print(f"\nFiles of {name}, as they are first entered:")
        print("\n".join(f"  {file}" for file in files_of(entered)))


if __name__ == "__main__":
    main()
