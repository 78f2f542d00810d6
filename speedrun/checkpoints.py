"""Checkpoints: written beside their place, then renamed; verified by checksum when read.

    RUN/checkpoints/00000200/model.safetensors, optimizer.safetensors, state.json

A sharded run has a file of each process instead (`torch.distributed.checkpoint`). `state.json` is
written last and has the SHA-256 of the other files. The last three checkpoints are kept; a damaged
one is skipped. All files are safetensors or JSON, so loading one never runs code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from retrograd.files import flush_to_disk, open_regular

KEPT = 3  # checkpoints
LARGEST_STATE = 2**24  # bytes of a state.json that is read
MOMENTS = ("exp_avg", "exp_avg_sq")  # the state of AdamW for a parameter, besides its step
WHOLE = {"model.safetensors", "optimizer.safetensors"}  # the files of a checkpoint of one process

Tensors = dict[str, dict[str, Tensor]]  # of the groups "model" and "optimizer": tensors by name
Shape = tuple[int, ...]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or there is none that can be read."""


class ShapeError(ValueError):
    """A checkpoint has other tensors than the model."""


# --- writing


def save(run: Path, step: int, tensors: Tensors, settings: str) -> Path:
    """Write a checkpoint from one process. `settings` is the digest of the settings of the run."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    part = _begin(run, step)
    try:
        for group, named in tensors.items():
            stored = {name: tensor.detach().contiguous().cpu() for name, tensor in named.items()}
            save_file(stored, part / f"{group}.safetensors")
        return _finish(run, step, settings, sharded=False)
    except (OSError, SafetensorError) as error:
        raise _not_saved(run, step, error) from error


def save_shards(run: Path, step: int, tensors: Tensors, settings: str) -> None:
    """Write a checkpoint from all processes, each of which has a part of every tensor."""
    import torch.distributed.checkpoint as dcp

    first = dist.get_rank() == 0
    if first:
        _begin(run, step)
    dist.barrier()
    writer = dcp.HuggingFaceStorageWriter(str(_part(run, step)), save_distributed=True)
    try:
        dcp.save(_flat(tensors), storage_writer=writer)
    except dcp.CheckpointException as error:  # raised in every process if one fails
        cause, _ = next(iter(error.failures.values()))
        raise _not_saved(run, step, cause) from error
    dist.barrier()
    if first:
        _finish(run, step, settings, sharded=True)


def _part(run: Path, step: int) -> Path:
    """Where a checkpoint is written before it is complete."""
    return run / "checkpoints" / f"{step:08d}.part"


def _begin(run: Path, step: int) -> Path:
    part = _part(run, step)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def _finish(run: Path, step: int, settings: str, sharded: bool) -> Path:
    """Add checksums, rename the folder to its final name, and remove old checkpoints."""
    part = _part(run, step)
    final = run / "checkpoints" / f"{step:08d}"
    files = sorted(path for path in part.iterdir() if path.is_file())
    checksums = {path.name: checksum(path) for path in files}
    state = part / "state.json"
    facts = {"step": step, "sharded": sharded, "settings": settings, "sha256": checksums}
    state.write_text(json.dumps(sealed(facts), indent=1))
    mode = stat.S_IMODE(state.stat().st_mode)
    for path in (*files, state):
        path.chmod(mode)  # safetensors gives its files to their owner only
        flush_to_disk(path)
    shutil.rmtree(final, ignore_errors=True)
    part.rename(final)
    flush_to_disk(final.parent)
    earlier = [other for other in steps(run) if other <= step]
    for old in earlier[:-KEPT]:
        shutil.rmtree(final.parent / f"{old:08d}", ignore_errors=True)
    return final


def sealed(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts with a checksum of their own, so that a changed digit is noticed."""
    return {**facts, "checksum": hashlib.sha256(json.dumps(facts).encode()).hexdigest()}


def _not_saved(run: Path, step: int, error: BaseException) -> CheckpointError:
    shutil.rmtree(_part(run, step), ignore_errors=True)
    why = (str(error).strip() or type(error).__name__).splitlines()[-1]
    return CheckpointError(
        f"step {step} cannot be saved in {run}: {why}. The checkpoints before it are as they were."
    )


# --- finding


def steps(run: Path) -> list[int]:
    """The steps that a run has checkpoints of, damaged ones included."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if re.fullmatch("[0-9]{8,18}", path.name)]
    return sorted(int(name) for name in names if name == f"{int(name):08d}")


def newest(run: Path, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint that is not damaged, and its state. `say` reports damaged ones."""
    found = steps(run)
    for step in reversed(found):
        folder = run / "checkpoints" / f"{step:08d}"
        try:
            return folder, _verified(folder)
        except (OSError, ValueError) as error:
            say(f"{folder} is damaged ({error}); trying the one before it")
    why = "all of them are damaged" if found else "there is none"
    raise CheckpointError(
        f"{run / 'checkpoints'}: no checkpoint to go on from, {why}. Leave out --resume to begin "
        "anew."
    )


