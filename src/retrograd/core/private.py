"""The private names of torch that retrograd uses, and which public ones would replace them.

They are used here and nowhere else, apart from the dicts of `nn.Module` (`_parameters`, `_buffers`,
`_modules`). `tests/test_house.py` checks that, `tests/test_private.py` tests each of them. Where
versions of torch differ, it says so here, too.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import BuiltinMethodType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from retrograd.core.torch_version import VERSION, needed

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _NormBase
    from torch.utils import _pytree
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    _NormBase = needed("nn.modules.batchnorm._NormBase")
    _pytree = needed("utils._pytree")
    TorchDispatchMode = needed("utils._python_dispatch.TorchDispatchMode")

_C: Any = torch._C  # its stubs do not have what is used here

# What is used below, so that a torch without it says so at import and not in a step.
for _name in (
    "Generator._cdata",
    "Tensor._base",
    "Tensor._post_accumulate_grad_hooks",
    "Tensor._version",
    "UntypedStorage._cdata",
    "_C._are_functorch_transforms_active",
    "_C._autograd._pop_saved_tensors_default_hooks",
    "_C._autograd._push_saved_tensors_default_hooks",
    "_C._autograd._saved_tensors_hooks_get_disabled_error_message",
    "_C._autograd._saved_tensors_hooks_is_enabled",
    "_C._autograd._top_saved_tensors_default_hooks",
    "_C._autograd._unsafe_set_version_counter",
    "_C._current_graph_task_id",
    "_C._dynamo.eval_frame._FrameAction.DEFAULT",
    "_C._dynamo.eval_frame._FrameAction.SKIP",
    "_C._dynamo.eval_frame._FrameExecStrategy",
    "_C._dynamo.eval_frame.get_eval_frame_callback",
    "_C._dynamo.eval_frame.set_code_exec_strategy",
    "_C._len_torch_dispatch_stack",
    "_C._pop_torch_dispatch_stack",
    "_C._set_grad_enabled",
    "_C._storage_Use_Count",
    "_C._vmapmode_decrement_nesting",
    "_C._vmapmode_increment_nesting",
    "_disable_dynamo",
    "autograd.Variable._execution_engine.queue_callback",
    "autograd.forward_ad._current_level",
    "ops.aten._scaled_dot_product_flash_attention_for_cpu",
):
    needed(_name)

# torch has no public pytree module yet; this is the one that its own documentation refers to.
# `torch.pytree` would replace it.
pytree = _pytree


class _UncompiledMode(TorchDispatchMode):
    """For torch 2.9 and 2.10: a mode in which compiled functions run as if they were not compiled.

    In 2.9, the guards of compiled code fail in a mode (pytorch#164992): the code would be compiled
    at each call, and after eight times no longer, so recompute might run other code than forward.
    In 2.10, the compiler traces the mode itself.
    `torch.compiler.set_stance("force_eager")` would replace it, if `torch.cond` worked in it.
    """

    def __enter__(self) -> Any:
        entered = super().__enter__()
        compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
        if compiler is not None:  # else nothing is compiled yet
            vars(self).setdefault("stances", []).append(compiler._stance)
            compiler._stance = _UncompiledStance()
        return entered

    def __exit__(self, *exception: Any) -> None:
        stances = vars(self).get("stances")
        if stances:  # else it was ended before: [Note: interrupts]
            compiler: Any = sys.modules["torch._dynamo.eval_frame"]
            compiler._stance = stances[-1]
            stances.pop()
        super().__exit__(*exception)


class _UncompiledStance:
    """What the compiler of these versions asks before each call of a compiled function."""

    backend = None
    skip_guard_eval_unsafe = False

    @property
    def stance(self) -> str:
        # `torch.cond` and the like compile themselves, and must. They set this meanwhile.
        return "default" if torch._dynamo.config.allow_empty_graphs else "force_eager"


RUNS_COMPILED_IN_MODES = VERSION >= (2, 11)
_Mode = TorchDispatchMode if TYPE_CHECKING or RUNS_COMPILED_IN_MODES else _UncompiledMode


class DispatchMode(_Mode):
    """Sees every operation. Documented, but at home in a private module only.

    With these two settings, functions may be compiled and may use `torch.cond` in the mode, as they
    do without it.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def run_in_mode(
    mode: DispatchMode,
    function: Callable[..., Any],
    *args: Any,
) -> Any:
    """What `with mode: return function(*args)` does, but an interrupt leaves no mode behind.

    [Note: interrupts] A `with` statement that does not lose `__exit__` would replace it.
    """
    depth = _C._len_torch_dispatch_stack()
    try:
        with mode:
            return function(*args)
    finally:
        try:
            _end(mode, depth)
        finally:
            _end(mode, depth)


def _end(mode: DispatchMode, depth: int) -> None:
    """End a mode that is still active although its `with` statement is over."""
    while _C._len_torch_dispatch_stack() > depth:
        try:
            mode.__exit__(None, None, None)
        except IndexError:  # it had been interrupted halfway
            _C._pop_torch_dispatch_stack(None)


def begin_in_node(mode: DispatchMode) -> None:
    """Start a mode in a hook that runs before a node of backward; `end_in_node` ends it after it.

    If the node raises, no hook runs. Torch then puts its modes back, but not the setting of
    `_UncompiledMode`, so this leaves it alone: run no compiled code in such a node.
    """
    TorchDispatchMode.__enter__(mode)


def end_in_node(mode: DispatchMode) -> None:
    TorchDispatchMode.__exit__(mode, None, None, None)


class PassiveMode(DispatchMode):
    """Does nothing. A few operations (`ctc_loss`) save other tensors if any mode is active, so what
    ran in a mode runs again in one.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


# Operations that let autograd save memory which they do not fill: it differs each time.
UNFILLED = {"aten::rrelu_with_noise", "aten::_ctc_loss"}

# Operations that write arguments without saying so in their schema: running statistics. Schemas
# that tell would replace it.
UNDECLARED_WRITES = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
}

# What `torch.set_grad_enabled` and `torch.autograd.graph.saved_tensors_hooks` call. Every update
# enters both, in forward and again in backward, and the public ones take 2 us each time, a
# twentieth of a step of a small network. If they were written in C they would replace these.
set_grad_mode: Any = _C._set_grad_enabled
push_hooks: Any = _C._autograd._push_saved_tensors_default_hooks
pop_hooks: Any = _C._autograd._pop_saved_tensors_default_hooks

# A number for each run of the autograd engine; -1 outside. `torch.utils.checkpoint` uses it, too. A
# public way to ask would replace it.
current_backward: Any = _C._current_graph_task_id


def at_end_of_backward(action: Callable[[], None]) -> None:
    """Call `action` when the backward that is under way has ended; what it raises, backward raises.

    FSDP2 and DDP use it, too. A public way to ask would replace it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(action)  # type: ignore[attr-defined]


# Sets the versions of tensors, given as two tuples. A public `Tensor.version` that can be set would
# replace it.
set_version: Any = _C._autograd._unsafe_set_version_counter

# The base class of all norms with running statistics. A public name would replace it.
NormWithStatistics = _NormBase

# `torch.compiler.disable`, except that it does not import the compiler (seconds) before the first
# call.
without_compiler = torch._disable_dynamo


def never_compiled(fn: Any) -> Any:
    """Tell the compiler to skip `fn`, at no cost. It still compiles what `fn` calls.

    `torch.compiler.disable(recursive=False)` would replace it, if it did not wrap the function.
    """
    frames: Any = _C._dynamo.eval_frame
    frames.set_code_exec_strategy(
        fn.__code__,
        frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT),
    )
    return fn


