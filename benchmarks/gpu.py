"""Evidence from a GPU, by anyone who has one.

    python -m benchmarks.gpu --device cuda [--quick] [--output gpu.json]

Under half an hour on a T4. Runs the device tests, compares gradients in the training precision, and
measures bytes (by the allocator) and tokens per second against plain autograd, checkpointing and
the peers that are installed, at 9, 24 and 48 layers. Writes a JSON file, anew after each section,
and prints a table for docs/benchmarks.md. A section that fails is recorded, and the rest runs.

The precision is bfloat16 autocast, and float16 on GPUs that emulate bfloat16. TF32 is off. The
peers' backward is called inside autocast, because they recompute in the precision in which it is
called; retrograd's is called outside. memcnn turns autocast off on a GPU, and runs in float32.
Bytes are the allocator's peak in a step, less what was there before and the gradients. Tokens per
second are from the median of 10 interleaved steps, with the device waited for. Gradients are
compared with deterministic kernels: 0 means equal to the bit.

`gpu_measure` has the measurements, `gpu_table` the table.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks import gpu_measure, gpu_table
from retrograd.cli import info
from retrograd.cli.mistakes import Mistake, run_command

ROOT = Path(__file__).parents[1]
TESTS = Path("tests/test_device.py")
TEST_DEVICE = "rgdev"
VARIABLE = "RETROGRAD_DEVICE"  # the device that the tests run on
QUICK_TESTS = "retained_graphs or edits_in_place"
TESTS_LIMIT = 600.0  # seconds
PRECISIONS = ("float32", "bfloat16", "float16")

Record = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Runs the device tests, compares gradients, and measures bytes and tokens per "
        "second on a device. Under half an hour on a T4. The exit code is 1 if something is not "
        "as retrograd promises.",
    )
    made.add_argument("--device", metavar="NAME", help="such as cuda, cuda:1, xpu or cpu")
    made.add_argument(
        "--quick", action="store_true", help="tiny networks, few tests: seconds, to try the script"
    )
    made.add_argument(
        "--output", type=Path, default=Path("gpu.json"), help="the JSON file (gpu.json)"
    )
    made.add_argument(
        "--sections",
        nargs="+",
        choices=tuple(SECTIONS),
        default=tuple(SECTIONS),
        help="only these",
    )
    made.add_argument("--rounds", type=int, help="timed steps (10; 1 with --quick)")
    made.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="of the steps that are measured (bfloat16 autocast; float16 where the GPU is older)",
    )
    made.add_argument(
        "--table", type=Path, metavar="FILE", help="print the table of a JSON file; measure nothing"
    )
    made.add_argument(
        "--write-docs",
        action="store_true",
        help=f"also write {gpu_table.FIGURES} and the table in {gpu_table.PAGE}",
    )
    made.set_defaults(run=run)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command("benchmarks.gpu", parser(), arguments)


def run(options: argparse.Namespace) -> int:
    record = _stored(options.table) if options.table else _measured(options)
    print(gpu_table.report(record))
    if options.write_docs:
        _check_docs(record["quick"], record["device"], record)
        gpu_table.write_page(record, ROOT)
    return 1 if gpu_table.problems(record) else 0


def _stored(path: Path) -> Record:
    try:
        return gpu_table.read(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Mistake(f"--table {path}: not a record of this command ({error}).") from error


def _measured(options: argparse.Namespace) -> Record:
    _check(options)
    device = _device(options.device)
    record: Record = {
        "device": str(device),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "quick": options.quick,
        "precision": options.precision or gpu_measure.training_precision(device),
        "rounds": options.rounds or (1 if options.quick else 10),
        "has_allocator": gpu_measure.has_allocator(device),
        "seconds": {},
    }
    with gpu_measure.without_tf32():
        for name in (name for name in SECTIONS if name in options.sections):
            start = time.monotonic()
            record[name] = _attempted(SECTIONS[name], device, record)
            gpu_measure.free_memory()
            record["seconds"][name] = round(time.monotonic() - start, 1)
            gpu_table.write(record, options.output)
            _say(f"{name}: {record['seconds'][name]} s")
    return record


def _attempted(section: Callable[[torch.device, Record], Any], *given: Any) -> Any:
    attempts = gpu_measure.Attempts()
    found = attempts.run(lambda: section(*given))
    return found if attempts.failure is None else {"error": attempts.failure}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- arguments


def _check(options: argparse.Namespace) -> None:
    """Before minutes of measuring, not after."""
    if options.device is None:
        raise Mistake("name a device, such as --device cuda.")
    if options.rounds is not None and options.rounds < 1:
        raise Mistake(f"--rounds {options.rounds}: must be at least 1.")
    if options.output.is_dir():
        raise Mistake(f"--output {options.output}: is a folder; name a file.")
    if not options.output.resolve().parent.is_dir():
        raise Mistake(f"--output {options.output}: there is no such folder.")
    if options.write_docs:
        _check_docs(options.quick, options.device, options.sections)


def _check_docs(quick: bool, device: str, sections: Collection[str]) -> None:
    is_gpu = device.split(":")[0] not in ("cpu", TEST_DEVICE)
    if quick or not is_gpu or not SECTIONS.keys() <= set(sections):
        raise Mistake("--write-docs: the docs show a GPU, all sections, without --quick.")


def _device(name: str) -> torch.device:
    """The device of this name, if it works. Deterministic kernels of cuBLAS are asked for."""
    if name.split(":")[0] == TEST_DEVICE:
        _load_test_device()
    if name.split(":")[0] == "cuda":  # before CUDA is initialised
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).add_(1)
        if device.index is not None and device.type not in ("cpu", "meta"):
            torch.accelerator.set_device_index(device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise Mistake(f"--device {name}: {_first_sentence(error)}") from error
    if device.type == "meta":
        raise Mistake("--device meta: it has no values.")
    return device


def _first_sentence(error: Exception) -> str:
    return str(error).strip().splitlines()[0].split(". ")[0]


def _load_test_device() -> None:
    """The device of the tests, which needs no GPU."""
    try:
        import pytest

        from tests import device  # type: ignore[attr-defined]
    except ImportError as error:
        raise Mistake(
            f"--device {TEST_DEVICE}: needs pytest, and tests/device of a clone."
        ) from error
    try:
        device.load()
    except pytest.skip.Exception as reason:
        raise Mistake(f"--device {TEST_DEVICE}: {reason}.") from reason


# --- sections


def facts(device: torch.device, record: Record) -> Record:
    """The machine and the versions."""
    properties = _properties(device)
    return {
        **info.facts(),
        "name": getattr(properties, "name", None) or device.type,
        "memory_bytes": getattr(properties, "total_memory", None),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": _output("git", "rev-parse", "HEAD"),
        "changed": bool(_output("git", "status", "--porcelain", "--untracked-files=no")),
    }


def _properties(device: torch.device) -> Any:
    ask = getattr(getattr(torch, device.type), "get_device_properties", None)
    return None if ask is None else ask(device)


def _output(*command: str) -> str | None:
    """The first line that a command prints; None if there is none, or no such command."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0] or None if done.returncode == 0 else None


