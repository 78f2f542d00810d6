"""The ViT of mmpretrain and SlowFast, FrEIA, RevCol: to copy (docs/migrate/other-libraries.md)."""

import torch
from torch import nn

import retrograd as rg


# mmpretrain and SlowFast: both functions of a layer share the draw of stochastic depth.
class Branch(nn.Module):
    def __init__(self, norm, fn):
        super().__init__()
        self.norm, self.fn = norm, fn

    def forward(self, x, keep):
        return self.fn(self.norm(x)) * keep


class ReversibleViT(nn.Module):
    def __init__(self, layers, drop_path):
        super().__init__()
        self.drop_path = drop_path
        updates = []
        for i, (norm1, attention, norm2, mlp) in enumerate(layers):
            route = {"keep": f"keep{i}"}
            updates.append(rg.Update("x1", Branch(norm1, attention), ("x2",), route=route))
            updates.append(rg.Update("x2", Branch(norm2, mlp), ("x1",), route=route))
        self.program = rg.Reversible(updates)

    def masks(self, x):
        shape, share = (len(self.program) // 2, len(x), 1, 1), 1 - self.drop_path * self.training
        masks = torch.bernoulli(torch.full(shape, share, dtype=x.dtype, device=x.device)) / share
        return {f"keep{i}": mask for i, mask in enumerate(masks)}

    def forward(self, x):
        x1, x2 = x.chunk(2, -1)
        streams = self.program({"x1": x1, "x2": x2}, **self.masks(x))
        return torch.cat((streams["x1"], streams["x2"]), -1)


# FrEIA: a block takes `(x,)` and `rev`, and returns `(y,)` and a log-determinant.
class FlowBlock(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        (y,), log_det = self.block((x,))
        return rg.WithAux(y, torch.as_tensor(log_det).to(x).expand(len(x)))

    def inverse(self, y):
        return self.block((y,), rev=True)[0][0]


class Flow(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        parts = [FlowBlock(block) for block in blocks]
        self.program = rg.Reversible(
            rg.Transform("x", part, inverse=part.inverse) for part in parts
        )

    def forward(self, x):
        streams, log_dets = self.program({"x": x})
        return streams["x"], sum(log_dets)


# RevCol: level l of a column is gamma * level l of the last one + F(its neighbours).
class ScaledBy(rg.Coupling):
    returns = ("scale", "out")

    def forward(self, x, scale, out):
        return scale * x + out

    def inverse(self, y, scale, out):
        return (y - out) / scale


class Level(nn.Module):
    def __init__(self, fn, gamma):
        super().__init__()
        self.fn, self.gamma = fn, nn.Parameter(gamma)

    def forward(self, *neighbours):
        out = self.fn(sum(neighbours))
        return self.gamma.expand_as(out), out


def neighbours(level, levels):
    return tuple(f"level{i}" for i in (level - 1, level + 1) if 0 <= i < levels)


def columns(levels_of_each):
    updates = []
    for levels in levels_of_each:
        for i, level in enumerate(levels):
            reads = neighbours(i, len(levels))
            updates.append(rg.Update(f"level{i}", level, reads, coupling=ScaledBy()))
    return rg.Reversible(updates)
