"""Files of a run that are damaged: every bit of the small ones, random bits of the large ones.

What is read must be what was written, or the checkpoint before it, or a message.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import torch

from speedrun import checkpoints, metrics
from speedrun.attacks.outcome import Outcome
from speedrun.attacks.runs import Attacked, whole, write_text
from speedrun.model import LanguageModel
from speedrun.settings import Settings

Weights = dict[str, torch.Tensor]


def _prepared(folder: Path, shard: bool) -> Attacked:
    text = write_text(folder)
    world = 2 if shard else 1
    whole(folder / "run", text, world, shard)
    return Attacked(folder / "run", text, world, shard)


def _weights(checkpoint: Path, model: LanguageModel) -> Weights:
    checkpoints.load_into(checkpoint, {"model": dict(model.named_parameters())})
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def _found(run: Attacked, model: LanguageModel) -> tuple[str, Weights]:
    """The step that would be resumed from, and its weights."""
    checkpoint, _ = checkpoints.newest(run.folder, lambda line: None)
    return checkpoint.name, _weights(checkpoint, model)


def _flips(path: Path, bits: Iterable[int]) -> Iterator[tuple[int, bytes]]:
    """The content of a file with one bit flipped, written to it. Afterwards it is as before."""
    content = path.read_bytes()
    try:
        for bit in bits:
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            yield bit, bytes(damaged)
    finally:
        path.write_bytes(content)


def _bits(path: Path, share: float, draws: Random) -> list[int]:
    total = 8 * path.stat().st_size
    return sorted(draws.sample(range(total), max(int(share * total), 1)))


def _fall_back(run: Attacked, path: Path, bits: Iterable[int]) -> Iterator[str | None]:
    """Flip bits of a file of the newest checkpoint: is the one before it read?"""
    model = LanguageModel(Settings.read(run.folder / "configuration.json").config())
    steps = checkpoints.steps(run.folder)
    earlier = f"{steps[-2]:08d}"
    expected = _weights(run.folder / "checkpoints" / earlier, model)
    for bit, _ in _flips(path, bits):
        try:
            name, weights = _found(run, model)
        except Exception as error:
            yield f"bit {bit} of {path.name}: {type(error).__name__}: {error}"
            continue
        same = all(torch.equal(weights[key], expected[key]) for key in expected)
        yield None if (name, same) == (earlier, True) else f"bit {bit} of {path.name} is read"


def states(share: float, draws: Random, folder: Path) -> Outcome:
    """Flip each bit of the state of a checkpoint of one process, and of a sharded one."""
    found: list[str | None] = []
    for shard in (False, True):
        own = folder / ("sharded" if shard else "one")
        own.mkdir()
        run = _prepared(own, shard)
        path = run.folder / "checkpoints" / "00000008" / "state.json"
        found += _fall_back(run, path, _bits(path, share, draws))
    return Outcome.of(found)


def weights(count: int, draws: Random, folder: Path) -> Outcome:
    """Flip a random bit of the weights or of the moments."""
    found: list[str | None] = []
    run = _prepared(folder, shard=False)
    for name in ("model", "optimizer"):
        path = run.folder / "checkpoints" / "00000008" / f"{name}.safetensors"
        total = 8 * path.stat().st_size
        found += _fall_back(run, path, [draws.randrange(total) for _ in range(count // 2)])
    return Outcome.of(found)


def configurations(share: float, draws: Random, folder: Path) -> Outcome:
    """Flip each bit of `configuration.json`: a setting that decides numbers may not change."""
    run = _prepared(folder, shard=False)
    path = run.folder / "configuration.json"
    before = Settings.read(path).digest()
    state = json.loads((run.folder / "checkpoints" / "00000008" / "state.json").read_text())

    def trial(bit: int) -> str | None:
        try:
            digest = Settings.read(path).digest()
        except ValueError:
            return None  # told in a line
        except Exception as error:
            return f"bit {bit}: {type(error).__name__}: {error}"
        noticed = digest != state["settings"]
        return None if noticed or digest == before else f"bit {bit} is not noticed"

    return Outcome.of(trial(bit) for bit, _ in _flips(path, _bits(path, share, draws)))


def curves(share: float, draws: Random, folder: Path) -> Outcome:
    """Flip bits of `metrics.jsonl`: the line is read with another number, or passed over."""
    run = _prepared(folder, shard=False)
    path = run.folder / "metrics.jsonl"
    copy = folder / "copy.jsonl"
    expected = {row["step"]: row for row in metrics.read(path)}

    def trial(bit: int) -> str | None:
        try:
            shutil.copy(path, copy)
            metrics.keep(copy, 8)
            rows = metrics.read(copy)
        except Exception as error:
            return f"bit {bit}: {type(error).__name__}: {error}"
        same = sum(row == expected.get(row["step"]) for row in rows)
        return None if same >= len(expected) - 2 else f"bit {bit}: {same} lines are left"

    return Outcome.of(trial(bit) for bit, _ in _flips(path, _bits(path, share, draws)))
