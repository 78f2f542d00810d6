"""What a memory mode keeps is what forward had, whatever functions write afterwards."""

import pytest
import torch
from torch import nn

import retrograd as rg
from tests import zoo

WIDTH = 64


class DropInPlace(nn.Module):
    """Edits what a product returned. Nothing is edited while it is measured: p starts at 0."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.0, inplace=True)
        self.b = nn.Linear(2 * WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.c(nn.functional.gelu(self.b(self.dropout(self.a(x)).sin())))

    def change(self):
        self.dropout.p = 0.2


class ScaleView(DropInPlace):
    """Edits a part of what a product returned, through a view."""

    factor = 1.0

    def forward(self, x):
        h = self.a(x)
        if self.factor != 1:
            h[..., :WIDTH].mul_(self.factor)
        return self.c(nn.functional.gelu(self.b(h.sin())))

    def change(self):
        self.factor = 2.0


class AddOut(DropInPlace):
    """Writes into what a product returned, by `out=`."""

    factor = 1.0

    def forward(self, x):
        h = self.b(self.a(x).sin())
        if self.factor != 1:
            with torch.no_grad():
                torch.mul(h.detach(), self.factor, out=h.detach())
        return self.c(h.sin())

    def change(self):
        self.factor = 2.0


def gradients(kind, memory):
    torch.manual_seed(0)
    stack = rg.ReversibleSequence([(kind(), kind()) for _ in range(3)], memory=memory).double()
    x = torch.randn(128, WIDTH, dtype=torch.float64)
    stack(x).square().mean().backward()  # a budget measures this step
    for block in stack.blocks:
        block.f.change()
        block.g.change()
    torch.manual_seed(1)
    return torch.autograd.grad(stack(x).square().mean(), list(stack.parameters()))


@pytest.mark.parametrize("kind", [DropInPlace, ScaleView, AddOut])
@pytest.mark.parametrize("limit", ["50%", "70%", "90%"])
def test_products_that_are_edited_after_they_are_kept(kind, limit):
    expected = gradients(kind, rg.Keep())
    assert zoo.worst(list(gradients(kind, rg.Budget(limit))), list(expected)) < 1e-9


class Average(nn.Module):
    """Returns a view of a tensor that it edits in each call."""

    def __init__(self, home, rate):
        super().__init__()
        self.rate = rate
        mean = torch.zeros(WIDTH, dtype=torch.float64)
        if home == "buffer":
            self.register_buffer("mean", mean)
        elif home == "parameter":
            self.mean = nn.Parameter(mean, requires_grad=False)
        else:
            self.mean = mean

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), self.rate)
        return self.mean.expand_as(x)


@pytest.mark.parametrize("home", ["buffer", "parameter", "attribute"])
@pytest.mark.parametrize("rate", [0.01, 0.5])
@pytest.mark.parametrize("memory", [rg.Reverse(keep_last=False), rg.Budget("70%")], ids=repr)
def test_outputs_that_are_views_of_state(home, rate, memory):
    results = []
    for mode in (rg.Keep(), memory):
        torch.manual_seed(0)
        average = Average(home, rate)
        mlp = lambda: nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, WIDTH))  # noqa: E731
        stack = rg.ReversibleSequence([(average, mlp()) for _ in range(4)], memory=mode).double()
        x = torch.randn(512, WIDTH, dtype=torch.float64)
        stack(x)
        parameters = [p for p in stack.parameters() if p.requires_grad]
        results.append([*torch.autograd.grad(stack(x).square().mean(), parameters), average.mean])
    assert zoo.worst(results[1], results[0]) < 1e-9
