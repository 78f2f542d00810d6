"""`package.module:factory`: a network on the command line."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from retrograd.cli.mistakes import Mistake

HELP = (
    "package.module:factory, or file.py:factory: a function without arguments that returns (module, args) or (module, args, "
    "kwargs), to be called as module(*args, **kwargs). Try retrograd.models.lm:example"
)


def load(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What the factory returns. Everything that can be wrong about it is a mistake, told in one line."""
    home, colon, name = target.rpartition(":")
    if not colon or not home or not name:
        raise Mistake(f"{target!r}: write package.module:factory or file.py:factory.")
    factory = _import(home, target)
    for part in name.split("."):
        if not hasattr(factory, part):
            near = difflib.get_close_matches(part, [n for n in dir(factory) if not n.startswith("_")], n=3)
            hint = f" Did you mean {', '.join(near)}?" if near else ""
            raise Mistake(f"{target}: there is no {part} in {home}.{hint}")
        factory = getattr(factory, part)
    if not callable(factory):
        raise Mistake(f"{target} is {type(factory).__name__}, not a function that returns (module, args).")
    try:
        made = factory()
    except Exception as error:
        raise Mistake(f"{target} raised {told(error)}.") from error
    return _unpacked(made, target)


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
        sys.path.insert(0, str(Path(home).resolve().parent))  # what lies beside it, as `python file.py` finds
        spec.loader.exec_module(module)
        return module
    except ModuleNotFoundError as error:
        if error.name is not None and (home == error.name or home.startswith(f"{error.name}.")):
            raise Mistake(f"{target}: there is no module {error.name}, seen from here ({os.getcwd()}).") from error
        raise Mistake(f"{target}: importing it raised {told(error)}.") from error
    except Mistake:
        raise
    except Exception as error:
        raise Mistake(f"{target}: importing it raised {told(error)}.") from error


def _unpacked(made: Any, target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise Mistake(f"{target} returned {what}, not (module, args) or (module, args, kwargs).")
    module, args, kwargs = (*made, {})[:3]
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    if not isinstance(kwargs, dict):
        raise Mistake(f"{target} returned {type(kwargs).__name__} for its keyword arguments, not a dict.")
    return module, args, kwargs


def told(error: Exception) -> str:
    """An error of someone else's code in one line, with where it came up."""
    frames = traceback.extract_tb(error.__traceback__)
    text = " ".join(str(error).split())
    at = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text:.300}{at}" if text else f"{type(error).__name__}{at}"
