"""Processes for a row: new ones for every contestant, because a library may hang, die, or leave
something behind.

They are forked from a server that has imported torch and done nothing else, so that they start at
once.
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
from pathlib import Path
from typing import Any

from compatibility.verdict import EQUAL, RAISED, WRONG, Noted, Row, Scene, judge

LIMIT = 120.0  # seconds for one stage: only a hang takes that long
GROUP_LIMIT = 30.0  # and for a process to wait for another

Outcome = dict[str, Any]  # verdict, detail, note


def run(
    row: Row, contestant: str, limit: float = LIMIT, registry: str = "compatibility.rows"
) -> Outcome:
    """What became of a row of a registry, which is a module with `ROWS`."""
    with tempfile.TemporaryDirectory(prefix="compatibility-") as name:
        folder, outcome = Path(name), {}
        for stage, (count, _) in enumerate(row.stages):
            outcome = _stage(row, contestant, stage, count, folder, limit, registry)
            if outcome["verdict"] != EQUAL:
                break
        return outcome


def _stage(
    row: Row, contestant: str, stage: int, count: int, folder: Path, limit: float, registry: str
) -> Outcome:
    os.environ.setdefault(
        "TORCHINDUCTOR_COMPILE_THREADS", "1"
    )  # more would be processes that outlive a killed one
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["compatibility.rows"])
    port = _free_port()
    files = [folder / f"{stage}-{rank}.json" for rank in range(count)]
    processes = [
        context.Process(
            target=_work, args=(registry, row.key, contestant, stage, rank, count, folder, port)
        )
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit
    while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
        failed = [p for p, file in zip(processes, files) if not p.is_alive() and not file.exists()]
        if failed:
            deadline = min(deadline, time.monotonic() + 5)  # the partners of one that died
        processes[0].join(0.05)
        time.sleep(0.01)
    outcomes = []
    for process, file in zip(processes, files):
        hung = process.is_alive()
        process.kill()
        process.join()
        if file.exists():
            outcomes.append(json.loads(file.read_text()))
        else:
            code = process.exitcode or 0
            died = f"died of {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            detail = (
                f"still running after {limit:.0f} s"
                if hung
                else f"{died}: {_last_line(folder / f'{stage}.log')}"
            )
            outcomes.append({"verdict": RAISED, "detail": detail, "note": ""})
    return max(
        outcomes,
        key=lambda o: ((EQUAL, WRONG, RAISED).index(o["verdict"]), not _is_echo(o["detail"])),
    )


def _is_echo(detail: str) -> bool:
    """If one process raises, its partner finds the connection closed, or never made: that is the
    lesser news.
    """
    return "Connection closed" in detail or "connectFullMesh" in detail


def _work(
    registry: str,
    key: str,
    contestant: str,
    stage: int,
    rank: int,
    count: int,
    folder: Path,
    port: int,
) -> None:
    """In the process: run one stage, judge the last one, write the outcome."""
    log = os.open(folder / f"{stage}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = (
        os.fdopen(1, "w", 1, closefd=False),
        os.fdopen(2, "w", 1, closefd=False),
    )
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    row: Row = importlib.import_module(registry).ROWS[key]
    scene, last = Scene(contestant, rank, folder), stage == len(row.stages) - 1
    verdict, detail, note = EQUAL, "", ""
    try:
        expected = row.expected(Scene("plain", rank, folder)) if last else None
        if count > 1 and row.launched:
            numbers = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": count,
                "LOCAL_WORLD_SIZE": count,
                "GROUP_RANK": 0,
            }
            os.environ |= {
                name: str(number) for name, number in {**numbers, "MASTER_PORT": port}.items()
            }
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "compatibility"}
        elif count > 1:
            store = f"file://{folder}/{stage}.store"
            limit = timedelta(seconds=GROUP_LIMIT)
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=count, timeout=limit
            )
        result = row.stages[stage][1](scene)
        if isinstance(result, Noted):
            result, note = result.result, result.note
        if last:
            verdict, detail = judge(result, expected, row.limit)
    except Exception as error:
        traceback.print_exc()
        verdict, detail = RAISED, f"{type(error).__name__}: {error}"
    aside = folder / f"{stage}-{rank}.part"
    aside.write_text(json.dumps({"verdict": verdict, "detail": detail, "note": note}))
    aside.rename(folder / f"{stage}-{rank}.json")
    # The interpreter's own end would take apart gloo's threads while their groups are still held,
    # and now and then aborts. But a partner may wait for this one to close its connection first.
    if verdict == EQUAL and dist.is_initialized() and not row.launched:
        dist.barrier()
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined] # what multiprocessing itself does last
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else "no output"