@never_compiled
def is_compiler_active() -> bool:
    """Whether the compiler looks at the functions that this thread calls.

    `without_compiler` takes microseconds in each call, so it is left out where nothing would be
    compiled. A public way to ask would replace it.
    """
    if torch.compiler.is_compiling():  # first: where it is true, the rest cannot be traced
        return True
    return _C._dynamo.eval_frame.get_eval_frame_callback() is not None


def bare_copy(module: nn.Module) -> nn.Module:
    """A shallow copy of a module, without hooks and without its compiled call.

    Its parts, parameters and attributes are the same objects. No public name gives this:
    `copy.copy` keeps hooks and the compiled call.
    """
    twin = object.__new__(type(module))
    for name, value in module.__dict__.items():
        is_hooks = name.endswith("_hooks") and isinstance(value, dict)
        twin.__dict__[name] = type(value)() if is_hooks else value
    twin.__dict__["_compiled_call_impl"] = None
    return twin


def is_apply_of(value: object, function: type[torch.autograd.Function]) -> bool:
    """Whether a value is `function.apply`: a method, and from torch 2.14 on a built-in one."""
    if type(value) not in (MethodType, BuiltinMethodType):  # odd objects lie about their class
        return False
    return value.__self__ is function and value.__name__ == "apply"  # type: ignore[attr-defined]


