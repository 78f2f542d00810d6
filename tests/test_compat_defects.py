"""Defects of the originals that retrograd does not have. Each check must hold here and fail on the
original.

A check returns whether a module does the right thing; an exception counts as no. That the original
still fails shows that the check can fail at all.
"""

import copy

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.compat import axial, nuwa, nuwa_video_audio, reformer, se3
from tests.packages import load
from tests.test_compat_parity import ByDegree, Function, pairs

WIDTH = 4
SYSTEMS = {
    "reformer": (reformer, "reformer_pytorch.reversible"),
    "nuwa": (nuwa, "nuwa_pytorch.reversible"),
    "axial": (axial, "axial_attention.reversible"),
    "se3": (se3, "se3_transformer_pytorch.reversible"),
    "video and audio": (nuwa_video_audio, "nuwa_pytorch.reversible_video_audio"),
}


def sequence(system, module, make=None, depth=3, **options):
    """A stack of one system whose functions are made by `make(axis)`."""
    if system == "se3":
        return module.ReversibleSequence(
            pairs(make or (lambda: ByDegree(WIDTH, 0.0)), depth), **options
        ).double()
    axis = 1 if system == "axial" else 2
    make = make or (lambda: Function(WIDTH, 0.0, axis=axis))
    if system == "video and audio":
        types = ["intra_modality_cross_attn"] * depth
        return module.DualModalityReversibleSequence(
            [[make() for _ in range(4)] for _ in types], types
        ).double()
    return module.ReversibleSequence(pairs(make, depth), **options).double()


def example(system, **options):
    options = {"dtype": torch.float64, **options}
    if system == "se3":
        return {"0": torch.randn(2, WIDTH, 1, **options), "1": torch.randn(2, WIDTH, 3, **options)}
    if system == "axial":
        return torch.randn(2, WIDTH, 3, 3, **options)
    return torch.randn(2, 5, 2 * WIDTH if system == "reformer" else WIDTH, **options)


def run(system, net, x, **kwargs):
    """A number that depends on every output."""
    if system == "video and audio":
        kwargs = {"context": None, **kwargs}
        return sum(y.square().sum() for y in net(x, x.flip(1)[:, :3], **kwargs))
    y = net(x, **kwargs)
    return sum(v.square().sum() for v in y.values()) if system == "se3" else y.square().sum()


def fails_there_holds_here(check, system, *args):
    ours, theirs = SYSTEMS[system]

    def holds(module):
        torch.manual_seed(3)
        try:
            return bool(check(system, module, *args))
        except Exception:
            return False

    assert holds(ours)
    check(system, ours, *args)  # and shows its error, should it raise
    assert not holds(load(theirs))


def grads(net):
    return [p.grad for p in net.parameters()]


def close(a, b):
    return all(
        x is not None and y is not None and torch.allclose(x, y, rtol=1e-9, atol=1e-9)
        for x, y in zip(a, b)
    )


every_system = pytest.mark.parametrize("system", SYSTEMS)


@every_system
def test_an_input_that_needs_no_gradient(system):
    def check(system, module):
        net = sequence(system, module)
        run(system, net, example(system)).backward()
        return all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())

    fails_there_holds_here(check, system)


@every_system
def test_backward_in_eval(system):
    def check(system, module):
        net = sequence(system, module).eval()
        run(system, net, example(system, requires_grad=True)).backward()
        return all(p.grad is not None for p in net.parameters())

    fails_there_holds_here(check, system)


@every_system
def test_two_forwards_before_a_backward(system):
    """With dropout. The originals keep the random state on the module, where the second forward
    overwrites it.
    """

    def check(system, module):
        axis = 1 if system == "axial" else 2
        make = (
            (lambda: ByDegree(WIDTH, 0.5))
            if system == "se3"
            else (lambda: Function(WIDTH, 0.5, axis=axis))
        )
        net = sequence(system, module, make)
        x = example(system, requires_grad=True)
        torch.manual_seed(0)
        run(system, net, x).backward()
        alone = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        torch.manual_seed(0)
        first = run(system, net, x)
        run(system, net, x)
        first.backward()
        return close(alone, grads(net))

    fails_there_holds_here(check, system)


@every_system
def test_autograd_grad(system):
    def check(system, module):
        net = sequence(system, module)
        found = torch.autograd.grad(
            run(system, net, example(system, requires_grad=True)), list(net.parameters())
        )
        return all(g is not None for g in found)

    fails_there_holds_here(check, system)


@every_system
def test_double_backward(system):
    """The originals give a first derivative that has no second, without a word."""

    def check(system, module):
        net = sequence(system, module)
        x = example(system, requires_grad=True)
        leaf = x["0"] if system == "se3" else x
        (first,) = torch.autograd.grad(run(system, net, x), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf)
        return second.abs().sum() > 0 and second.isfinite().all()

    fails_there_holds_here(check, system)


