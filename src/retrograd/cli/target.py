"""TARGET on the command line: `package.module:factory`, a function that builds a network."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from retrograd.cli.mistakes import Mistake

HELP = (
    "package.module:factory, or file.py:factory: a function without arguments that returns "
    "(module, args) or (module, args, kwargs), to be called as module(*args, **kwargs). Try "
    "retrograd.models.vision:example"
)
_MISSING = object()


class NetworkCall(NamedTuple):
    """A network and the arguments to call it with."""

    module: Any  # whatever `rg.check` accepts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load(target: str) -> NetworkCall:
    """Import the factory and call it. Raises `Mistake` if anything is wrong with it."""
    source, colon, name = target.rpartition(":")
    if not colon or not source or not name:
        raise Mistake(f"{target!r}: write package.module:factory or file.py:factory.")
    factory = _run_user_code(functools.partial(_import, source, target), f"{target}: importing it")
    for part in name.split("."):
        factory = _attribute(factory, part, source, target)
    if not callable(factory):
        raise Mistake(
            f"{target} is {type(factory).__name__}, not a function that returns (module, args)."
        )
    return _unpack(_run_user_code(factory, target), target)


def _run_user_code(run: Callable[[], Any], what: str) -> Any:
    """`run()`, with any exception (and `sys.exit()`) turned into a `Mistake`."""
    try:
        return run()
    except Mistake:
        raise
    except (Exception, SystemExit) as error:
        raise Mistake(f"{what} raised {one_line(error)}.") from error


@contextlib.contextmanager
def user_code(options: argparse.Namespace) -> Iterator[None]:
    """Run the user's code: `sys.exit()` is a mistake, and with --json its prints go to stderr."""
    stdout = sys.stderr if options.json else sys.stdout
    with contextlib.redirect_stdout(stdout):
        try:
            yield
        except SystemExit as error:
            raise Mistake(f"{options.target} called sys.exit({error.code!r}).") from error


def _import(source: str, target: str) -> ModuleType:
    _append_to_path(os.getcwd())
    try:
        if source.endswith(".py"):
            return _import_file(Path(source), target)
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        missing = error.name
        if missing is not None and (source == missing or source.startswith(f"{missing}.")):
            raise Mistake(
                f"{target}: there is no module {missing} in {os.getcwd()} or among the installed "
                "packages."
            ) from error
        raise


def _import_file(path: Path, target: str) -> ModuleType:
    if not path.is_file():
        raise Mistake(f"{target}: there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses and pickles look there
    _append_to_path(str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _append_to_path(folder: str) -> None:
    """Import from a folder what is found nowhere else. First on the path, a file there that is
    called matplotlib.py would run in place of matplotlib.
    """
    if folder not in sys.path:
        sys.path.append(folder)


def _attribute(owner: object, name: str, source: str, target: str) -> Any:
    found = _run_user_code(functools.partial(getattr, owner, name, _MISSING), target)
    if found is not _MISSING:
        return found
    public = [other for other in dir(owner) if not other.startswith("_")]
    similar = difflib.get_close_matches(name, public, n=3)
    hint = f" Did you mean {', '.join(similar)}?" if similar else ""
    raise Mistake(f"{target}: there is no {name} in {source}.{hint}")


def _unpack(returned: object, target: str) -> NetworkCall:
    """What the factory returned, with defaults filled in."""
    if not isinstance(returned, tuple):
        raise _wrong_return(target, type(returned).__name__)
    if len(returned) not in (2, 3):
        raise _wrong_return(target, f"a tuple of {len(returned)}")
    module, args, kwargs = (*returned, {})[:3]
    if not isinstance(kwargs, dict):
        raise Mistake(
            f"{target} returned {type(kwargs).__name__} for its keyword arguments, not a dict."
        )
    args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    return NetworkCall(module, args, kwargs)


def _wrong_return(target: str, what: str) -> Mistake:
    return Mistake(
        f"{target} returned {what}, not (module, args) or (module, args, kwargs): write return "
        "module, (x,)"
    )


def one_line(error: BaseException) -> str:
    """An error in one line, with the last line of the user's code in its traceback."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # the error's own __str__ fails
        text = ""
    message = f": {text:.300}" if text else ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_user_code(f.filename)]
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{message}{place}"


def _is_user_code(filename: str) -> bool:
    """Whether a file belongs neither to retrograd, nor to an installed package, nor to Python."""
    if filename.startswith("<") or "-packages" in filename:
        return False
    return not Path(filename).is_relative_to(Path(__file__).parents[1])