def is_compiled(function: Any) -> bool:
    """Whether a function or a module was compiled. A public way to ask would replace it."""
    if getattr(function, "_compiled_call_impl", None) is not None:
        return True
    return hasattr(function, "_torchdynamo_orig_callable") or hasattr(function, "_orig_mod")


def _is_exporting() -> bool:
    return torch.compiler._is_exporting_flag  # type: ignore[attr-defined]


# Whether a graph is exported. Up to torch 2.12, `torch.compiler.is_exporting` says so in every
# compiled function.
is_exporting = torch.compiler.is_exporting if VERSION >= (2, 13) else _is_exporting


def break_graph(reason: str) -> None:
    """Break the graph, and tell a compiler that must not why. A reason in `without_compiler` would
    replace it.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=reason)


# Whether FSDP forgets its casts if a module runs again in backward. Since 2.13 it casts there, too
# (pytorch#159359).
FSDP_FORGETS_CASTS = VERSION < (2, 13)


def fsdp_policy(module: Any) -> Any:
    """The mixed precision of a module that `fully_shard` was called with; None for any other.

    A public way to ask would replace it.
    """
    if not hasattr(module, "_get_fsdp_state"):
        return None
    state = module._get_fsdp_state()
    return state._mp_policy if len(state._modules) == 1 else None  # else it casts for one of them


# Whether a parameter has hooks that run as soon as its gradient is there. A public
# `Tensor.has_post_accumulate_grad_hook()` would replace it.
has_step_hooks = operator.attrgetter("_post_accumulate_grad_hooks")

# A generator, whatever Python object stands for it: a dispatch mode gets another one than the
# caller passed. Equality of `torch.Generator` would replace it.
identity_of_generator: Any = operator.attrgetter("_cdata")

# What attention on a CPU runs. torch's FLOP counter has a formula for it since 2.14. If that were
# the oldest torch, this would not be needed.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values: one of `FakeTensorMode`, whose class has no public name."""
    return type(tensor).__name__ == "FakeTensor"


def check_hooks_are_enabled() -> None:
    """Raise what torch raises where `disable_saved_tensors_hooks` is on. Public ways to ask would
    replace these.
    """
    if not _C._autograd._saved_tensors_hooks_is_enabled():
        raise RuntimeError(_C._autograd._saved_tensors_hooks_get_disabled_error_message())


def surrounding_hooks() -> tuple[Any, Any] | None:
    """The hooks on saved tensors that surround us (of an outer stack, of checkpoint): pack, unpack.

    A public way to ask would replace it.
    """
    return _C._autograd._top_saved_tensors_default_hooks(False)


def are_transforms_active() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is active.

    Public ways to ask would replace these.
    """
    return _C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def vmap_level() -> int:
    """How many batches of gradients (`is_grads_batched`) backward is inside of.

    Public ways to ask and to set it would replace these two.
    """
    # `map` calls both in C: no interrupt comes between them. [Note: interrupts]
    level, _ = map(_call, (_C._vmapmode_increment_nesting, _C._vmapmode_decrement_nesting))
    return level - 1


_call = operator.methodcaller("__call__")


def set_vmap_level(level: int) -> None:
    while vmap_level() > level:
        _C._vmapmode_decrement_nesting()
    while vmap_level() < level:
        _C._vmapmode_increment_nesting()


# How many objects use a storage, given by its `_cdata`. A public `UntypedStorage.use_count()` would
# replace it.
storage_users: Any = _C._storage_Use_Count

# What it returns if a single tensor uses the storage. In most versions the Python object of the
# storage, which had to be made to ask, counts as long as the storage lives; in torch 2.9 it counts
# only while somebody refers to it (pytorch#167564). So it is measured.
_one_tensor = torch.empty(1)
ONE_TENSOR: int = storage_users(_one_tensor.untyped_storage()._cdata)