def tests(device: torch.device, record: Record) -> Record:
    """The device tests, in a process of their own."""
    reason = _why_no_tests(device)
    if reason is not None:
        return {"not_run": reason}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        command += [str(TESTS), f"--junitxml={report}"]
        command += ["-k", QUICK_TESTS] if record["quick"] else []
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, VARIABLE: str(device)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TESTS_LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done in {TESTS_LIMIT:.0f} s"}
        if not report.exists():
            lines = done.stdout.strip().splitlines() or ["no output"]
            return {"error": f"pytest: {lines[-1]}"}
        return _counts(ElementTree.parse(report).getroot().iter("testcase"))


def _why_no_tests(device: torch.device) -> str | None:
    if device.type == "cpu":
        return "not for the CPU"
    if not (ROOT / TESTS).exists():
        return f"{TESTS} is not here"
    if importlib.util.find_spec("pytest") is None:
        return "pytest is not installed"
    return None


def _counts(cases: Iterable[ElementTree.Element]) -> Record:
    failures, skipped, total = [], 0, 0
    for case in cases:
        total += 1
        fault = next((child for child in case if child.tag in ("failure", "error")), None)
        if fault is not None:
            lines = (fault.get("message") or "").strip().splitlines() or [""]
            failures.append(f"{case.get('name')}: {lines[0]}"[:200])
        elif case.find("skipped") is not None:
            skipped += 1
    return {
        "passed": total - len(failures) - skipped,
        "failed": len(failures),
        "skipped": skipped,
        "failures": failures,
    }


def gradients(device: torch.device, record: Record) -> list[Record]:
    rows = []
    for size in gpu_measure.sizes(record["quick"]):
        for precision in gpu_measure.precisions(device):
            _say(f"gradients: {size.blocks} layers, {precision}")
            rows.append(gpu_measure.gradients(size, device, precision))
            gpu_measure.free_memory()
    return rows


def steps(device: torch.device, record: Record) -> list[Record]:
    rows = []
    for size in gpu_measure.sizes(record["quick"]):
        _say(f"steps: {size.blocks} layers")
        rows += gpu_measure.steps(size, device, record["precision"], record["rounds"])
        gpu_measure.free_memory()
    return rows


def graph(device: torch.device, record: Record) -> list[Record] | Record:
    if not hasattr(getattr(torch, device.type), "CUDAGraph"):
        return {"not_run": f"{device.type} has none"}
    smallest = gpu_measure.sizes(record["quick"])[0]
    return gpu_measure.capture(smallest, device, record["precision"])


SECTIONS: dict[str, Callable[[torch.device, Record], Any]] = {
    "facts": facts,
    "tests": tests,
    "gradients": gradients,
    "steps": steps,
    "graph": graph,
}


if __name__ == "__main__":
    sys.exit(main())
