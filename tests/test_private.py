"""What `core/private.py` takes from torch does what it is taken for."""

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy

import retrograd as rg
from retrograd.core import private, torch_version
from retrograd.core.guard import Undo
from retrograd.core.guards.fsdp_casts import FsdpCasts
from retrograd.core.structure import Structure

SOURCE = Path(rg.__file__).parents[1]


def test_set_grad_mode_is_set_grad_enabled():
    before = torch.is_grad_enabled()
    for mode in (False, True):
        private.set_grad_mode(mode)
        seen = torch.is_grad_enabled()
        private.set_grad_mode(before)
        assert seen is mode


def test_push_and_pop_are_saved_tensors_hooks():
    x, packed = torch.ones(2, requires_grad=True), []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.detach() * 3

    private.push_hooks(pack, lambda tensor: tensor)
    y = x * x
    private.pop_hooks()
    z = x * x
    assert len(packed) == 2
    y.sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]  # what pack made of it
    z.sum().backward()
    assert x.grad.tolist() == [8.0, 8.0]


def test_surrounding_hooks_are_seen():
    assert not private.surrounding_hooks()
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        assert private.surrounding_hooks()
    assert not private.surrounding_hooks()


def test_transforms_are_seen():
    seen = []

    def f(x):
        seen.append(private.are_transforms_active())
        return x.sum()

    f(torch.ones(1))
    torch.func.grad(f)(torch.ones(1))
    torch.func.vmap(f)(torch.ones(1, 1))
    with torch.autograd.forward_ad.dual_level():
        f(torch.ones(1))
    assert seen == [False, True, True, True]


def test_code_that_is_never_compiled_is_not():
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    @private.never_compiled
    def left_alone(x):
        return x.sin()

    torch._dynamo.reset()
    counter = CompileCounter()
    torch.compile(left_alone, backend=counter)(torch.ones(2))
    assert counter.frame_count == 0
    torch.compile(lambda x: x.cos(), backend=counter)(torch.ones(2))
    assert counter.frame_count == 1


class Doubling(private.DispatchMode):
    """Sees sines, and doubles them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        scale = 2 if func is torch.ops.aten.sin.default else 1
        return func(*args, **(kwargs or {})) * scale


def test_compiled_functions_run_in_a_mode():
    """Torch 2.9 would compile them at each call, and 2.10 the mode. There they run uncompiled."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: x.sin(), backend=counter)
    x = torch.ones(2)
    for _ in range(3):
        assert torch.equal(private.run_in_mode(Doubling(), compiled, x), 2 * x.sin())
    assert counter.frame_count == private.RUNS_COMPILED_IN_MODES
    for _ in range(3):
        assert torch.equal(compiled(x), x.sin())
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, tracing
def test_functions_with_branches_run_in_a_mode():
    def choose(x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    x = torch.ones(2)
    torch._dynamo.reset()
    for fn in (choose, torch.compile(choose, backend="aot_eager")):
        for _ in range(10):  # more often than torch compiles one function
            private.run_in_mode(private.PassiveMode(), fn, x)
        assert torch.equal(fn(x), x.sin())


def test_exporting_is_not_compiling():
    seen = []

    class Module(nn.Module):
        def forward(self, x):
            seen.append(private.is_exporting())
            return x.sin()

    module, x = Module(), torch.ones(2)
    module(x)
    torch._dynamo.reset()
    torch.compile(module, backend="eager")(x)
    assert seen == [False, False]
    torch.export.export(module, (x,), strict=False)
    assert seen[2:] and all(seen[2:])


def test_casts_of_fsdp_are_made_again():
    """Torch before 2.13 needs it; where FSDP casts for itself, they change nothing."""

    class Sharded(nn.Linear):
        def _get_fsdp_state(self):
            return SimpleNamespace(_modules=[self], _mp_policy=policy)

        def forward(self, x, *, scale):
            seen.extend([x.dtype, scale.dtype])
            return super().forward(x) * scale

    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    seen = []
    sharded = Sharded(2, 2).bfloat16()
    assert private.fsdp_policy(sharded) is policy
    assert private.fsdp_policy(nn.Linear(2, 2)) is None
    undo = Undo()
    structure = Structure([(nn.Sequential(sharded),)])
    assert structure.forgets_casts == private.FSDP_FORGETS_CASTS
    FsdpCasts(structure).before_recompute(0, undo)
    assert sharded(torch.ones(2), scale=torch.ones(2)).dtype == torch.float64
    assert seen == [torch.bfloat16] * 2
    undo.run()
    x = torch.ones(2, dtype=torch.bfloat16)
    assert sharded(x, scale=torch.ones(2)).dtype == torch.float32
    assert not sharded._forward_hooks and not sharded._forward_pre_hooks


def test_fake_tensors_are_known():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert private.is_fake(torch.ones(2))
    assert not private.is_fake(torch.ones(2))


def test_storage_users_counts_tensors():
    x = torch.ones(4)
    users = lambda tensor: private.storage_users(tensor.untyped_storage()._cdata)  # noqa: E731
    assert users(x) == private.ONE_TENSOR
    y = x[:2]
    assert users(x) == users(y) == private.ONE_TENSOR + 1
    del y
    assert users(x) == private.ONE_TENSOR


def test_step_hooks_are_seen():
    p = torch.nn.Parameter(torch.ones(1))
    assert not private.has_step_hooks(p)
    handle = p.register_post_accumulate_grad_hook(lambda p: None)
    assert private.has_step_hooks(p)
    handle.remove()
    assert not private.has_step_hooks(p)


@pytest.mark.parametrize(
    "norm", [torch.nn.BatchNorm1d, torch.nn.SyncBatchNorm, torch.nn.InstanceNorm2d]
)
def test_norms_with_statistics_are_known(norm):
    assert issubclass(norm, private.NormWithStatistics)


def test_a_mode_ends_even_if_its_exit_is_lost():
    class Lost(private.PassiveMode):
        """Whose `with` statement is interrupted before `__exit__` has done anything."""

        interrupts = 1

        def __exit__(self, *exception):
            if Lost.interrupts:
                Lost.interrupts -= 1
                raise KeyboardInterrupt
            super().__exit__(*exception)

    import torch._dynamo

    depth = torch._C._len_torch_dispatch_stack()
    stance = torch._dynamo.eval_frame._stance
    with pytest.raises(KeyboardInterrupt):
        private.run_in_mode(Lost(), torch.ones, 2)
    assert torch._C._len_torch_dispatch_stack() == depth
    assert torch._dynamo.eval_frame._stance is stance
    assert private.run_in_mode(private.PassiveMode(), torch.ones, 2).sum() == 2


def test_batches_of_gradients():
    assert private.vmap_level() == 0
    private.set_vmap_level(2)
    assert private.vmap_level() == 2
    private.set_vmap_level(0)
    assert private.vmap_level() == 0


def test_versions_can_be_set():
    tensor = torch.zeros(2)
    version = tensor._version
    tensor.add_(1)
    private.set_version((tensor,), (version,))
    assert tensor._version == version


def test_hooks_may_be_disabled():
    private.check_hooks_are_enabled()
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
    ):
        private.check_hooks_are_enabled()


