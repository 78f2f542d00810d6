"""What users would pick instead: checkpointing in all its ways, on two networks.

The networks have the same functions, attention f and feed-forward g:

- pairs: `x1 = x1 + f(x2)`, `x2 = x2 + g(x1)`, where x1 and x2 are the halves of the input
- ordinary: `x = x + f(x)`, `x = x + g(x)`

A contestant is named by its line and its point, "line, point": the points of a line differ in what
they store. `host` stands for the memory of a host, beside that of a device. On a CPU nothing leaves
the device, so what would leave it is copied to where no torch tensor is counted, and back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import retrograd as rg
from benchmarks.cases import CONTESTANTS, Pairs, PlainBlock

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
ATTENTION = {aten._scaled_dot_product_flash_attention_for_cpu.default}

Build = Callable[[Pairs], nn.Module]
Run = Callable[[nn.Module, Tensor], Tensor]  # runs a part of a network


class OrdinaryBlock(nn.Module):
    """Two residual layers."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.g = g

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        return x + self.g(x)


class InTurn(nn.Module):
    """Blocks one after the other, `together` of them at a time. `run` runs every `every`-th of
    these units; the others run as they are.
    """

    def __init__(
        self, blocks: list[nn.Module], run: Run, together: int = 1, every: int = 1
    ) -> None:
        super().__init__()
        starts = range(0, len(blocks), together)
        self.units = nn.ModuleList(
            nn.Sequential(*blocks[start : start + together]) for start in starts
        )
        self.run = run
        self.every = every

    def forward(self, x: Tensor) -> Tensor:
        for i, unit in enumerate(self.units):
            x = unit(x) if i % self.every else self.run(unit, x)
        return x


# --- torch.utils.checkpoint


def again(unit: nn.Module, x: Tensor, **options: Any) -> Tensor:
    return checkpoint(unit, x, use_reentrant=False, **options)


# --- selective checkpointing: a policy says which operations are saved

Policy = Callable[..., CheckpointPolicy]


def selective(policy: Callable[[], Policy]) -> Run:
    contexts = lambda: create_selective_checkpoint_contexts(policy())  # noqa: E731
    return functools.partial(again, context_fn=contexts)


def save_if(is_saved: Callable[..., bool]) -> Callable[[], Policy]:
    """Makes the policy that saves what operations return for which `is_saved(operation, args)`."""

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if is_saved(operation, args):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: policy


def is_product(operation: Any, args: Any) -> bool:
    return operation in PRODUCTS


def is_widening(operation: Any, args: Any) -> bool:
    """Whether the result of a matrix product is wider than its input."""
    return operation in PRODUCTS and args[-1].shape[1] > args[-1].shape[0]


def is_attention(operation: Any, args: Any) -> bool:
    return operation in ATTENTION


def every_second_product() -> Policy:
    """torchtitan's policy: save attention and every second matrix product."""
    counts = {False: 0, True: 0}  # of products, in forward and in recompute

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = operation in ATTENTION
        if operation in PRODUCTS:
            counts[context.is_recompute] += 1
            is_saved = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


POLICIES: dict[str, Callable[[], Policy]] = {
    "attention": save_if(is_attention),
    "products that widen": save_if(is_widening),
    "attention and every second product": every_second_product,
    "all products": save_if(is_product),
    "attention and all products": save_if(lambda *a: is_attention(*a) or is_product(*a)),
}


# --- torch_remat: calls in the source are marked, and what they return is saved

MARKED = {
    "nothing": (),
    "attention": ("f.attend",),
    "products that widen": ("f.qkv", "g.1"),
    "attention and products that widen": ("f.attend", "f.qkv", "g.1"),
    "the last product": ("g.3",),  # it runs again otherwise: nothing ends the recompute early
    "all products": ("f.qkv", "f.out", "g.1", "g.3"),
}


def remat() -> Run:
    import torch_remat  # type: ignore[import-not-found]

    return lambda unit, x: torch_remat.checkpoint()(unit)(x)


