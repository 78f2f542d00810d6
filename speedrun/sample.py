"""`python -m speedrun sample`: text from a trained model, byte by byte."""

from __future__ import annotations

import argparse
import codecs
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from retrograd.cli.mistakes import Mistake
from retrograd.cli.terminal import printable, tell
from speedrun import checkpoints
from speedrun.folders import quoted
from speedrun.model import LanguageModel
from speedrun.settings import Settings


def add(commands: Any) -> None:
    sample = commands.add_parser(
        "sample",
        help="text from a trained model",
        description="Writes text that follows a prompt, byte by byte. Keys and values are cached, "
        "so each byte costs a forward of one byte.",
    )
    sample.add_argument("folder", type=Path, metavar="RUN", help="the folder of a training run")
    sample.add_argument("--prompt", default="def ", help="the text to continue (def )")
    sample.add_argument("--count", type=int, default=500, help="bytes (500)")
    sample.add_argument(
        "--temperature", type=float, default=0.8, help="0: always the likeliest byte (0.8)"
    )
    sample.add_argument("--seed", type=int, default=0, help="of the random draws (0)")
    sample.add_argument(
        "--json", action="store_true", help="print prompt and text as JSON, and nothing else"
    )
    sample.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    _check(options)
    model = _trained(options.folder)
    prompt = os.fsencode(options.prompt)
    generator = torch.Generator().manual_seed(options.seed)
    written = model.generate(
        prompt, options.count, temperature=options.temperature, generator=generator
    )
    try:
        _write(prompt, written, options.json)
    except FloatingPointError as error:
        raise Mistake(
            f"{options.folder}: {error}: its weights are damaged, or its training diverged. Train "
            "anew, with a smaller --lr."
        ) from error
    return 0


def _write(prompt: bytes, written: Iterator[int], as_json: bool) -> None:
    """Print the prompt and what follows. Control characters are escaped, but not in JSON: that
    escapes them itself.
    """
    if as_json:
        text = bytes(written).decode(errors="replace")
        print(json.dumps({"prompt": prompt.decode(errors="replace"), "text": text}))
        return
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    print(printable(prompt.decode(errors="replace")), end="", flush=True)
    for byte in written:
        print(printable(decoder.decode(bytes([byte]))), end="", flush=True)
    print(decoder.decode(b"", final=True))


def _check(options: argparse.Namespace) -> None:
    if not (options.folder / "configuration.json").exists():
        raise Mistake(
            f"{options.folder}: there is no run in it. Train one: python -m speedrun train --out "
            f"{quoted(options.folder)}"
        )
    if options.count < 0 or not 0 <= options.temperature < math.inf:
        raise Mistake("--count and --temperature are numbers not below zero.")
    if not 0 <= options.seed < 2**63:
        raise Mistake(f"--seed {options.seed}: must be at least 0 and below 2**63.")


def _trained(folder: Path) -> LanguageModel:
    """The model of a run, with the weights of its newest checkpoint."""
    configuration = folder / "configuration.json"
    try:
        settings = Settings.read(configuration)
        settings.check_memory()
    except ValueError as error:
        raise Mistake(f"{configuration} cannot be read: {error}") from error
    model = LanguageModel(settings.config())
    try:
        checkpoint, _ = checkpoints.newest(folder, _say)
        checkpoints.load_into(checkpoint, {"model": dict(model.named_parameters())})
    except (checkpoints.CheckpointError, checkpoints.ShapeError, OSError) as error:
        raise Mistake(str(error)) from error
    return model


def _say(line: str) -> None:
    tell(f"speedrun sample: {line}")