@every_system
def test_buffers_are_updated_once(system):
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2, momentum=None)

        def forward(self, x, **kwargs):
            if isinstance(x, dict):
                return {**x, "0": self.norm(x["0"].reshape(-1, 2)).view_as(x["0"])}
            return self.norm(x.reshape(-1, 2)).view_as(x)

    def check(system, module):
        net = sequence(system, module, Counted)
        run(system, net, example(system, requires_grad=True)).backward()
        return {
            int(b) for name, b in net.named_buffers() if name.endswith("num_batches_tracked")
        } == {1}

    fails_there_holds_here(check, system)


@every_system
def test_recompute_is_in_the_autocast_of_forward(system):
    """Backward is called outside of autocast, as PyTorch recommends."""
    seen = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, x, **kwargs):
            value = x["1"] if isinstance(x, dict) else x
            y = self.linear(value.unsqueeze(-1)).squeeze(-1)
            seen.append(y.dtype)
            y = y.to(value.dtype)
            return {"0": x["0"].tanh(), "1": y} if isinstance(x, dict) else y

    def check(system, module):
        seen.clear()
        net = sequence(system, module, Watched).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run(system, net, example(system, requires_grad=True, dtype=torch.float32))
        loss.backward()
        return set(seen) == {torch.bfloat16}

    fails_there_holds_here(check, system)


class Encoder(torch.autograd.Function):
    """Something that makes a context, and counts how often it is walked back."""

    backwards = 0

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Encoder.backwards += 1
        return grad * 2


@every_system
def test_the_encoder_is_walked_back_once(system):
    """A decoder of depth 24 whose functions all read the context. The originals walk the encoder
    back once for each function.
    """
    depth = 24
    options = {"args_route": {"context": [(True, False)] * depth}} if system == "nuwa" else {}

    def check(system, module):
        net = sequence(system, module, depth=depth, **options)
        source = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
        Encoder.backwards = 0
        kwargs = {"context_mask": None} if system == "video and audio" else {}
        run(
            system,
            net,
            example(system, requires_grad=True),
            context=Encoder.apply(source),
            **kwargs,
        ).backward()
        return Encoder.backwards == 1 and source.grad.abs().sum() > 0

    fails_there_holds_here(check, system)


@pytest.mark.parametrize("system", ["reformer", "nuwa", "axial"])
def test_context_that_only_g_gets(system):
    """Walked back with the graph freed after the first block, the originals fail in the second."""
    options = {"args_route": {"context": [(False, True)] * 3}} if system == "nuwa" else {}
    kwargs = {} if system == "nuwa" else {"arg_route": (False, True)}

    def check(system, module):
        net = sequence(system, module, **options)
        source = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        run(
            system, net, example(system, requires_grad=True), context=source.sin(), **kwargs
        ).backward()
        return source.grad.abs().sum() > 0

    fails_there_holds_here(check, system)


def test_layer_dropout_on_short_inputs():
    """The originals take blocks that run without autograd down the path that relies on it."""

    def check(system, module):
        net = sequence(system, module, depth=6, layer_dropout=0.5, reverse_thres=100)
        x = example(system, requires_grad=True)
        run(system, net, x).backward()
        return (
            any(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())
            and x.grad.abs().sum() > 0
        )

    fails_there_holds_here(check, "reformer")


def test_default_arguments_stay_empty():
    """With `send_signal` the originals write into the default of `f_args`, which every block
    shares.
    """

    def check(system, module):
        signals = []

        class Listener(Function):
            def forward(self, x, **kwargs):
                signals.append(dict(kwargs))
                return super().forward(x)

        loud = module.ReversibleBlock(
            Listener(WIDTH, 0.0), Listener(WIDTH, 0.0), 5, send_signal=True
        ).double()
        quiet = module.ReversibleBlock(Listener(WIDTH, 0.0), Listener(WIDTH, 0.0)).double()
        loud(example("reformer"))
        quiet(example("reformer"))
        return signals[0]["_depth"] == 5 and signals[2:] == [{}, {}]

    fails_there_holds_here(check, "reformer")
    for default in load("reformer_pytorch.reversible").ReversibleBlock.forward.__defaults__:
        default.clear()  # or other tests would see what was left there


def test_degrees_of_any_shape():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x, **kwargs):
            return {degree: features.tanh() * self.weight for degree, features in x.items()}

    def check(system, module):
        net = sequence("se3", module, Scale)
        x = {"0": torch.randn(2, 5, 1), "1": torch.randn(2, 3, 3), "2": torch.randn(7, 5)}
        x = {degree: features.double().requires_grad_() for degree, features in x.items()}
        run("se3", net, x).backward()
        return all(features.grad is not None for features in x.values())

    fails_there_holds_here(check, "se3")


def test_gradients_here_are_those_of_plain_autograd():
    """The checks above ask whether there are gradients; that they are right is for the parity
    tests, where originals work.
    """
    for system, (ours, _) in SYSTEMS.items():
        net, x = sequence(system, ours), example(system)
        plain = copy.deepcopy(net)
        plain.engine.memory = rg.Keep()
        run(system, plain, x).backward()
        run(system, net, x).backward()
        assert close(grads(net), grads(plain)), system
