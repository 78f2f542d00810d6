"""Several processes: what they decide together, and which of them says what went wrong.

Every process says its own errors, with its rank. An error that all have, or that the first process
decided on for all, is said once: the others raise a `Mistake` without text.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from retrograd.cli.mistakes import Mistake

T = TypeVar("T")


class SaidForAll(Exception):
    """An error that this process says for others, too."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A process group, if torchrun started several processes."""
    if _world_size() < 2:
        yield
        return
    try:
        dist.init_process_group("gloo")
    except (ValueError, RuntimeError) as error:
        why = str(error).strip().splitlines()[0]
        raise Mistake(
            f"the {_world_size()} processes of WORLD_SIZE cannot be connected: {why}. Start them "
            "with torchrun --nproc-per-node N -m speedrun train."
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**31):
        raise Mistake(
            f"WORLD_SIZE={text!r} is not a number of processes. torchrun sets it; for one process, "
            "unset WORLD_SIZE."
        )
    return int(text)


def agree(decide: Callable[[], T]) -> T:
    """Call `decide` in the first process, and return its result in all. If it fails, all do."""
    if not dist.is_initialized():
        return decide()
    found: list = [None, False]  # result, and whether there is one
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            found = [decide(), True]
        except Exception as error:
            failed = error
    dist.broadcast_object_list(found)
    if failed is not None:
        raise SaidForAll(failed) from failed
    if not found[1]:
        raise Mistake("")
    return found[0]


def together(decide: Callable[[], T]) -> T:
    """Call `decide` in every process. If it fails in one, it fails in all. It may not communicate.

    Of processes with the same error, the first says it.
    """
    if not dist.is_initialized():
        return decide()
    failed: Exception | None = None
    result: T | None = None
    try:
        result = decide()
    except Exception as error:
        failed = error
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, None if failed is None else f"{type(failed)} {failed}")
    if not any(texts):
        return result  # type: ignore[return-value]
    rank = dist.get_rank()
    if failed is None or texts[rank] in texts[:rank]:
        raise Mistake("")
    if all(text == texts[0] for text in texts):
        raise SaidForAll(failed) from failed
    raise failed


@contextlib.contextmanager
def alike() -> Iterator[None]:
    """Errors in here are those of every process: the first one says them."""
    try:
        yield
    except Exception as error:
        if not dist.is_initialized():
            raise
        if dist.get_rank() > 0:
            raise Mistake("") from error
        raise SaidForAll(error) from error


def any_process(value: bool) -> bool:
    """Whether `value` is true in any process."""
    if not dist.is_initialized():
        return value
    flag = torch.tensor(float(value))
    dist.all_reduce(flag)
    return bool(flag)


def with_rank(text: str) -> str:
    """A message of this process, which names it if there are several."""
    return f"rank {os.environ.get('RANK')}: {text}" if _world_size() > 1 else text


def exit_at_once(code: int) -> None:
    """Exit without the interpreter's own clean-up, which sometimes aborts in gloo's threads."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
