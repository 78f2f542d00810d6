"""Promise 8: tensors in keyword arguments get gradients, and their producer's backward runs once;
routing is explicit.
"""

import pytest
import torch
from torch import nn

import retrograd as rg
from tests import zoo


class Nested(nn.Module):
    """Takes a nested structure, None and an arbitrary object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, memory, mask=None, flag=None):
        assert flag.name == "flag"
        y = self.linear(x) * memory["keys"][0] + memory["values"]
        return y if mask is None else y.masked_fill(mask, 0.0)


class Flag:
    name = "flag"


@pytest.mark.parametrize("memory", zoo.MEMORY)
@pytest.mark.parametrize("masked", [False, True])
def test_nested_tensors_none_masks_and_objects(memory, masked):
    stack = rg.ReversibleSequence(
        [(Nested(), Nested()) for _ in range(3)], memory=zoo.MEMORY[memory]
    ).double()
    x, keys, values = (torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    kwargs = {
        "memory": {"keys": [keys], "values": values},
        "mask": torch.rand(2, 4) > 0.5 if masked else None,
        "flag": Flag(),
    }
    got = zoo.gradients(stack, stack(x, **kwargs), x, keys, values)
    assert (
        zoo.worst(got, zoo.gradients(stack, zoo.plain_stack(stack, x, **kwargs), x, keys, values))
        < 1e-9
    )


@pytest.mark.parametrize("route", ["f", "g", "fg"])
@pytest.mark.parametrize("memory", zoo.MEMORY)
def test_the_producer_of_a_context_is_walked_back_once(route, memory):
    """A decoder of depth 24 whose encoder's backward runs once, not 24 times; also when only g gets
    the context.
    """
    stack = rg.ReversibleSequence(
        [(zoo.Mix(4), zoo.Mix(4)) for _ in range(24)],
        memory=zoo.MEMORY[memory],
        route={"context": route},
    ).double()
    encoder = nn.Linear(3, 3).double()
    runs = []
    encoder.register_full_backward_hook(lambda *_: runs.append(1))
    x = torch.randn(2, 4, dtype=torch.float64)
    context = encoder(torch.randn(2, 3, dtype=torch.float64, requires_grad=True))
    zoo.loss(stack(x, context=context)).backward()
    assert runs == [1]
    assert encoder.weight.grad.abs().max() > 0


def seen_by(stack, **kwargs):
    """Which function got which arguments, in order."""
    log = []

    def spy(module, args, given):
        log.append(sorted(given))

    handles = [
        fn.register_forward_pre_hook(spy, with_kwargs=True)
        for b in stack.blocks
        for fn in (b.f, b.g)
    ]
    stack(torch.zeros(1, 4), **kwargs)
    for handle in handles:
        handle.remove()
    return log


class Takes(nn.Module):
    def __init__(self, *names, everything=False):
        super().__init__()
        self.everything = everything

    def forward(self, x, mask=None):
        return x


class TakesAll(nn.Module):
    def forward(self, x, **kwargs):
        return x


def test_by_signature():
    stack = rg.ReversibleSequence([(Takes(), nn.Identity()), (TakesAll(), Takes())])
    assert seen_by(stack, mask=1) == [["mask"], [], ["mask"], ["mask"]]
    assert seen_by(stack, other=1) == [[], [], ["other"], []]


def test_a_route_overrules_the_signature():
    blocks = [(TakesAll(), TakesAll()), (TakesAll(), TakesAll())]
    assert (
        seen_by(rg.ReversibleSequence(blocks, route={"a": "g", "b": "fg"}), a=1, b=1)
        == [["b"], ["a", "b"]] * 2
    )
    assert seen_by(rg.ReversibleSequence(blocks, route={"a": ""}), a=1, b=2) == [["b"]] * 4
    per_block = rg.ReversibleSequence(blocks, route=[{"a": "f"}, {"a": "g"}])
    assert seen_by(per_block, a=1) == [["a"], [], [], ["a"]]
    per_key = rg.ReversibleSequence(blocks, route={"a": ["f", "fg"]})
    assert seen_by(per_key, a=1) == [["a"], [], ["a"], ["a"]]


def test_an_argument_that_nothing_accepts_is_named():
    stack = rg.ReversibleSequence([(Takes(), nn.Identity())])
    with pytest.raises(
        TypeError, match="none of the functions accepts: 'msak'. They accept 'mask'"
    ):
        stack(torch.zeros(1, 4), msak=1)
    with pytest.raises(TypeError, match="accepts: 'x'"):  # the stream itself is not a keyword
        rg.ReversibleSequence([(Takes(), Takes())]).forward(torch.zeros(1, 4), x=1)
    net = rg.Reversible([rg.Update("a", Takes(), ("b",))])
    with pytest.raises(TypeError, match="accepts: 'other'"):
        net({"a": torch.zeros(1), "b": torch.zeros(1)}, other=2)


@pytest.mark.parametrize(
    ("route", "message"),
    [
        ({"a": "h"}, "route\\['a'\\] is 'h'"),
        ([{"a": "f"}], "1 entries for 2 blocks"),
        ({"a": ["f"]}, "1 entries for 2 blocks"),
    ],
)
def test_a_wrong_route_is_refused(route, message):
    with pytest.raises(ValueError, match=message):
        rg.ReversibleSequence([(TakesAll(), TakesAll())] * 2, route=route)


def test_an_update_may_rename_its_arguments():
    """As the fifth seed does: one mask for each modality, called `mask` by every function."""

    class Masked(nn.Module):
        def forward(self, x, mask=None, extra=None):
            assert extra is None
            return x * mask

    net = rg.Reversible(
        [
            rg.Update("v", Masked(), ("a",), route={"mask": "video_mask"}),
            rg.Update("a", Masked(), ("v",), route={"mask": "audio_mask"}),
            rg.Update("v", Masked(), ("a",), route=("mask",)),
        ]
    )
    one = torch.ones(2)
    result = net({"v": one, "a": one}, video_mask=2.0, audio_mask=3.0, mask=5.0)
    assert result["a"].tolist() == [1 + 3 * 3.0] * 2
    assert result["v"].tolist() == [3 + 5 * 10.0] * 2


def test_a_list_that_a_function_appends_to_grows_once():
    class Caching(nn.Linear):
        def forward(self, x, cache):
            cache.append(x.detach())
            return super().forward(x)

    stack = rg.ReversibleSequence([(Caching(4, 4), Caching(4, 4)) for _ in range(3)])
    cache = []
    stack(torch.randn(2, 4), cache=cache).sum().backward()
    assert len(cache) == 6


def test_an_edit_of_a_keyword_tensor_before_backward_raises():
    stack, x = zoo.Case("additive", "mean", "tensor", "reverse").build()
    context = torch.randn(3, dtype=torch.float64)
    y = stack(x, context=context)
    context.add_(1)
    with pytest.raises(
        rg.InPlaceError, match=r"(?s)a tensor in a keyword argument.*edited in place"
    ):
        zoo.loss(y).backward()
