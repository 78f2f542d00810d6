"""What retrograd uses of torch that torch does not document, named once; and what would replace
each.

Used here and nowhere else, apart from the dicts of `nn.Module` (`_parameters`, `_buffers`,
`_modules`), which every library that looks into modules reads. `tests/test_house.py` holds the
line, `tests/test_private.py` says what each is expected to do.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

# torch has no public pytree module yet; this is the one that its own documentation refers to.
# `torch.pytree` would replace it.
pytree = _pytree

# Sees every operation. Documented, but at home in a private module only.
DispatchMode = TorchDispatchMode

# What `torch.set_grad_enabled` and `torch.autograd.graph.saved_tensors_hooks` call. Every update
# enters both, in forward and again in backward, and the public ones take 2 us each time, a
# twentieth of a step of a small network. If they were written in C they would replace these.
set_grad_mode: Any = torch._C._set_grad_enabled
push_hooks: Any = torch._C._autograd._push_saved_tensors_default_hooks  # type: ignore[attr-defined]
pop_hooks: Any = torch._C._autograd._pop_saved_tensors_default_hooks  # type: ignore[attr-defined]

# The parent of every normalisation that keeps running statistics. A public name for it would
# replace it.
NormWithStatistics = _NormBase

# `torch.compiler.disable`, except that it does not import the compiler (seconds) before the first
# call.
without_compiler = torch._disable_dynamo


def never_compiled(fn: Any) -> Any:
    """`fn`, which the compiler then leaves alone wherever it meets it; unlike `without_compiler`,
    at no cost. Not what it calls.

    `torch.compiler.disable(recursive=False)` would replace it, if it did not wrap the function.
    """
    frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    frames.set_code_exec_strategy(
        fn.__code__,
        frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT),
    )
    return fn


def break_graph(reason: str) -> None:
    """Tells a compiler that must not break its graph why it has to. A reason in `without_compiler`
    would replace it.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=reason)


# Whether a parameter has hooks that run as soon as its gradient is there. A public
# `Tensor.has_post_accumulate_grad_hook()` would replace it.
has_step_hooks = operator.attrgetter("_post_accumulate_grad_hooks")

# What attention on a CPU runs. torch's FLOP counter has no formula for it; once it has, this is not
# needed.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values: one of `FakeTensorMode`, whose class has no
    public name.
    """
    return type(tensor).__name__ == "FakeTensor"


def surrounding_hooks() -> bool:
    """Whether someone around us (an outer stack, checkpoint) has hooks on saved tensors. A public
    way to ask would replace it.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # type: ignore[attr-defined]


def are_transforms_active() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is under way. Public ways to
    ask would replace these.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def storage_users(tensor: Tensor) -> int:
    """How many tensors have the memory of this one, itself included. A public
    `UntypedStorage.use_count()` would replace it.

    It counts the storage object made to ask, too.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1
