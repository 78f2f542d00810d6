"""Which functions are regions: those of a kind that the compiler has traced without one.

The compiler cannot break a graph inside of a region, and a region must return new tensors. So the
first function of a kind is traced as a part of the graph. If that went well, later ones of the same
kind are regions. Functions are of one kind if the same code runs with modules and parameters of the
same types and shapes.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from retrograd.compiling.seams import run_while_tracing

Kind = tuple[Any, ...]

_known: set[Kind] = set()


@run_while_tracing
def is_region(fn: Any) -> bool:
    """Whether a function is traced as a region."""
    return isinstance(fn, nn.Module) and kind_of(fn) in _known


@run_while_tracing
def may_be_region(fn: Any) -> bool:
    """Remember that a function was traced without trouble."""
    # A function without parameters may return a view of its input. One that has buffers may write
    # them. Inner stacks are graphs of their own.
    if not isinstance(fn, nn.Module) or not any(True for _ in fn.parameters()):
        return False
    if any(True for _ in fn.buffers()) or any(map(_is_stack, fn.modules())):
        return False
    _known.add(kind_of(fn))
    return True


def kind_of(fn: nn.Module) -> Kind:
    modules = tuple((type(module), module.training) for module in fn.modules())
    shapes = tuple((p.shape, p.dtype, p.requires_grad) for p in fn.parameters())
    return (*modules, *shapes)


def _is_stack(module: nn.Module) -> bool:
    from retrograd.stack import Stack  # which imports this

    return isinstance(module, Stack)
