"""`retrograd bench`: time and memory of a step, against plain autograd, checkpointing and the peers
that are installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from retrograd.cli.mistakes import Mistake


def add(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="time, memory and FLOPs of a step: plain autograd, checkpointing, peers that are "
        "installed, retrograd",
        description="Measures a training step of a reversible transformer as run by plain "
        "autograd, by torch.utils.checkpoint "
        "per block, by every reversible library that is installed, and by retrograd with and "
        "without a budget, all in one "
        "process and in turn. Rows go to OUT/steps.jsonl as JSON lines, pictures beside them: "
        "memory.svg (against depth), "
        "frontier.svg (time against memory).",
    )
    bench.add_argument(
        "--quick", action="store_true", help="small networks and few rounds: under a minute"
    )
    bench.add_argument(
        "--rounds", type=int, help="timed steps of each contestant (15; 3 with --quick)"
    )
    bench.add_argument(
        "--contestants", nargs="+", metavar="NAME", help="only these, and plain autograd"
    )
    bench.add_argument(
        "--sizes",
        nargs="+",
        metavar="NAME",
        help="only sizes of these names: large, shown, tiny, depth, width, length; with --quick, "
        "depth",
    )
    bench.add_argument(
        "--draw-only", action="store_true", help="draw the rows of OUT/steps.jsonl again"
    )
    bench.add_argument(
        "--out", type=Path, default=Path("bench"), help="the folder for rows and pictures (bench)"
    )
    bench.add_argument(
        "--json",
        action="store_true",
        help="print the rows as JSON lines when done, and nothing else",
    )
    bench.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from contextlib import nullcontext, redirect_stdout

    from retrograd.bench import cases, matrix

    steps = options.out / "steps.jsonl"
    for folder in (options.out, *options.out.parents):  # before minutes of measuring, not after
        if folder.exists() and not folder.is_dir():
            raise Mistake(f"--out {options.out}: {folder} is a file; name a folder.")
    unknown = set(options.contestants or ()) - cases.CONTESTANTS.keys()
    if unknown:
        raise Mistake(
            f"no contestant {', '.join(sorted(unknown))}; there are {', '.join(cases.CONTESTANTS)}."
        )
    every = matrix.QUICK if options.quick else matrix.FULL
    sizes = [size for size in every if options.sizes is None or size.name in options.sizes]
    if not sizes:
        raise Mistake(
            f"no size {', '.join(options.sizes)}; there are "
            f"{', '.join(dict.fromkeys(size.name for size in every))}."
        )
    rounds = options.rounds if options.rounds is not None else 3 if options.quick else 15
    if rounds < 1:
        raise Mistake(f"--rounds {rounds}: one at least.")
    if options.draw_only:
        try:
            rows = matrix.read(steps)
        except (OSError, ValueError, KeyError) as error:
            raise Mistake(
                f"--draw-only: there are no rows to be read in {steps} ({error}); measure first."
            ) from error
    else:
        with redirect_stdout(sys.stderr) if options.json else nullcontext():
            rows = list(matrix.run(sizes, rounds, options.contestants))
        matrix.write(rows, steps)
    try:
        pictures = matrix.draw(rows, options.out)
    except ImportError:
        pictures = []
        print(
            "no pictures: matplotlib is not installed (pip install 'retrograd[plots]')",
            file=sys.stderr,
        )
    if options.json:
        print("\n".join(json.dumps(row) for row in rows))
    else:
        print(f"{len(rows)} rows in {steps}" + "".join(f", {path}" for path in pictures))
    return 0
