"""The states of a run: written aside and renamed, with checksums; the last few are kept, and a
damaged one is passed over.

    RUN/checkpoints/00000200/model.safetensors, optimizer.safetensors, state.json

or, of a sharded run, a file of each process instead, by `torch.distributed.checkpoint`. safetensors
and JSON only: to load a checkpoint never runs code. `state.json` is written last and has the
SHA-256 of the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KEPT = 3
MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW knows of a parameter, besides the number of steps

Tensors = dict[str, dict[str, Tensor]]  # "model" and "optimizer": by name


class CheckpointError(RuntimeError):
    """No checkpoint to go on from, or none that fits."""


class ShapeError(ValueError):
    """Other tensors than were expected."""


# --- writing


def save(run: Path, step: int, tensors: Tensors) -> Path:
    """A checkpoint by one process. It is there as a whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    aside = _begin(run, step)
    try:
        for name, group in tensors.items():
            save_file(
                {key: tensor.detach().contiguous().cpu() for key, tensor in group.items()},
                aside / f"{name}.safetensors",
            )
        return _end(run, step, sharded=False)
    except (OSError, SafetensorError) as error:
        raise _unsaved(run, step, error) from error


def save_shards(run: Path, step: int, tensors: Tensors) -> None:
    """The same by all processes together, each of which has a part of every tensor."""
    import torch.distributed.checkpoint as dcp

    first = dist.get_rank() == 0
    if first:
        _begin(run, step)
    dist.barrier()
    writer = dcp.HuggingFaceStorageWriter(str(_aside(run, step)), save_distributed=True)
    try:
        dcp.save(_flat(tensors), storage_writer=writer)
    except dcp.CheckpointException as error:  # in every process, whichever of them failed
        raise _unsaved(run, step, next(iter(error.failures.values()))[0]) from error
    dist.barrier()
    if first:
        _end(run, step, sharded=True)


def _unsaved(run: Path, step: int, error: BaseException) -> CheckpointError:
    shutil.rmtree(_aside(run, step), ignore_errors=True)
    why = str(error).strip().splitlines()[-1]
    return CheckpointError(
        f"step {step} cannot be saved in {run}: {why}. The checkpoints before it are as they were."
    )


def _aside(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"{step:08d}.part"


def _begin(run: Path, step: int) -> Path:
    aside = _aside(run, step)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def _end(run: Path, step: int, sharded: bool) -> Path:
    """What is written becomes a checkpoint, and the oldest goes."""
    aside, final = _aside(run, step), run / "checkpoints" / f"{step:08d}"
    files = sorted(path for path in aside.iterdir() if path.is_file())
    facts = {
        "step": step,
        "sharded": sharded,
        "sha256": {path.name: checksum(path) for path in files},
    }
    (aside / "state.json").write_text(json.dumps(facts, indent=1))
    for path in (*files, aside / "state.json"):
        _flush(path)
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)
    _flush(final.parent)
    for old in [other for other in steps(run) if other <= step][:-KEPT]:
        shutil.rmtree(final.parent / f"{old:08d}", ignore_errors=True)
    return final


def _flush(path: Path) -> None:
    """To the disk, so that what is renamed later is there even if the machine stops."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- finding


def steps(run: Path) -> list[int]:
    """Of the checkpoints that are there, whole or damaged."""
    folder = run / "checkpoints"
    return (
        sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
        if folder.is_dir()
        else []
    )


def newest(run: Path, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint that is whole, and its facts; `say` is told of those that are not."""
    found = steps(run)
    for step in reversed(found):
        folder = run / "checkpoints" / f"{step:08d}"
        try:
            return folder, _facts(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            say(f"{folder} is damaged ({error}); trying the one before it")
    what = "all of them are damaged" if found else "there is none"
    raise CheckpointError(
        f"{run / 'checkpoints'}: no checkpoint to go on from, {what}. Leave out --resume to begin "
        "anew."
    )


def _facts(folder: Path) -> dict[str, Any]:
    """Of a checkpoint, if it is what was written."""
    from safetensors import SafetensorError, safe_open

    facts = json.loads((folder / "state.json").read_text())
    if (
        not isinstance(facts, dict)
        or not isinstance(facts.get("sha256"), dict)
        or facts.get("step") != int(folder.name)
    ):
        raise ValueError("state.json is not that of a checkpoint")
    if not facts["sha256"] or not (
        facts.get("sharded")
        or {"model.safetensors", "optimizer.safetensors"} <= facts["sha256"].keys()
    ):
        raise ValueError("state.json names no files")
    for name, expected in facts["sha256"].items():
        if checksum(folder / name) != expected:
            raise ValueError(f"the checksum of {name} does not fit")
        if name.endswith(".safetensors"):
            try:
                with safe_open(folder / name, "pt"):
                    pass
            except SafetensorError as error:
                raise ValueError(f"{name}: {error}") from error
    return facts


def checksum(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


# --- reading


def load_into(folder: Path, tensors: Tensors) -> None:
    """Overwrite tensors, whole or sharded, by those of a checkpoint, whole or sharded. Of the
    groups that are given.
    """
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    with torch.no_grad():
        if json.loads((folder / "state.json").read_text())["sharded"]:
            reader = dcp.HuggingFaceStorageReader(str(folder))
            there = {
                name: tuple(entry.size)
                for name, entry in reader.read_metadata().state_dict_metadata.items()
            }  # type: ignore[union-attr]
            there = {name: size for name, size in there.items() if name.split("/")[0] in tensors}
            _compare({name: tuple(t.shape) for name, t in _flat(tensors).items()}, there)
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", "torch.distributed is disabled"
                )  # by one process: that is meant
                dcp.load(_flat(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
            return
        for group, wanted in tensors.items():
            found = load_file(folder / f"{group}.safetensors")
            _compare(*({name: tuple(t.shape) for name, t in of.items()} for of in (wanted, found)))
            for name, tensor in wanted.items():
                tensor.copy_(found[name])


def _compare(wanted: dict[str, Any], there: dict[str, Any]) -> None:
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            raise ShapeError(
                f"{name} is {there.get(name, 'missing')} there and {wanted.get(name, 'missing')} "
                "here"
            )


def _flat(tensors: Tensors) -> dict[str, Tensor]:
    return {
        f"{group}/{name}": tensor.detach()
        for group, found in tensors.items()
        for name, tensor in found.items()
    }


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Tensor]:
    """Its state, by the name of the parameter and of the value."""
    return {
        f"{names[id(p)]}/{key}": optimizer.state[p][key] for p in optimizer.state for key in MOMENTS
    }
