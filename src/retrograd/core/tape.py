"""The walk back: what is dropped in forward, and how backward gets it again.

Forward runs as ordinary PyTorch code and builds the real autograd graph. But while a function runs,
`torch.autograd.graph.saved_tensors_hooks` put a number into the graph where autograd would have put a tensor. When backward
first asks for one of update i's numbers, the streams after update i are at hand, and the tape takes one step back:

    out    = fn(*reads)                        run again; this time, what autograd saves is collected
    target = coupling.inverse(target, out)     now the streams are those before update i

Autograd runs its nodes newest first, so it asks for update i only when it is done with every update after i. Where that
does not hold (several devices, `backward(inputs=...)`, a second backward) the tape begins again from its *anchor*, a state
that it kept. The values are the same; only the walk is longer.

A tape belongs to one forward call and is held by the graph of that call alone. Nothing it holds refers to that graph, so
dropping the output frees everything at once, without the garbage collector.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from retrograd.core.errors import CouplingError, InPlaceError, RecomputeError, RetrogradError, explain
from retrograd.core.memory import Plan, is_spare
from retrograd.core.program import Parts, Run, Step, call
from retrograd.core.replay import Modes, World, replay
from retrograd.core.streams import Leaves, describe, flatten, unflatten
from retrograd.core.updates import TRUSTED

Meta = tuple[torch.Size, torch.dtype]


class Record:
    """What the tape remembers of one update: enough to run it again the same way, and to see whether it did."""

    __slots__ = ("by_fn", "grads", "kept", "saved", "step", "world")

    def __init__(self, step: Step, world: World, grads: dict[str, list[bool]]) -> None:
        self.step = step
        self.world = world
        self.grads = grads  # [Note: why reads keep requires_grad]
        self.saved: list[Meta] = []  # shape and dtype of each tensor that autograd saved
        self.by_fn = 0  # how many of them the function saved; the coupling saved the rest
        self.kept: Parts | None = None  # set where the function cannot run again: see World.settle


class Frame:
    """The hooks of one evaluation. In forward the graph holds it; as long as it lives, backward may still ask."""

    __slots__ = ("__weakref__", "index", "saved", "tape")

    def __init__(self, tape: Tape | None, index: int) -> None:
        self.tape = tape
        self.index = index
        self.saved: list[tuple[Tensor, int]] | None = []

    def pack(self, tensor: Tensor) -> int:
        assert self.saved is not None
        self.saved.append((tensor, tensor._version))
        return len(self.saved) - 1

    def unpack(self, slot: int) -> Tensor:
        if self.saved is not None:  # the function is still running: it calls autograd.grad itself
            return self.saved[slot][0]
        assert self.tape is not None
        return self.tape.fetch(self.index, slot)

    def close(self) -> list[tuple[Tensor, int]]:
        """Let go of the tensors. They refer to the graph, and the graph to this frame."""
        saved, self.saved = self.saved or [], None
        return saved


class Tape(Run):
    """A `Run` that autograd can walk back."""

    def __init__(self, streams: dict[str, Any], keywords: dict[str, Any], total: int, plan: Plan) -> None:
        super().__init__(streams, keywords, total)
        self.plan = plan
        self.records: list[Record] = []
        self.frames: list[weakref.ref[Frame]] = []
        self.frame: Frame | None = None  # of the update that runs
        self.coupled: tuple[int, Parts] | None = None
        self.tried: set[int] = set()  # couplings that were tried on this call's data
        self.sample: list[int] = []  # bytes saved by each update of plan.sample
        self.sealed = False  # from here on updates are kept: plain autograd
        leaves, self.keyword_spec = flatten(keywords)
        self.modes = Modes((leaf for values in self.state.values() for leaf in values), leaves)
        # Tensors in keyword arguments are kept the way autograd keeps them; whatever else is there, by reference.
        self.keyword_leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.keyword_slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.keyword_vault = Vault([leaves[i] for i in self.keyword_slots]) if self.keyword_slots else None
        # --- the walk. `walked` is the state before update `at`; `store` is what update `at` saved.
        self.lock = threading.RLock()
        self.anchor: tuple[int, Vault | dict[str, Leaves]] | None = None
        self.at: int | None = None
        self.walked: dict[str, Leaves] = {}
        self.store: list[tuple[Tensor, int] | None] | None = None
        self.asked_again = False
        self.newest = -1  # no frame after this one is alive

    # --- forward

    def enter(self, state: dict[str, Leaves]) -> None:
        for name, leaves in state.items():
            for before, after in zip(self.state[name], leaves):
                if after is before or (after.dtype == before.dtype and after.data_ptr() == before.data_ptr()):
                    continue
                raise RetrogradError(
                    explain(
                        f"before update {self.index} of {self.total},",
                        f"a hook on the block replaced stream {name!r}: {describe(before)} became {describe(after)}.",
                        "what happens to a stream outside its updates cannot be undone in backward.",
                        "hook f and g instead; under FSDP2 use MixedPrecisionPolicy(cast_forward_inputs=False), or fully_shard f and g.",
                    )
                )
        super().enter(state)

    def update(self, step: Step) -> None:
        if not self.sealed and (self.index == self.plan.kept or (self.index == self.plan.spare and self.can_spare())):
            self.seal()
        if self.sealed:
            return super().update(step)
        record = Record(
            step,
            World(self.modes, step.fn, step.coupling),
            {name: [leaf.requires_grad for leaf in self.state[name]] for name in (*step.reads, step.target)},
        )
        frame = self.frame = Frame(self, self.index)
        try:
            with saved_tensors_hooks(frame.pack, frame.unpack):
                super().update(step)
            assert self.coupled is not None
            record.by_fn, parts = self.coupled
            if not record.world.settle():
                record.kept = [tuple(out.detach() for out in outs) for outs in parts]
        finally:
            saved, self.frame, self.coupled = frame.close(), None, None
        record.saved = [(tensor.shape, tensor.dtype) for tensor, _ in saved]
        if record.kept is not None:
            frame.saved = [(tensor.detach(), version) for tensor, version in saved]
        if frame.index in self.plan.sample:
            self.sample.append(activation_bytes(saved))
        self.records.append(record)
        self.frames.append(weakref.ref(frame))

    def couple(self, step: Step, parts: Parts) -> Leaves:
        if self.frame is not None:
            assert self.frame.saved is not None
            self.coupled = len(self.frame.saved), parts
        updated = super().couple(step, parts)
        if not isinstance(step.coupling, TRUSTED) and id(step.coupling) not in self.tried:
            self.tried.add(id(step.coupling))
            self.try_coupling(step, parts, updated)
        return updated

    @torch.no_grad()
    def try_coupling(self, step: Step, parts: Parts, updated: Leaves) -> None:
        """A user's own coupling, once a call: does its inverse undo its forward? Otherwise gradients would be wrong."""
        for x, y, out in zip(self.state[step.target], updated, parts):
            if not (x.is_floating_point() or x.is_complex()) or not x.numel():
                continue
            error = (step.coupling.inverse(y.detach(), *(o.detach() for o in out)) - x).abs().max().item()
            scale, limit = max(x.abs().max().item(), 1e-30), torch.finfo(x.dtype).eps ** 0.5
            if not error <= limit * scale:
                name = type(step.coupling).__name__
                raise CouplingError(
                    explain(
                        self.where(step, self.index),
                        f"uses coupling {name}, whose inverse misses the target by {error / scale:.1e} of its size "
                        f"(limit {limit:.1e} for {str(x.dtype).removeprefix('torch.')}).",
                        f"{name}.inverse(y, out) must give back x, where y = {name}.forward(x, out).",
                        "solve forward for x in inverse, and keep factors away from zero (see rg.Affine).",
                    )
                )

    def can_spare(self) -> bool:
        """Whether the last block may be kept without raising the peak: see `memory.Reverse`."""
        needed, to_come = sum(self.sample) - max(self.sample, default=0), 0
        for record in self.records:
            to_come += sum(p.nbytes for p, _ in record.world.parameters if p.requires_grad and p.grad is None)
            if to_come >= needed:
                break
        return is_spare(self.sample, to_come)

    def seal(self) -> None:
        """The end of what is rebuilt: keep the state here, and let whatever follows be plain autograd."""
        self.sealed = True
        if self.records:
            # Each leaf is detached by itself, so that two streams that are one tensor are seen to share it.
            self.anchor = len(self.records), Vault([leaf.detach() for leaves in self.state.values() for leaf in leaves])
        self.newest = len(self.records) - 1

    def finish(self) -> None:
        if not self.sealed:
            self.seal()
        self.layout = {name: len(leaves) for name, leaves in self.state.items()}
        self.state, self.keywords = {}, {}  # the caller's now: the tape must not refer to the graph

    # --- backward

    def fetch(self, index: int, slot: int) -> Tensor:
        """A tensor that update `index` saved. Called by autograd, possibly from several threads."""
        with self.lock:
            if self.at != index or self.store is None or self.store[slot] is None:
                self.walk_to(index)
            assert self.store is not None
            entry = self.store[slot]
            assert entry is not None
            if not self.asked_again:
                self.store[slot] = None  # autograd asks once and is done with it: free it now, not at the end
        tensor, version = entry
        if tensor._version != version:
            raise InPlaceError(
                explain(
                    self.where(self.records[index].step, index),
                    f"edits {describe(tensor)} in place after autograd saved it (version {version}, now {tensor._version}).",
                    "its backward would be computed from the edited value.",
                    "use the out-of-place operation, as plain autograd would also demand.",
                )
            )
        return tensor

    def walk_to(self, index: int) -> None:
        """Make `walked` the state before update `index`, and `store` what it saved."""
        again = self.at == index and self.store is not None  # `ctx.saved_tensors` read twice: stop freeing one by one
        if self.at is None or self.at < index:
            self.begin_again(index)
        assert self.at is not None
        while self.at > index:
            self.step_back()
        if self.store is None or again:
            self.store = self.recompute(index, undo=False)
        self.asked_again = again

    def begin_again(self, index: int) -> None:
        self.store, self.at = None, None
        if self.anchor is None or self.anchor[0] < index:
            raise RetrogradError(
                explain(
                    self.where(self.records[index].step, index),
                    "is asked for after backward has already passed it.",
                    "an earlier backward freed the streams it was rebuilt from, or was interrupted.",
                    "call the first backward with retain_graph=True, or run forward again.",
                )
            )
        at, kept = self.anchor
        if isinstance(kept, Vault):
            leaves = iter(kept.open("a stream that was returned"))
            kept = {name: [next(leaves) for _ in range(count)] for name, count in self.layout.items()}
        self.walked, self.at = dict(kept), at

    def step_back(self) -> None:
        """From the state after an update to the state before it."""
        assert self.at is not None
        self.store = None  # what was not asked for in the update that is now behind us
        # [Note: the anchor] The state before update p serves every update up to p. If a frame from p on is alive, backward may
        # come back to it (retain_graph), so a state up there must be kept. If all are gone, backward has passed them for
        # good, and the walk may overwrite the only state there is.
        while self.newest >= self.at and self.frames[self.newest]() is None:
            self.newest -= 1
        if self.newest < self.at:
            self.anchor = None
        elif self.anchor is None:
            self.anchor = self.at, dict(self.walked)
        self.store = self.recompute(self.at - 1, undo=True)

    def recompute(self, index: int, undo: bool) -> list[tuple[Tensor, int] | None]:
        """Run update `index` again and collect what autograd saves. With `undo`, also take it out of its target."""
        record = self.records[index]
        step, target = record.step, record.step.target
        where = self.where(step, index)
        frame = Frame(None, index)
        try:
            with replay(record.world, where), saved_tensors_hooks(frame.pack, frame.unpack):
                if record.kept is None:
                    reads = [self.unflatten(name, self.leaf_views(record, name)) for name in step.reads]
                    output = call(step, reads, self.open_keywords())
                    self.compare(record, where, frame, record.by_fn)
                    parts, _ = self.parts(step, index, output, self.walked[target])
                    del output, reads
                else:
                    parts = record.kept
                if undo:
                    self.at = None  # an interrupt from here on leaves no half-undone state to go on from
                    self.walked[target] = undone(step, self.walked[target], parts)
                    self.at = index
                if len(record.saved) > record.by_fn and record.kept is None:
                    for x, out in zip(self.leaf_views(record, target), parts):
                        step.coupling.forward(x, *out)
                    self.compare(record, where, frame, len(record.saved))
        finally:
            saved = frame.close()
        return list(saved)

    def leaf_views(self, record: Record, name: str) -> Leaves:
        """A rebuilt stream, as the function gets it.

        [Note: why reads keep requires_grad] Autograd saves only what some gradient needs. With another `requires_grad` than in
        forward it would save other tensors, and their numbers would no longer match those in the graph.

        [Note: why a view] Tools that hook a module's inputs (FlopCounterMode, FSDP) treat leaves differently from other
        tensors. In forward the inputs were not leaves, so here they are views of one.
        """
        views = []
        for tensor, needs_grad in zip(self.walked[name], record.grads[name]):
            leaf = tensor.detach()
            views.append(leaf.requires_grad_().view_as(leaf) if needs_grad else leaf)
        return views

    def unflatten(self, name: str, leaves: Leaves) -> Any:
        return unflatten(leaves, self.specs[name])

    def open_keywords(self) -> dict[str, Any]:
        """The keyword arguments, in fresh containers: a list that the function appends to grows once, in forward."""
        if not self.keyword_leaves:
            return {}
        leaves = list(self.keyword_leaves)
        if self.keyword_vault is not None:
            for slot, tensor in zip(self.keyword_slots, self.keyword_vault.open("a tensor in a keyword argument")):
                leaves[slot] = tensor
        return unflatten(leaves, self.keyword_spec)

    def compare(self, record: Record, where: str, frame: Frame, count: int) -> None:
        """Raise unless the first `count` tensors that forward saved were saved again, and no others."""
        assert frame.saved is not None
        now = [(tensor.shape, tensor.dtype) for tensor, _ in frame.saved]
        then = record.saved[:count]
        if now == then:
            return
        pairs = zip([*then, *[None] * len(now)], [*now, *[None] * len(then)])
        first = next((a, b) for a, b in pairs if a != b)
        a, b = (f"{str(m[1]).removeprefix('torch.')}{list(m[0])}" if m else "nothing" for m in first)
        raise RecomputeError(
            f"{where} saved {len(then)} tensors in forward and {len(now)} in recompute.\n"
            f"  First difference: forward saved {a}, recompute {b}.\n"
            "  Usual causes: a cache that grows on each call, routing that depends on rounding, state outside the module.\n"
            "  Fix: rg.is_recomputing() lets the function leave such state alone; memory=rg.Keep() does not recompute."
        )


