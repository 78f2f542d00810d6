"""The states of a run: written aside and renamed, with checksums; the last few are kept, and a damaged one is passed over.

    RUN/checkpoints/00000200/model.safetensors, optimizer.safetensors, state.json

safetensors and JSON only: to load a checkpoint never runs code. `state.json` is written last and has the SHA-256 of the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KEPT = 3


class CheckpointError(RuntimeError):
    """No checkpoint to go on from, or none that fits."""


def save(run: Path, step: int, tensors: dict[str, dict[str, Tensor]], facts: dict[str, Any], kept: int = KEPT) -> Path:
    """A checkpoint of named groups of tensors, and facts. It is there as a whole or not at all."""
    from safetensors.torch import save_file

    folder = run / "checkpoints"
    aside, final = folder / f"{step:08d}.part", folder / f"{step:08d}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    sums = {}
    for name, group in tensors.items():
        path = aside / f"{name}.safetensors"
        save_file({key: tensor.detach().contiguous().cpu() for key, tensor in group.items()}, path)
        sums[path.name] = checksum(path)
        _flush(path)
    state = aside / "state.json"
    state.write_text(json.dumps({"step": step, "sha256": sums, **facts}, indent=1))
    _flush(state)
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)
    _flush(folder)
    for old in steps(run)[:-kept]:
        shutil.rmtree(folder / f"{old:08d}", ignore_errors=True)
    return final


def steps(run: Path) -> list[int]:
    """Of the checkpoints that are there, whole or damaged."""
    folder = run / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def latest(run: Path, say: Callable[[str], None]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The newest checkpoint that is whole; `say` is told of those that are not."""
    found = steps(run)
    for step in reversed(found):
        folder = run / "checkpoints" / f"{step:08d}"
        try:
            return load(folder)
        except (OSError, ValueError, KeyError, CheckpointError) as error:
            say(f"{folder} is damaged ({error}); trying the one before it")
    what = "all of them are damaged" if found else "there is none"
    raise CheckpointError(f"{run / 'checkpoints'}: no checkpoint to go on from, {what}. Leave out --resume to begin anew.")


def load(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors and facts of one checkpoint, if they are what was written."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    facts = json.loads((folder / "state.json").read_text())
    tensors = {}
    for name, expected in facts["sha256"].items():
        if checksum(folder / name) != expected:
            raise CheckpointError(f"the checksum of {name} does not fit")
        try:
            tensors[name.removesuffix(".safetensors")] = load_file(folder / name)
        except SafetensorError as error:
            raise CheckpointError(f"{name}: {error}") from error
    return tensors, facts


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:
    found = hashlib.sha256()
    while piece := file.read(1 << 20):
        found.update(piece)
    return found.hexdigest()


def _flush(path: Path) -> None:
    """To the disk, so that what is renamed later is there even if the machine stops."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- an optimizer as tensors with names


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Tensor]:
    """Its state, by the name of the parameter and of the value."""
    found = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{names[id(parameter)]}/{key}"] = torch.as_tensor(value)
    return found


def restore_optimizer(optimizer: torch.optim.Optimizer, names: dict[int, str], tensors: dict[str, Tensor]) -> None:
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    for name, value in tensors.items():
        parameter, key = name.rsplit("/", 1)
        optimizer.state[parameters[parameter]][key] = value.to(parameters[parameter].device) if value.ndim else value
