"""`python -m benchmarks`: time, memory and FLOPs of a training step, for every contestant."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import frontier, matrix, page, rivals
from benchmarks.cases import Size
from retrograd.cli.mistakes import Mistake, run_command

RESULTS = Path("benchmarks/results")
FIGURES = page.DOCS / "figures" / "bench"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures a training step of a transformer, reversible and ordinary, as run by "
        "plain autograd, by every kind of checkpointing, by every reversible library that is "
        "installed, and by retrograd with and without a budget, all in one process and in turn. "
        "Rows go to OUT/steps.jsonl as JSON lines, pictures beside them: memory.svg (against "
        "depth), frontier-SIZE.svg (FLOPs against memory).",
    )
    made.add_argument(
        "--quick", action="store_true", help="small networks and few rounds: under a minute"
    )
    made.add_argument(
        "--rounds", type=int, help="timed steps of each contestant (15; 3 with --quick)"
    )
    made.add_argument(
        "--contestants", nargs="+", metavar="NAME", help="only these, and plain autograd"
    )
    made.add_argument(
        "--sizes",
        nargs="+",
        metavar="NAME",
        help="only sizes of these names: large, shown, tiny, depth, deep, width, length; with "
        "--quick, depth and tiny",
    )
    made.add_argument(
        "--draw-only", action="store_true", help="draw the rows of OUT/steps.jsonl again"
    )
    made.add_argument(
        "--out", type=Path, default=RESULTS, help=f"the folder for rows and pictures ({RESULTS})"
    )
    made.add_argument(
        "--write",
        action="store_true",
        help="write the tables of docs/benchmarks.md and README.md, and rows and pictures into "
        "docs/figures/bench; rows that were not measured this time stay as they are",
    )
    made.add_argument(
        "--json",
        action="store_true",
        help="print the rows as JSON lines when done, and nothing else",
    )
    made.set_defaults(run=run)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command("benchmarks", parser(), arguments)


def run(options: argparse.Namespace) -> int:
    _check(options)  # before minutes of measuring, not after
    sizes = _sizes(options)
    folder = FIGURES if options.write else options.out
    steps = folder / "steps.jsonl"
    if options.draw_only:
        rows = _stored(steps)
    else:
        rows = _measured(sizes, options)
        if options.write and steps.exists():
            rows = matrix.merged(rows, _stored(steps))
        matrix.write(rows, steps)
    compared = [*rows, *frontier.compiled_rows()] if options.write else rows
    if options.write:
        _write_page(compared)
    pictures = _drawn(compared, folder)
    if options.json:
        print("\n".join(json.dumps(row) for row in rows))
    else:
        print(", ".join([f"{len(rows)} rows in {steps}", *map(str, pictures)]))
    return 0


def _check(options: argparse.Namespace) -> None:
    for folder in (options.out, *options.out.parents):
        if folder.exists() and not folder.is_dir():
            raise Mistake(f"--out {options.out}: {folder} is a file; name a folder.")
    names = [name for network in rivals.NETWORKS.values() for name in network.contestants]
    unknown = {*(options.contestants or ())} - {*names}
    if unknown:
        known = ", ".join(dict.fromkeys(names))
        raise Mistake(f"no contestant {', '.join(sorted(unknown))}; there are {known}.")
    if options.rounds is not None and options.rounds < 1:
        raise Mistake(f"--rounds {options.rounds}: must be at least 1.")


def _sizes(options: argparse.Namespace) -> list[Size]:
    sizes = matrix.QUICK if options.quick else matrix.FULL
    if options.sizes is None:
        return sizes
    chosen = [size for size in sizes if size.name in options.sizes]
    if not chosen:
        known = ", ".join(dict.fromkeys(size.name for size in sizes))
        raise Mistake(f"no size {', '.join(options.sizes)}; there are {known}.")
    return chosen


def _measured(sizes: list[Size], options: argparse.Namespace) -> list[matrix.Row]:
    rounds = options.rounds or (3 if options.quick else 15)
    output = sys.stderr if options.json else sys.stdout
    with contextlib.redirect_stdout(output):
        return list(matrix.run(sizes, rounds, options.contestants))


def _stored(steps: Path) -> list[matrix.Row]:
    try:
        return matrix.read(steps)
    except (OSError, ValueError, KeyError) as error:
        raise Mistake(
            f"--draw-only: there are no rows to be read in {steps} ({error}); measure first."
        ) from error


def _write_page(rows: list[matrix.Row]) -> None:
    for name, table in {**matrix.tables(rows), "frontier": frontier.text(rows)}.items():
        page.write_table(name, table, "benchmarks.md")
    if any(row["name"] == "large" for row in rows):
        page.write_table("steps", matrix.table_of_readme(rows), "../README.md")


def _drawn(rows: list[matrix.Row], folder: Path) -> list[Path]:
    try:
        return matrix.draw(rows, folder)
    except ImportError:
        print(
            "no pictures: matplotlib is not installed (pip install 'retrograd[plots]')",
            file=sys.stderr,
        )
        return []


if __name__ == "__main__":
    sys.exit(main())
