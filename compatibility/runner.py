"""Run a row in processes of its own.

Every contestant gets new processes, because a library may hang, crash or change global state. They
are forked from a server that has only imported the rows, so they start fast.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

from compatibility import networks
from compatibility.verdict import EQUAL, NOT_RUN, RAISED, WRONG, Noted, Row, Scene, judge

LIMIT = 120.0  # seconds for one stage: only a hang takes that long
GROUP_LIMIT = 30.0  # seconds that a process waits for another

Outcome = dict[str, Any]  # verdict, detail, note


class Task(NamedTuple):
    """One stage of a row, in all its processes."""

    registry: str  # a module with `ROWS`
    key: str  # of the row
    contestant: str
    on_device: bool  # whether the model and the data live on the test device
    stage: int
    processes: int
    folder: Path
    port: int

    @property
    def log(self) -> Path:
        return self.folder / f"{self.stage}.log"

    def outcome_file(self, rank: int) -> Path:
        return self.folder / f"{self.stage}-{rank}.json"


def run_if_plain_can(row: Row, registry: str = "compatibility.rows") -> Outcome:
    """The outcome of retrograd on the test device, if plain autograd is equal there.

    Plain autograd runs with the row's tool, too. Where it fails, the reason is not retrograd's.
    """
    plain = run(row, "plain", registry=registry, on_device=True)
    if plain["verdict"] != EQUAL:
        detail = f"plain autograd {plain['verdict']}: {plain['detail']}"
        return {"verdict": NOT_RUN, "detail": detail, "note": ""}
    return run(row, "retrograd", registry=registry, on_device=True)


def run(
    row: Row,
    contestant: str,
    limit: float = LIMIT,
    registry: str = "compatibility.rows",
    on_device: bool = False,
) -> Outcome:
    """The outcome of a row of a registry, which is a module with `ROWS`."""
    outcome: Outcome = {}
    with tempfile.TemporaryDirectory(prefix="compatibility-") as folder:
        for stage, (processes, _) in enumerate(row.stages):
            place = Path(folder), _free_port()
            task = Task(registry, row.key, contestant, on_device, stage, processes, *place)
            outcome = _run_stage(task, limit)
            if outcome["verdict"] != EQUAL:
                break
    return outcome


def _run_stage(task: Task, limit: float) -> Outcome:
    # More compile threads would be processes that outlive a killed one.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["compatibility.rows"])
    processes = [context.Process(target=_work, args=(task, rank)) for rank in range(task.processes)]
    for process in processes:
        process.start()
    _wait(task, processes, limit)
    outcomes = [_outcome(task, rank, process, limit) for rank, process in enumerate(processes)]
    return max(outcomes, key=_severity)


def _wait(task: Task, processes: list[ForkServerProcess], limit: float) -> None:
    """Wait until all processes end, or until `limit`; 5 s at most after one has crashed."""
    deadline = time.monotonic() + limit
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if not process.is_alive() and not task.outcome_file(rank).exists():
                deadline = min(deadline, time.monotonic() + 5)
        processes[0].join(0.05)
        time.sleep(0.01)


def _outcome(task: Task, rank: int, process: ForkServerProcess, limit: float) -> Outcome:
    """What a process has written, or how it ended. Kills it if it still runs."""
    hung = process.is_alive()
    process.kill()
    process.join()
    file = task.outcome_file(rank)
    if file.exists():
        return json.loads(file.read_text())
    code = process.exitcode or 0
    if hung:
        detail = f"still running after {limit:.0f} s"
    elif code < 0:
        detail = f"died of {signal.Signals(-code).name}: {_last_line(task.log)}"
    else:
        detail = f"exit code {code}: {_last_line(task.log)}"
    return {"verdict": RAISED, "detail": detail, "note": ""}


def _severity(outcome: Outcome) -> tuple[int, bool]:
    """The order in which the outcomes of several processes are reported.

    If one process fails, its partner finds the connection closed, or never made: that says less.
    The log is shared, so it may be the last line that is quoted for the process that died.
    """
    detail = outcome["detail"]
    lost_partner = "Connection closed" in detail or "connectFullMesh" in detail
    is_consequence = lost_partner and not detail.startswith("died of")
    return (EQUAL, WRONG, RAISED).index(outcome["verdict"]), not is_consequence


def _work(task: Task, rank: int) -> None:
    """In the process: run one stage, judge the last one, write the outcome."""
    _redirect_output(task.log)
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    row: Row = importlib.import_module(task.registry).ROWS[task.key]
    try:
        if task.on_device:
            networks.use_test_device()
        outcome = _judged(row, task, rank)
    except Exception as error:
        traceback.print_exc()
        detail = f"{type(error).__name__}: {error}"
        outcome = {"verdict": RAISED, "detail": detail, "note": ""}
    partial_file = task.folder / f"{task.stage}-{rank}.part"
    partial_file.write_text(json.dumps(outcome))
    partial_file.rename(task.outcome_file(rank))
    # A normal exit would stop gloo's threads while process groups still exist, and sometimes
    # aborts. But first a partner may wait for this process to close its connection.
    if outcome["verdict"] == EQUAL and dist.is_initialized() and not row.launched:
        dist.barrier()
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined] # as multiprocessing does
    os._exit(0)


def _redirect_output(log: Path) -> None:
    """Send stdout and stderr to a file, also those of C++ code."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", 1, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)


def _judged(row: Row, task: Task, rank: int) -> Outcome:
    is_last = task.stage == len(row.stages) - 1
    expected = row.expected(Scene("plain", rank, task.folder)) if is_last else None
    if task.processes > 1:
        _connect(row, task, rank)
    _, function = row.stages[task.stage]
    result = function(Scene(task.contestant, rank, task.folder))
    note = ""
    if isinstance(result, Noted):
        note = result.note
        result = result.result
    verdict, detail = judge(result, expected, row.limit) if is_last else (EQUAL, "")
    return {"verdict": verdict, "detail": detail, "note": note}


def _connect(row: Row, task: Task, rank: int) -> None:
    """Start a process group, or set the environment variables from which a trainer starts it."""
    import torch.distributed as dist

    if not row.launched:
        dist.init_process_group(
            f"cpu:gloo,{networks.DEVICE}:gloo" if task.on_device else "gloo",
            init_method=f"file://{task.folder}/{task.stage}.store",
            rank=rank,
            world_size=task.processes,
            timeout=timedelta(seconds=GROUP_LIMIT),
        )
        return
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(task.processes),
        "LOCAL_WORLD_SIZE": str(task.processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(task.port),
        "TORCHELASTIC_RUN_ID": "compatibility",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else "no output"
