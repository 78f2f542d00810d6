"""`retrograd sample`: text from a run of `retrograd train`, byte by byte."""

from __future__ import annotations

import argparse
import codecs
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from retrograd.cli.mistakes import Mistake


def add(commands: Any) -> None:
    sample = commands.add_parser(
        "sample",
        help="text from a model that was trained",
        description="Writes text that follows a prompt, as it comes. Keys and values are "
        "remembered, so each byte costs one step "
        "of the model.",
    )
    sample.add_argument(
        "folder", type=Path, metavar="RUN", help="the folder of a run of retrograd train"
    )
    sample.add_argument("--prompt", default="def ", help="what it goes on from (def )")
    sample.add_argument("--count", type=int, default=500, help="bytes (500)")
    sample.add_argument(
        "--temperature", type=float, default=0.8, help="0: the likeliest byte each time (0.8)"
    )
    sample.add_argument("--seed", type=int, default=0, help="(0)")
    sample.add_argument(
        "--json",
        action="store_true",
        help="print prompt and text as JSON when done, and nothing else",
    )
    sample.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import torch

    from retrograd.models.lm import LanguageModel
    from retrograd.training import checkpoints
    from retrograd.training.settings import Settings

    if not (options.folder / "configuration.json").exists():
        raise Mistake(
            f"{options.folder}: there is no run in it. Train one: retrograd train --out "
            f"{options.folder}"
        )
    if options.count < 0 or not 0 <= options.temperature < math.inf:
        raise Mistake("--count and --temperature are numbers not below zero.")
    if not 0 <= options.seed < 2**63:
        raise Mistake(f"--seed {options.seed}: at least 0 and below 2**63.")
    try:
        settings = Settings.read(options.folder / "configuration.json")
    except (ValueError, TypeError) as error:
        raise Mistake(f"{options.folder / 'configuration.json'} cannot be read: {error}") from error
    model = LanguageModel(settings.config())
    try:
        folder, _ = checkpoints.newest(
            options.folder, lambda line: print(f"retrograd sample: {line}", file=sys.stderr)
        )
        checkpoints.load_into(folder, {"model": dict(model.named_parameters())})
    except (checkpoints.CheckpointError, checkpoints.ShapeError, OSError) as error:
        raise Mistake(str(error)) from error
    generator = torch.Generator().manual_seed(options.seed)
    prompt = os.fsencode(options.prompt)
    written = model.generate(
        prompt, options.count, temperature=options.temperature, generator=generator
    )
    if options.json:
        print(
            json.dumps(
                {
                    "prompt": prompt.decode(errors="replace"),
                    "text": bytes(written).decode(errors="replace"),
                }
            )
        )
        return 0
    text = codecs.getincrementaldecoder("utf-8")("replace")
    print(options.prompt, end="", flush=True)
    for byte in written:
        print(text.decode(bytes([byte])), end="", flush=True)
    print(text.decode(b"", final=True))
    return 0
