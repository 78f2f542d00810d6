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
    users = lambda tensor: private.storage_users(tensor.untyped_storage()._cdata) - 1  # noqa: E731
    assert users(x) == 1
    y = x[:2]
    assert users(x) == users(y) == 2
    del y
    assert users(x) == 1


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

    depth = torch._C._len_torch_dispatch_stack()
    with pytest.raises(KeyboardInterrupt):
        private.run_in_mode(Lost(), torch.ones, 2)
    assert torch._C._len_torch_dispatch_stack() == depth
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