def mark(block: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Let `torch_remat` save what these modules or methods of a block return."""
    for name in names:
        owner, _, attribute = name.rpartition(".")
        found = block.get_submodule(owner)
        if isinstance(getattr(found, attribute), nn.Module):
            found, attribute = getattr(found, attribute), "forward"
        setattr(found, attribute, saved_call(getattr(found, attribute), name))
    return block


def saved_call(call: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    import torch_remat  # type: ignore[import-not-found]

    def run(*args: Tensor) -> Tensor:
        result = torch_remat.region(call, name, recompute=False)(*args)
        torch_remat.recompute_needs_tensor(result)
        return result

    return run


# --- offloading: what checkpointing keeps waits on the host


class Offloaded:
    """Checkpointing inside `torch.autograd.graph.save_on_cpu`, as Hugging Face's
    `activation_checkpointing_enable(offload=True)` runs each layer.
    """

    def __init__(self) -> None:
        self.moved = 0  # bytes, out and back

    def __call__(self, unit: nn.Module, x: Tensor) -> Tensor:
        with saved_tensors_hooks(self.out, self.back):
            return again(unit, x)

    def out(self, tensor: Tensor) -> Any:
        self.moved += tensor.nbytes
        return tensor.detach().numpy().copy()

    def back(self, host: Any) -> Tensor:
        tensor = torch.from_numpy(host).clone()
        self.moved += tensor.nbytes
        return tensor


# --- the contestants


class Network(NamedTuple):
    name: str
    streams: int  # how many times as wide as its functions the input is
    contestants: dict[str, Build]


def rivals_of(block: Callable[[nn.Module, nn.Module], nn.Module]) -> dict[str, Build]:
    """Every way to run such blocks, by name."""

    def build(run: Callable[[], Run], marks: tuple[str, ...] = (), **options: int) -> Build:
        return lambda pairs: InTurn([mark(block(*pair), marks) for pair in pairs], run(), **options)

    found = {f"checkpoint, {n} blocks together": build(lambda: again, together=n) for n in (2, 4)}
    found["checkpoint, every second block"] = build(lambda: again, every=2)
    for name, policy in POLICIES.items():
        found[f"selective, {name}"] = build(functools.partial(selective, policy))
    for name, marks in MARKED.items():
        found[f"torch_remat, {name}"] = build(remat, marks)
    for n, which in ((1, "every block"), (2, "every second block")):
        found[f"offloaded, {which}"] = build(Offloaded, every=n)
    return found


SHARES = ("3%", "5%", "8%", "12.5%", "16%", "25%", "37.5%", "50%", "75%")
RULES: dict[str, Any] = {
    "Midpoint()": {"rule": rg.Midpoint()},
    "Leapfrog()": {"rule": rg.Leapfrog()},
    "Blend(1/4)": {"rule": rg.Blend(1 / 4), "exact": True},
}


def residual(**options: Any) -> Build:
    return lambda pairs: rg.Residual([fn for pair in pairs for fn in pair], **options)


def stack(memory: Any) -> Build:
    return lambda pairs: rg.ReversibleSequence(pairs, streams=rg.Split(), memory=memory)


def plainly(unit: nn.Module, x: Tensor) -> Tensor:
    return unit(x)


def ordinary(run: Run) -> Build:
    return lambda pairs: InTurn([OrdinaryBlock(*pair) for pair in pairs], run)


PAIRS = Network(
    "pairs",
    2,
    {
        **CONTESTANTS,
        **{f"retrograd, {share}": stack(rg.Budget(share)) for share in SHARES},
        **rivals_of(PlainBlock),
    },
)
ORDINARY = Network(
    "ordinary",
    1,
    {
        "plain": ordinary(plainly),
        "checkpoint": ordinary(again),
        "retrograd": residual(),
        **{f"retrograd, {share}": residual(memory=rg.Budget(share)) for share in SHARES},
        **{f"rules, {name}": residual(**options) for name, options in RULES.items()},
        **rivals_of(OrdinaryBlock),
    },
)
NETWORKS = {network.name: network for network in (PAIRS, ORDINARY)}
