"""`package.module:factory`: a network on the command line."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from retrograd.cli.mistakes import Mistake

HELP = (
    "package.module:factory, or file.py:factory: a function without arguments that returns "
    "(module, args) or (module, args, "
    "kwargs), to be called as module(*args, **kwargs). Try retrograd.models.lm:example"
)


def load(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What the factory returns. Everything that can be wrong about it is a mistake, told in one
    line.
    """
    home, colon, name = target.rpartition(":")
    if not colon or not home or not name:
        raise Mistake(f"{target!r}: write package.module:factory or file.py:factory.")
    factory = _attempt(lambda: _import(home, target), f"{target}: importing it")
    for part in name.split("."):
        if not _attempt(lambda: hasattr(factory, part), target):  # noqa: B023
            near = difflib.get_close_matches(
                part, [n for n in dir(factory) if not n.startswith("_")], n=3
            )
            hint = f" Did you mean {', '.join(near)}?" if near else ""
            raise Mistake(f"{target}: there is no {part} in {home}.{hint}")
        factory = getattr(factory, part)
    if not callable(factory):
        raise Mistake(
            f"{target} is {type(factory).__name__}, not a function that returns (module, args)."
        )
    return _unpacked(_attempt(factory, target), target)


def _attempt(run: Callable[[], Any], what: str) -> Any:
    """What someone else's code returns. Whatever it raises is told in one line,
    `sys.exit()` too.
    """
    try:
        return run()
    except Mistake:
        raise
    except (Exception, SystemExit) as error:
        raise Mistake(f"{what} raised {told(error)}.") from error


@contextlib.contextmanager
def theirs(options: argparse.Namespace) -> Iterator[None]:
    """While someone else's code runs: what it prints goes elsewhere if ours is for a program to
    read, and it may not exit.
    """
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        try:
            yield
        except SystemExit as error:
            raise Mistake(f"{options.target} called sys.exit({error.code!r}).") from error


def _import(home: str, target: str) -> Any:
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        if not home.endswith(".py"):
            return importlib.import_module(home)
        if not Path(home).is_file():
            raise Mistake(f"{target}: there is no file {home}.")
        spec = importlib.util.spec_from_file_location(Path(home).stem, home)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(spec.name, module)  # dataclasses and pickles look there
        sys.path.insert(
            0, str(Path(home).resolve().parent)
        )  # what lies beside it, as `python file.py` finds
        spec.loader.exec_module(module)
        return module
    except ModuleNotFoundError as error:
        if error.name is not None and (home == error.name or home.startswith(f"{error.name}.")):
            raise Mistake(
                f"{target}: there is no module {error.name}, seen from here ({os.getcwd()})."
            ) from error
        raise


def _unpacked(made: Any, target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise Mistake(
            f"{target} returned {what}, not (module, args) or (module, args, kwargs): write return "
            "module, (x,)"
        )
    module, args, kwargs = (*made, {})[:3]
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    if not isinstance(kwargs, dict):
        raise Mistake(
            f"{target} returned {type(kwargs).__name__} for its keyword arguments, not a dict."
        )
    return module, args, kwargs


def told(error: BaseException) -> str:
    """An error in one line, with where it came up, if that is someone else's code."""
    frames = traceback.extract_tb(error.__traceback__)
    try:
        text = " ".join(str(error).split())
    except Exception:  # its own text fails
        text = ""
    package = Path(__file__).parents[1]
    own = [
        f
        for f in frames
        if not Path(f.filename).is_relative_to(package)
        and "-packages" not in f.filename
        and f.filename[0] != "<"
    ]
    at = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text:.300}{at}" if text else f"{type(error).__name__}{at}"
