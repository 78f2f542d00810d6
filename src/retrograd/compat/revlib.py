"""`ReversibleSequential` of revlib: modules that update the two halves of a tensor in turn.

*Same*: name, signature, defaults, state-dict keys (`0-0.wrapped_module.wrapped_module.…`), outputs,
and gradients of additive couplings; arguments of the call go to every module; the halves of the
output change places if the number of modules is odd.

*Differs*:

- Gradients of other couplings are right, too.
- `layerwise_args_kwargs` is used. Every memory mode but `no_savings` rebuilds.
- `split_dim=None`, `target_device` and `fused_optimizer` raise `ValueError`, with what to do.
- A module returns one tensor. What else it returns goes by `rg.WithAux`, after the output.
- These work: an input that needs no gradient, `autograd.grad`, double backward, DDP.
- Buffers are updated once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import retrograd as rg
from retrograd.compat.pairs import Engine, UpdateSpec

CouplingFunction = Callable[[Tensor, Tensor], Tensor]
Arguments = tuple[Sequence[Any], dict[str, Any]]


class MemoryModes(enum.IntEnum):
    no_savings = 0
    checkpoint = 1
    autograd_graph = 2
    autograd_function = 3


@dataclass(frozen=True)
class GivenCoupling(rg.Coupling):
    """A coupling that is two functions."""

    forward: CouplingFunction
    inverse: CouplingFunction


class Holder(nn.Module):
    """Gives its module the name that it has in revlib's checkpoints."""

    def __init__(self, wrapped_module: nn.Module) -> None:
        super().__init__()
        self.wrapped_module = wrapped_module


@dataclass(frozen=True)
class WithPositional:
    """A function of one stream that gets further arguments by place."""

    fn: nn.Module
    count: int

    def __call__(self, x: Tensor, **kwargs: Any) -> Any:
        places = [kwargs.pop(place_name(i)) for i in range(self.count)]
        return self.fn(x, *places, **kwargs)


def place_name(index: int) -> str:
    return f"argument_{index}"


class ReversibleSequential(nn.Sequential):
    def __init__(
        self,
        *modules: nn.Module,
        split_dim: int | None = 1,
        coupling_forward: Sequence[CouplingFunction | None] | None = None,
        coupling_inverse: Sequence[CouplingFunction | None] | None = None,
        memory_mode: MemoryModes = MemoryModes.autograd_function,
        target_device: str = "",
        fused_optimizer: Any = None,
    ) -> None:
        super().__init__()
        if split_dim is None:
            raise ValueError(
                "split_dim=None: revlib cannot join such streams. Use "
                "rg.ReversibleSequence(pairs, streams=rg.Duplicate())."
            )
        if target_device or fused_optimizer is not None:
            raise ValueError(
                "target_device= and fused_optimizer= are not taken: use FSDP2's CPUOffloadPolicy, "
                "and an optimizer inside of backward (docs/tools.md)."
            )
        for index, module in enumerate(modules):
            self.add_module(f"{index // 2}-{index % 2}", Holder(Holder(module)))
        self.split_dim = split_dim
        couplings = zip(coupling_forward or [None], coupling_inverse or [None])
        self.couplings = [
            rg.Additive() if forward is None or inverse is None else GivenCoupling(forward, inverse)
            for forward, inverse in couplings
        ]
        self.engine = Engine(rg.Keep() if memory_mode == 0 else rg.Reverse())

    def forward(  # type: ignore[override]
        self,
        inp: Tensor,
        *args: Any,
        layerwise_args_kwargs: Sequence[Arguments] | None = None,
        **kwargs: Any,
    ) -> Any:
        own = layerwise_args_kwargs or [((), {})] * len(self)
        updates, given = [], {}
        for index, (holder, (more, named)) in enumerate(zip(self, own)):
            values = {place_name(i): value for i, value in enumerate((*args, *more))}
            fn: Any = holder.get_submodule("wrapped_module.wrapped_module")
            fn = WithPositional(fn, len(values)) if values else fn
            values |= {**kwargs, **named}
            names = {name: f"{name}_{index}" for name in values}
            given |= {names[name]: value for name, value in values.items()}
            target, read = ("x1", "x2") if index % 2 == 0 else ("x2", "x1")
            coupling = self.couplings[index % len(self.couplings)]
            updates.append(UpdateSpec(target, fn, (read,), names, coupling))
        halves = rg.Split(self.split_dim)
        x1, x2 = halves.split(inp)
        result: Any = self.engine(updates, {"x1": x1, "x2": x2}, given)
        streams, aux = result if isinstance(result, tuple) else (result, None)
        ends = ("x1", "x2") if len(self) % 2 == 0 else ("x2", "x1")
        output = halves.join(*(streams[name] for name in ends))
        return output if aux is None else (output, aux)