# --- which torch


def imported(change):
    """What `import retrograd` writes after a change of torch, in a process of its own."""
    code = f"import torch; {change}; import retrograd"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=SOURCE)
    return done.returncode, done.stderr.strip().splitlines()


def test_a_torch_that_is_too_old_is_told_in_a_line():
    code, told = imported("torch.__version__ = '2.8.1'")
    assert code == 1
    assert told[-1] == (
        f"ImportError: retrograd needs {torch_version.SUPPORTED}, and this is torch 2.8.1: pip "
        "install 'torch>=2.9'"
    )


def test_a_torch_that_is_newer_than_any_tested_is_told_in_a_line():
    """Once, as a warning at the line that imports retrograd."""
    code, told = imported("torch.__version__ = '2.99.0+cpu'")
    assert code == 0
    assert told == [
        f"<string>:1: UserWarning: retrograd was tested on {torch_version.TESTED}, and this is "
        "torch 2.99.0+cpu: check your network with rg.check"
    ]


@pytest.mark.parametrize(
    "name", ["_C._storage_Use_Count", "nn.modules.batchnorm._NormBase", "_disable_dynamo"]
)
def test_what_torch_lacks_is_told_in_a_line(name):
    code, told = imported(f"del torch.{name}")
    assert code == 1
    assert told[-1] == (
        f"ImportError: retrograd cannot use torch {torch.__version__}, which has no torch.{name}: "
        f"install torch {torch_version.NEWEST[0]}.{torch_version.NEWEST[1]}"
    )
    assert len(told) < 12, "a traceback from deep inside"


def test_this_torch_is_a_version_that_is_supported():
    assert torch_version.OLDEST <= torch_version.VERSION <= torch_version.NEWEST


def test_every_name_is_asked_for_at_import():
    """All that `private.py` looks up in `torch._C` while a function runs."""
    source = (SOURCE / "retrograd" / "core" / "private.py").read_text()
    used = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("_C.", "frames._"))
    }
    for name in used:
        path = name.replace("frames.", "_C._dynamo.eval_frame.")
        assert f'"{path}' in source, f"add {path!r} to the names that are needed"


def test_a_bare_copy_has_the_same_parts_and_no_hooks():
    seen = []
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    module.register_forward_hook(lambda *_: seen.append("hook"))
    module.register_forward_pre_hook(lambda *_: seen.append("pre-hook"))
    module.compile(backend="eager")
    twin = private.bare_copy(module)
    twin(torch.ones(1, 2))
    assert seen == []
    assert twin[0] is module[0] and type(twin) is type(module)
    twin.attribute = 1
    assert not hasattr(module, "attribute")
    assert len(module._forward_hooks) == 1 and module._compiled_call_impl is not None


def test_apply_of_an_autograd_function_is_known():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    class Other(Double):
        pass

    apply = Double.apply
    assert private.is_apply_of(apply, Double)
    assert not private.is_apply_of(apply, Other)
    assert not private.is_apply_of(Double.forward, Double)
    assert not private.is_apply_of(torch.ones(1).add, Double)