def _verified(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint. Raises if it or a file is not as it was written."""
    state = _read_state(folder)
    if not _is_state(state) or state["step"] != int(folder.name):
        raise ValueError("state.json is not that of a checkpoint")
    checksums = state["sha256"]
    for name in checksums:
        if Path(name).name != name:
            raise ValueError(f"state.json names {name!r}, which is no file of the folder")
    # The reader of sharded checkpoints reads every such file of a folder.
    unknown = {path.name for path in folder.glob("*.safetensors")} - checksums.keys()
    if unknown:
        raise ValueError(f"{min(unknown)} does not belong to it")
    for name, expected in checksums.items():
        if checksum(folder / name) != expected:
            raise ValueError(f"the checksum of {name} is wrong")
        if name.endswith(".safetensors"):
            _open_safetensors(folder / name)
    return state


def _read_state(folder: Path) -> Any:
    """What state.json has. Raises ValueError if it is not JSON."""
    with open_regular(folder / "state.json", follow_links=False) as file:
        content = file.read(LARGEST_STATE)
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("state.json is nested too deeply") from error


def _is_state(state: Any) -> bool:
    """Whether it has what `_finish` writes, and nothing else."""
    kinds = {"step": int, "sharded": bool, "settings": str, "sha256": dict}
    if not isinstance(state, dict) or state.keys() != {*kinds, "checksum"}:
        return False
    if sealed({key: value for key, value in state.items() if key != "checksum"}) != state:
        return False
    if any(type(state[key]) is not kind for key, kind in kinds.items()):
        return False
    names = state["sha256"].keys()
    if state["sharded"]:
        return any(name.endswith(".safetensors") for name in names)
    return names == WHOLE


def _open_safetensors(path: Path) -> None:
    """Raise ValueError if a file is not in the format of safetensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with _utf_8_name(path) as name, safe_open(name, "pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from error


@contextlib.contextmanager
def _utf_8_name(path: Path) -> Iterator[str]:
    """A name of a file that safetensors can open: it reads no others."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with open_regular(path) as file:
            yield f"/dev/fd/{file.fileno()}"
    else:
        yield str(path)


def checksum(path: Path) -> str:
    found = hashlib.sha256()
    with open_regular(path, follow_links=False) as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


# --- reading


@torch.no_grad()
def load_into(folder: Path, tensors: Tensors) -> None:
    """Overwrite tensors with those of a checkpoint. Groups that are not given are not read.

    Both the tensors and the checkpoint may be whole or sharded.
    """
    load = _load_shards if _read_state(folder)["sharded"] else _load_whole
    try:
        load(folder, tensors)
    except (ShapeError, OSError, MemoryError):
        raise
    except Exception as error:  # the checksums are right, but of a file that is not ours
        why = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise CheckpointError(f"{folder} cannot be read: {why}.") from error
    _check_finite(folder, tensors)


def _check_finite(folder: Path, tensors: Tensors) -> None:
    for name, tensor in _flat(tensors).items():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not own.isfinite().all():
            raise CheckpointError(
                f"{folder}: {name} has values that are not finite. Remove the folder to go on from "
                "the checkpoint before it."
            )


def _load_whole(folder: Path, tensors: Tensors) -> None:
    from safetensors.torch import load_file

    for group, named in tensors.items():
        with _utf_8_name(folder / f"{group}.safetensors") as name:
            stored = load_file(name)
        _compare(_shapes(named), _shapes(stored))
        for name, tensor in named.items():
            tensor.copy_(stored[name])


def _load_shards(folder: Path, tensors: Tensors) -> None:
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(folder))
    stored = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        group, _, _ = name.partition("/")
        if group in tensors:
            stored[name] = tuple(entry.size)  # type: ignore[union-attr]
    _compare(_shapes(_flat(tensors)), stored)
    with warnings.catch_warnings():
        # One process may read what several have written.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(_flat(tensors), storage_reader=reader, no_dist=not dist.is_initialized())


def _shapes(tensors: dict[str, Tensor]) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _compare(wanted: dict[str, Shape], stored: dict[str, Shape]) -> None:
    for name in sorted(wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
            there = stored.get(name, "missing")
            here = wanted.get(name, "missing")
            raise ShapeError(f"{name} is {there} there and {here} here")


def _flat(tensors: Tensors) -> dict[str, Tensor]:
    """The tensors of all groups, named group/name."""
    found = {}
    for group, named in tensors.items():
        for name, tensor in named.items():
            found[f"{group}/{name}"] = tensor.detach()
    return found


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Tensor]:
    """The moments of an optimizer, named parameter/moment; `names` has those of parameters."""
    found = {}
    for parameter, state in optimizer.state.items():
        for key in MOMENTS:
            found[f"{names[id(parameter)]}/{key}"] = state[key]
    return found
