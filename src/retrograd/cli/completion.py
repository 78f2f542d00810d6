"""`retrograd completion`: a script that teaches a shell the commands and options."""

from __future__ import annotations

import argparse
from typing import Any

from retrograd.cli.mistakes import Mistake

SHELLS = ("bash", "zsh", "tcsh")


def add(commands: Any) -> None:
    completion = commands.add_parser(
        "completion",
        help="a script that teaches your shell the commands and options",
        description="Prints a script. bash: add `source <(retrograd completion bash)` to "
        "~/.bashrc. zsh: write it to a file "
        "named _retrograd in a folder of $fpath. tcsh: retrograd completion tcsh > "
        "~/.retrograd.csh, and source that. Needs "
        "shtab (pip install 'retrograd[completion]').",
    )
    completion.add_argument("shell", choices=SHELLS)
    completion.add_argument("--json", action="store_true", help="print the script as a JSON object")
    completion.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import json

    from retrograd.cli import parser

    try:
        import shtab  # type: ignore[import-not-found]
    except ImportError as error:
        raise Mistake("completion needs shtab: pip install 'retrograd[completion]'.") from error
    script = shtab.complete(parser(), shell=options.shell)
    print(json.dumps({"shell": options.shell, "script": script}) if options.json else script)
    return 0
