"""What `core/private.py` takes from torch does what it is taken for."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from retrograd.core import private


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


def test_fake_tensors_are_known():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert private.is_fake(torch.ones(2))
    assert not private.is_fake(torch.ones(2))


def test_storage_users_counts_tensors():
    x = torch.ones(4)
    assert private.storage_users(x) == 1
    y = x[:2]
    assert private.storage_users(x) == private.storage_users(y) == 2
    del y
    assert private.storage_users(x) == 1


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
