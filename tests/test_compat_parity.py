"""Each of the five systems against the module it imitates, in float64, with and without dropout.

Outputs, gradients of inputs, parameters and context, the random state afterwards, and state-dict
keys, both ways.
"""

import copy
import inspect

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.compat import axial, nuwa, nuwa_video_audio, reformer, se3
from tests.packages import load

WIDTH, DEPTH = 4, 3


class Function(nn.Module):
    """Reads its input, and whatever else it is given: another stream, a context, masks."""

    def __init__(self, width, dropout, axis=-1):
        super().__init__()
        self.axis = axis
        self.net = nn.Sequential(
            nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, width)
        )

    def forward(self, x, other=None, *, context=None, mask=None, context_mask=None):
        y = self.net(x.movedim(self.axis, -1)).movedim(-1, self.axis)
        for extra, its_mask in (
            (other, context_mask),
            (context, None if other is not None else context_mask),
        ):
            if extra is not None:
                extra = extra if its_mask is None else extra * its_mask.unsqueeze(-1)
                y = y + extra.sin().mean()
        return y if mask is None else y * mask.unsqueeze(-1)


class ByDegree(nn.Module):
    """The same for a dict of features, with the degrees mixed."""

    def __init__(self, width, dropout):
        super().__init__()
        self.net = Function(width, dropout)

    def forward(self, x, context=None):
        scalars = self.net(x["0"].movedim(1, -1), context=context).movedim(-1, 1)
        return {"0": scalars, "1": x["1"] * scalars.mean()}


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def pairs(make, depth=DEPTH):
    return [(make(), make()) for _ in range(depth)]


class Reformer:
    ours, theirs, sequence = reformer, "reformer_pytorch.reversible", "ReversibleSequence"
    options = {}

    def build(self, module, dropout):
        return module.ReversibleSequence(pairs(lambda: Function(WIDTH, dropout)), **self.options)

    def inputs(self):
        return [randn(2, 5, 2 * WIDTH)], {"context": randn(2, 3)}


class ReformerLayerDropout(Reformer):
    options = {"layer_dropout": 0.5}


class ReformerShort(Reformer):
    options = {"reverse_thres": 5}


class ReformerToBoth(Reformer):
    def inputs(self):
        args, kwargs = super().inputs()
        return args, {**kwargs, "arg_route": (True, True)}


class Nuwa:
    ours, theirs, sequence = nuwa, "nuwa_pytorch.reversible", "ReversibleSequence"

    def build(self, module, dropout):
        route = {
            "context": [(True, False), (False, False), (True, True)],
            "mask": [(True, True)] * DEPTH,
        }
        return module.ReversibleSequence(pairs(lambda: Function(WIDTH, dropout)), args_route=route)

    def inputs(self):
        kwargs = {
            "context": randn(2, 3),
            "mask": (torch.arange(10) % 3 > 0).view(2, 5),
            "unknown": 1,
        }
        return [randn(2, 5, WIDTH)], kwargs


class Axial:
    ours, theirs, sequence = axial, "axial_attention.reversible", "ReversibleSequence"

    def build(self, module, dropout):
        return module.ReversibleSequence(pairs(lambda: Function(WIDTH, dropout, axis=1)))

    def inputs(self):
        return [randn(2, WIDTH, 3, 3)], {"context": randn(2, 3), "arg_route": (True, False)}


class SE3:
    ours, theirs, sequence = se3, "se3_transformer_pytorch.reversible", "ReversibleSequence"

    def build(self, module, dropout):
        return module.ReversibleSequence(pairs(lambda: ByDegree(WIDTH, dropout)))

    def inputs(self):
        return [{"0": randn(2, WIDTH, 1), "1": randn(2, WIDTH, 3)}], {"context": randn(2, 3)}


class VideoAudio:
    ours, theirs, sequence = (
        nuwa_video_audio,
        "nuwa_pytorch.reversible_video_audio",
        "DualModalityReversibleSequence",
    )
    reverse = True

    def build(self, module, dropout):
        types = [*nuwa_video_audio.BLOCK_TYPES, "inter_modality_cross_attn"]
        return module.DualModalityReversibleSequence(
            [[Function(WIDTH, dropout) for _ in range(4)] for _ in types], types
        )

    def inputs(self):
        masks = {
            "context_mask": torch.ones(2, 3),
            "video_mask": torch.ones(2, 5),
            "audio_mask": torch.ones(2, 7),
        }
        masks = {name: (mask.cumsum(1) < 3).double() for name, mask in masks.items()}
        return [randn(2, 5, WIDTH), randn(2, 7, WIDTH)], {
            "context": randn(2, 3, WIDTH),
            "reverse": self.reverse,
            **masks,
        }