class Vault:
    """Tensors kept the way autograd keeps them: an edit in place is noticed, and hooks around us apply.

    So an outer stack drops and rebuilds what an inner one keeps, and `save_on_cpu` moves it. Opened, it gives the tensors.
    """

    __slots__ = ("node",)

    def __init__(self, tensors: list[Tensor]) -> None:
        with torch.enable_grad():
            self.node: Any = _Save.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn

    def open(self, what: str) -> tuple[Tensor, ...]:
        try:
            return self.node.saved_tensors
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise edited_in_place(what) from error


class _Save(torch.autograd.Function):
    """A node that saves its inputs and is never run."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(*tensors)
        return token.new_empty(0)


def edited_in_place(what: str, where: str = "backward") -> InPlaceError:
    return InPlaceError(
        explain(
            where,
            f"needs {what}, and it was edited in place after forward.",
            "activations are rebuilt from it; from the edited value they would come out wrong.",
            "edit a copy: y = y + 1 instead of y += 1, or y.clone() first.",
        )
    )


def undone(step: Step, leaves: Leaves, parts: Parts) -> Leaves:
    with torch.no_grad():
        in_place = getattr(step.coupling, "inverse_", step.coupling.inverse)
        return [(in_place if is_unshared(y) else step.coupling.inverse)(y, *out) for y, out in zip(leaves, parts)]


def is_unshared(tensor: Tensor) -> bool:
    """Whether no other tensor (a view, an alias, one that autograd saved) has the memory of this one.

    `torch._C._storage_Use_Count` is private; a public `UntypedStorage.use_count()` would replace it. It counts this tensor and
    the storage object made to ask.
    """
    return type(tensor) is Tensor and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2


def activation_bytes(saved: list[tuple[Tensor, int]]) -> int:
    """Bytes of distinct memory among saved tensors, parameters aside."""
    distinct = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t, _ in saved if not isinstance(t, torch.nn.Parameter)}
    return sum(distinct.values())