class VideoAudioPlain(VideoAudio):
    reverse = False


CASES = [
    Reformer,
    ReformerLayerDropout,
    ReformerShort,
    ReformerToBoth,
    Nuwa,
    Axial,
    SE3,
    VideoAudio,
    VideoAudioPlain,
]


def tensors(value):
    """The tensors in arguments or outputs, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    values = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else []
    )
    return [tensor for item in values for tensor in tensors(item)]


def step(net, args, kwargs, seed=7):
    """Everything that one training step can be judged by."""
    leaves = [tensor for tensor in tensors([args, kwargs]) if tensor.requires_grad]
    for tensor in [*leaves, *net.parameters()]:
        tensor.grad = None
    torch.manual_seed(seed)
    outputs = tensors(net(*args, **kwargs))
    sum(
        (output * torch.linspace(0.5, 1.5, output.numel()).view_as(output)).sum()
        for output in outputs
    ).backward()
    return {
        "outputs": [output.detach() for output in outputs],
        "inputs": [leaf.grad for leaf in leaves],
        "parameters": [p.grad for p in net.parameters()],
        "random state": [torch.get_rng_state()],
    }


@pytest.fixture(params=CASES, ids=lambda case: case.__name__)
def case(request):
    return request.param()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("seed", [7, 8])
def test_a_step_is_the_originals(case, dropout, seed):
    theirs = case.build(load(case.theirs), dropout).double()
    ours = case.build(case.ours, dropout).double()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    args, kwargs = case.inputs()
    expected, found = step(theirs, args, kwargs, seed), step(ours, args, kwargs, seed)
    for what in expected:
        for then, now in zip(expected[what], found[what], strict=True):
            assert (then is None) == (now is None), (
                what
            )  # a block that was dropped has no gradients in either
            if then is not None:
                torch.testing.assert_close(now, then, rtol=1e-9, atol=1e-9, msg=what)


def test_checkpoints_move_both_ways(case):
    theirs, ours = case.build(load(case.theirs), 0.0), case.build(case.ours, 0.0)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(case.build(case.ours, 0.0).state_dict(), strict=True)
    assert [name for name, _ in ours.named_parameters()] == [
        name for name, _ in theirs.named_parameters()
    ]


@pytest.mark.parametrize(
    "case", [Reformer, Nuwa, Axial, SE3, VideoAudio], ids=lambda case: case.__name__
)
def test_names_and_signatures_are_the_originals(case):
    theirs = load(case.theirs)
    for name, value in vars(theirs).items():
        if (
            inspect.isclass(value)
            and value.__module__ == theirs.__name__
            and not issubclass(value, torch.autograd.Function)
        ):
            ours = getattr(case.ours, name)
            for method in ("__init__", "forward"):
                expected, found = (inspect.signature(getattr(cls, method)) for cls in (value, ours))
                plain = [p.replace(annotation=p.empty) for p in found.parameters.values()]
                assert [str(p) for p in plain] == [str(p) for p in expected.parameters.values()], (
                    name,
                    method,
                )


def test_functions_of_the_seeds():
    router, args = (
        {"a": [(True, False), (False, True)], "b": [(True, True), (False, False)]},
        {"a": 1, "b": 2, "c": 3},
    )
    expected = [({"a": 1, "b": 2}, {"b": 2}), ({}, {"a": 1})]
    assert (
        nuwa.route_args(router, args, 2)
        == load("nuwa_pytorch.reversible").route_args(router, args, 2)
        == expected
    )
    theirs = load("nuwa_pytorch.reversible_video_audio")
    blocks = [
        nuwa_video_audio.ReversibleCrossModalityAttnBlock(
            *[Function(WIDTH, 0.0) for _ in range(4)]
        ).double()
    ]
    originals = [
        theirs.ReversibleCrossModalityAttnBlock(*[Function(WIDTH, 0.0) for _ in range(4)]).double()
    ]
    originals[0].load_state_dict(blocks[0].state_dict(), strict=True)
    x, masks = randn(2, 9, 2 * WIDTH), {"video_mask": None, "audio_mask": None}
    for name in ("reversible_apply", "irreversible_apply"):
        expected = getattr(theirs, name)(x, 4, originals, masks)
        torch.testing.assert_close(getattr(nuwa_video_audio, name)(x, 4, blocks, masks), expected)


@pytest.mark.parametrize("module", [reformer, axial, nuwa])
def test_a_block_alone(module):
    f, g = (Function(WIDTH, 0.0, axis=1 if module is axial else 2).double() for _ in "fg")
    x = randn(2, 2 * WIDTH, 3) if module is axial else randn(2, 3, 2 * WIDTH)
    block, context = module.ReversibleBlock(f, g), randn(2, 3)
    y = block(x, f_args={"context": context}, g_args={"context": 2 * context})
    x1, x2 = x.chunk(2, block.dim)
    y1 = x1 + f(x2, context=context)
    expected = torch.cat((y1, x2 + g(y1, context=2 * context)), block.dim)
    torch.testing.assert_close(y, expected)
    found, wanted = (
        torch.autograd.grad(value.sin().sum(), (x, context)) for value in (y, expected)
    )
    torch.testing.assert_close(found, wanted)


def test_signals_reach_the_functions():
    seen = []

    class Listener(Function):
        def forward(self, x, _reverse=None, _depth=None):
            seen.append((_depth, _reverse))
            return super().forward(x)

    net = reformer.ReversibleSequence(pairs(lambda: Listener(WIDTH, 0.0), 3), send_signal=True)
    net(torch.randn(1, 2, 2 * WIDTH)).sum().backward()
    forward = [(depth, False) for depth in range(3) for _ in "fg"]
    assert seen[:6] == forward
    assert seen[6:] in (
        [(d, True) for d in (1, 1, 0, 0)],
        [(d, True) for d in (2, 1, 1, 0, 0)],
    )  # what of the last block is kept


def test_sequential_sequence():
    blocks = nn.ModuleList(
        [nn.ModuleList([ByDegree(WIDTH, 0.0), ByDegree(WIDTH, 0.0)]) for _ in range(2)]
    )
    x = {"0": torch.randn(2, WIDTH, 1), "1": torch.randn(2, WIDTH, 3)}
    ours, theirs = (
        se3.SequentialSequence(blocks),
        load("se3_transformer_pytorch.reversible").SequentialSequence(blocks),
    )
    assert list(ours.state_dict()) == list(theirs.state_dict())
    found, expected = ours(x, context=torch.ones(1)), theirs(x, context=torch.ones(1))
    assert all(torch.equal(found[degree], expected[degree]) for degree in x)


def test_unknown_block_types_are_named():
    with pytest.raises(
        ValueError, match="unknown layer type left_handed; the types are intra_modality_self_attn, "
    ):
        nuwa_video_audio.DualModalityReversibleSequence([[nn.Identity()] * 4], ["left_handed"])


def test_deterministic_replays_when_asked():
    net = reformer.Deterministic(nn.Dropout(0.5))
    x = torch.ones(64)
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        net(x, set_rng=True)
    first = net(x, record_rng=True)
    after = torch.get_rng_state()
    assert not torch.equal(net(x), first)
    torch.set_rng_state(after)
    assert torch.equal(net(x, set_rng=True), first)
    assert torch.equal(torch.get_rng_state(), after)


def test_copies_and_pickles(case, tmp_path):
    net = case.build(case.ours, 0.0).double()
    args, kwargs = case.inputs()
    expected = step(net, args, kwargs)
    torch.save(net, tmp_path / "net.pt")
    for other in (copy.deepcopy(net), torch.load(tmp_path / "net.pt", weights_only=False)):
        found = step(other, args, kwargs)
        assert all(
            torch.equal(a, b)
            for what in ("outputs", "inputs")
            for a, b in zip(expected[what], found[what])
        )
        assert not set(map(id, other.parameters())) & set(map(id, net.parameters()))


def test_replaced_functions_are_used():
    net = axial.ReversibleSequence(pairs(lambda: Function(WIDTH, 0.0, axis=1)))
    x = torch.randn(1, WIDTH, 2, 2)
    before = net(x)
    net.blocks[1].f = rg.compat.axial.Deterministic(Function(WIDTH, 0.0, axis=1))
    assert not torch.equal(net(x), before)


def test_no_blocks_at_all():
    x = torch.randn(1, 2, 2 * WIDTH)
    assert torch.equal(reformer.ReversibleSequence([])(x), x)
    assert torch.equal(axial.ReversibleSequence([])(x), x)
