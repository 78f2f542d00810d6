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

import functools
import operator
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from retrograd.core.errors import CouplingError, InPlaceError, RecomputeError, RetrogradError, explain
from retrograd.core.memory import Plan, is_spare
from retrograd.core.program import Parts, Run, Step, call, couple
from retrograd.core.replay import Buffers, Replay, Scene, changed_buffers
from retrograd.core.streams import Leaves, describe, flatten, unflatten
from retrograd.core.updates import TRUSTED

Meta = tuple[torch.Size, torch.dtype]
meta = operator.attrgetter("shape", "dtype")


class Record:
    """What the tape remembers of one update: enough to run it again the same way, and to see whether it did."""

    __slots__ = ("buffers", "by_fn", "grads", "kept", "random", "saved")

    grads: list[bool]  # of the target's leaves and then of each read's: [Note: why reads keep requires_grad]
    random: list[bytes] | None  # random states before it ran, if it drew
    buffers: Buffers  # those it changed
    saved: list[Meta]  # shape and dtype of each tensor that autograd saved
    by_fn: int  # how many of them the function saved; the coupling saved the rest
    kept: Parts | None  # its output, where it cannot run again: see [Note: constant buffers]


class Frame:
    """The hooks of one update in forward. The graph holds it; as long as it lives, backward may still ask."""

    __slots__ = ("__weakref__", "index", "store", "tape", "versions")

    def __init__(self, tape: Tape, index: int) -> None:
        self.tape = tape
        self.index = index
        self.store: list[Tensor | None] | None = []  # what autograd saved: while the function runs, and again in backward
        self.versions: list[int] | None = None  # set in backward

    def pack(self, tensor: Tensor) -> int:
        self.store.append(tensor)  # type: ignore[union-attr]
        return len(self.store) - 1  # type: ignore[arg-type]

    def unpack(self, slot: int) -> Tensor:
        store = self.store
        tensor = store[slot] if store is not None else None
        if tensor is None:
            store = self.tape.refill(self, slot)
            tensor = store[slot]
        assert tensor is not None and store is not None
        if self.versions is None:  # the function is still running, and calls autograd.grad itself
            return tensor
        if tensor._version != self.versions[slot]:
            raise self.tape.edited_after_save(self.index, tensor, self.versions[slot])
        if not self.tape.asked_again:
            store[slot] = None  # autograd asks once and is done with it: free it now, not at the end
        return tensor


class Recount:
    """The hooks of a recompute. Remembers the version of each tensor too, as autograd does for what it saves itself."""

    __slots__ = ("store", "versions")

    def __init__(self) -> None:
        self.store: list[Tensor] | None = []
        self.versions: list[int] = []

    def pack(self, tensor: Tensor) -> int:
        self.versions.append(tensor._version)
        self.store.append(tensor)  # type: ignore[union-attr]
        return len(self.versions) - 1

    def unpack(self, slot: int) -> Tensor:
        assert self.store is not None
        return self.store[slot]


class Tape(Run):
    """A `Run` that autograd can walk back."""

    def __init__(self, streams: dict[str, Any], keywords: dict[str, Any], program: Sequence[Step], plan: Plan) -> None:
        super().__init__(streams, keywords, program)
        self.plan = plan
        self.records: list[Record] = []
        self.frames: list[weakref.ref[Frame]] = []
        self.untried = {id(step.coupling) for step in program if not isinstance(step.coupling, TRUSTED)}
        self.sample: list[int] = []  # bytes saved by each update of plan.sample
        self.sealed = False  # from here on updates are kept: plain autograd
        leaves, self.keyword_spec = flatten(keywords)
        # Tensors in keyword arguments are kept the way autograd keeps them; whatever else is there, by reference.
        self.keyword_leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.keyword_slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.keyword_vault = Vault([leaves[i] for i in self.keyword_slots]) if self.keyword_slots else None
        tensors = (leaf for values in self.state.values() for leaf in values)
        self.scene = Scene(tensors, leaves, ((step.fn, step.coupling) for step in program))
        self.sample_at = plan.sample
        # --- the walk. `walked` is the state before update `at`, whose frame has what it saved, if backward asked for it.
        self.lock = threading.RLock()
        self.anchor: tuple[int, Vault | dict[str, Leaves]] | None = None
        self.at: int | None = None
        self.walked: dict[str, Leaves] = {}
        self.opened: list[Any] | None = None  # the leaves of the keyword arguments
        self.asked_again = False
        self.newest = -1  # no frame after this one is alive

    # --- forward

    def enter(self, state: dict[str, Leaves]) -> None:
        if state is not self.state:
            for name, leaves in state.items():
                for before, after in zip(self.state[name], leaves):
                    if after is not before and (after.dtype != before.dtype or after.data_ptr() != before.data_ptr()):
                        raise self.replaced_stream(name, before, after)
        super().enter(state)

    def replaced_stream(self, name: str, before: Tensor, after: Tensor) -> RetrogradError:
        return RetrogradError(
            explain(
                f"before update {self.index} of {len(self.program)},",
                f"a hook on the block replaced stream {name!r}: {describe(before)} became {describe(after)}.",
                "what happens to a stream outside its updates cannot be undone in backward.",
                "hook f and g instead; under FSDP2 use MixedPrecisionPolicy(cast_forward_inputs=False), or fully_shard f and g.",
            )
        )

    def update(self, step: Step) -> None:
        index, state, plan = self.index, self.state, self.plan
        if not self.sealed and index >= plan.spare and (index == plan.kept or (index == plan.spare and self.can_spare())):
            self.seal()
        if self.sealed:
            return super().update(step)
        record, frame = Record(), Frame(self, index)
        leaves = state[step.target] + [leaf for name in step.reads for leaf in state[name]]
        record.grads = [leaf.requires_grad for leaf in leaves]
        versions = [leaf._version for leaf in leaves]
        seen = self.scene.buffers(index) if self.scene.owners[index] else ()
        self.note_random(record)
        try:
            with saved_tensors_hooks(frame.pack, frame.unpack):
                reads = [unflatten(state[name], self.specs[name]) for name in step.reads]
                parts, aux = self.parts(step, index, call(step, reads, self.keywords), state[step.target])
                record.by_fn = len(frame.store)  # type: ignore[arg-type]
                updated = couple(step, state[step.target], parts)
        finally:
            saved: list[Tensor] = frame.store  # type: ignore[assignment]
            frame.store = None  # they refer to the graph, and the graph to this frame
        if versions != [leaf._version for leaf in leaves]:
            raise self.edited_input(step, leaves, versions)
        if self.untried and id(step.coupling) in self.untried:
            self.untried.remove(id(step.coupling))
            self.try_coupling(step, parts, updated)
        record.saved = list(map(meta, saved))
        record.buffers, replayable = changed_buffers(seen) if seen else ([], True)
        record.kept = None
        if not replayable:
            record.kept = [tuple(out.detach() for out in outs) for outs in parts]
            frame.store = [tensor.detach() for tensor in saved]
        if index in self.sample_at:
            self.sample.append(activation_bytes(saved))
        self.records.append(record)
        self.frames.append(weakref.ref(frame))
        if self.scene.steps_in_backward[index]:
            for node in {leaf.grad_fn for leaf in updated if leaf.grad_fn is not None}:
                node.register_prehook(functools.partial(self.reach, index))
        state[step.target] = updated
        self.aux += aux
        self.index += 1

    def note_random(self, record: Record | None) -> None:
        """Take the random states, and forget those before the last update if it did not draw: they cost 5 kB on a CPU."""
        now = self.scene.random_states()
        if self.records:
            last = self.records[-1]
            if last.random == now:
                last.random = None
        if record is not None:
            record.random = now

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
                        self.where(self.index),
                        f"uses coupling {name}, whose inverse misses the target by {error / scale:.1e} of its size "
                        f"(limit {limit:.1e} for {str(x.dtype).removeprefix('torch.')}).",
                        f"{name}.inverse(y, out) must give back x, where y = {name}.forward(x, out).",
                        "solve forward for x in inverse, and keep factors away from zero (see rg.Affine).",
                    )
                )

    def can_spare(self) -> bool:
        """Whether the last block may be kept without raising the peak: see `memory.Reverse`."""
        needed, to_come = sum(self.sample) - max(self.sample, default=0), 0
        for parameters in self.scene.parameters:
            to_come += sum(p.nbytes for p in parameters if p.requires_grad and p.grad is None)
            if to_come >= needed:
                break
        return is_spare(self.sample, to_come)

    def seal(self) -> None:
        """The end of what is rebuilt: keep the state here, and let whatever follows be plain autograd."""
        self.sealed = True
        self.note_random(None)
        if self.records:
            self.anchor = len(self.records), Vault([leaf for leaves in aliases(self.state).values() for leaf in leaves])
        self.newest = len(self.records) - 1

    def finish(self) -> None:
        if not self.sealed:
            self.seal()
        self.layout = {name: len(leaves) for name, leaves in self.state.items()}

    def let_go(self) -> None:
        """The streams are the caller's now. They refer to the graph, and the graph to this tape."""
        self.state, self.keywords = {}, {}

    # --- backward

    def refill(self, frame: Frame, slot: int) -> list[Tensor | None]:
        """Make an update's saved tensors again. Called by autograd, possibly from several threads."""
        index = frame.index
        with self.lock:
            if frame.store is not None and frame.store[slot] is not None:
                return frame.store  # another thread was faster
            # `ctx.saved_tensors` read twice: run the update once more, and this time free nothing before it is over.
            self.asked_again = self.at == index and frame.store is not None
            self.reach(index)
            if frame.store is None or self.asked_again:  # the walk began at this very update, or was there already
                self.recompute(index, undo=False)
            assert frame.store is not None
            return frame.store

    def reach(self, index: int, _: object = None) -> None:
        """Walk back until update `index` is undone.

        [Note: an optimizer inside backward] Usually the walk waits until a saved tensor is asked for. But a function that ends in
        `+ bias` has the bias's gradient before that, and a hook may already step the bias that the recompute needs. So for
        functions with such hooks, this is called when backward arrives at their output.
        """
        with self.lock:
            if self.at is None or self.at < index:
                self.begin_again(index)
            assert self.at is not None
            while self.at > index:
                self.step_back()

    def edited_after_save(self, index: int, tensor: Tensor, version: int) -> InPlaceError:
        return InPlaceError(
            explain(
                self.where(index),
                f"edits {describe(tensor)} in place after autograd saved it (version {version}, now {tensor._version}).",
                "its backward would be computed from the edited value.",
                "use the out-of-place operation, as plain autograd would also demand.",
            )
        )

    def begin_again(self, index: int) -> None:
        self.leave()
        self.at = None
        if self.anchor is None or self.anchor[0] < index:
            raise RetrogradError(
                explain(
                    self.where(index),
                    "is asked for after backward has already passed it.",
                    "an earlier backward freed the streams it was rebuilt from, or was interrupted.",
                    "call the first backward with retain_graph=True, or run forward again.",
                )
            )
        at, kept = self.anchor
        if isinstance(kept, Vault):
            leaves = iter(kept.open("a stream that was returned"))
            kept = {name: [next(leaves) for _ in range(count)] for name, count in self.layout.items()}
        self.walked, self.at, self.opened = aliases(kept), at, None

    def step_back(self) -> None:
        """From the state after an update to the state before it."""
        assert self.at is not None
        self.leave()
        # [Note: the anchor] The state before update p serves every update up to p. If a frame from p on is alive, backward may
        # come back to it (retain_graph), so a state up there must be kept. If all are gone, backward has passed them for
        # good, and the walk may overwrite the only state there is.
        while self.newest >= self.at and self.frames[self.newest]() is None:
            self.newest -= 1
        if self.newest < self.at:
            self.anchor = None
        elif self.anchor is None:
            self.anchor = self.at, aliases(self.walked)
        self.recompute(self.at - 1, undo=True)

    def leave(self) -> None:
        """Drop what update `at` saved and nobody asked for."""
        frame = self.frames[self.at]() if self.at is not None and self.at < len(self.frames) else None
        if frame is not None and self.records[frame.index].kept is None:
            frame.store = None

    def recompute(self, index: int, undo: bool) -> None:
        """Run update `index` again and give its frame what autograd saves. With `undo`, also take it out of its target."""
        record, step = self.records[index], self.program[index]
        target, needs_grad = step.target, iter(record.grads)
        target_grads = [next(needs_grad) for _ in self.walked[target]]
        recount = Recount()
        try:
            with (
                Replay(self.scene, index, record.random, record.buffers, self.where),
                saved_tensors_hooks(recount.pack, recount.unpack),
            ):
                parts = record.kept
                if parts is None:
                    reads = [unflatten(leaf_views(self.walked[r], needs_grad), self.specs[r]) for r in step.reads]
                    output = call(step, reads, self.open_keywords() if step.keywords else {})
                    self.compare(record.saved[: record.by_fn], index, recount)
                    parts, _ = self.parts(step, index, output, self.walked[target])
                    del output, reads
                if undo:
                    self.at = None  # an interrupt from here on leaves no half-undone state to go on from
                    torch.set_grad_enabled(False)
                    self.walked[target] = undone(step, self.walked[target], parts)
                    torch.set_grad_enabled(True)
                    self.at = index
                if len(record.saved) > record.by_fn and record.kept is None:
                    couple(step, leaf_views(self.walked[target], iter(target_grads)), parts)
                    self.compare(record.saved, index, recount)
        finally:
            saved, recount.store = recount.store, None  # they refer to the recomputed graph, and that to `recount`
        frame = self.frames[index]()
        if frame is not None and record.kept is None:
            frame.store, frame.versions = saved, recount.versions  # type: ignore[assignment]

    def open_keywords(self) -> dict[str, Any]:
        """The keyword arguments, in fresh containers: a list that the function appends to grows once, in forward."""
        if self.opened is None:  # once a walk: hooks around us may allow no more
            self.opened = list(self.keyword_leaves)
            if self.keyword_vault is not None:
                for slot, tensor in zip(self.keyword_slots, self.keyword_vault.open("a tensor in a keyword argument")):
                    self.opened[slot] = tensor
        return unflatten(self.opened, self.keyword_spec)

    def compare(self, then: list[Meta], index: int, recount: Recount) -> None:
        """Raise unless what forward saved was saved again, and nothing else."""
        now = list(map(meta, recount.store or []))
        if now == then:
            return
        pairs = zip([*then, *[None] * len(now)], [*now, *[None] * len(then)])
        first = next((a, b) for a, b in pairs if a != b)
        a, b = (f"{str(m[1]).removeprefix('torch.')}{list(m[0])}" if m else "nothing" for m in first)
        raise RecomputeError(
            f"{self.where(index)} saved {len(then)} tensors in forward and {len(now)} in recompute.\n"
            f"  First difference: forward saved {a}, recompute {b}.\n"
            "  Usual causes: a cache that grows on each call, routing that depends on rounding, state outside the module.\n"
            "  Fix: rg.is_recomputing() lets the function leave such state alone; memory=rg.Keep() does not recompute."
        )


def leaf_views(leaves: Leaves, needs_grad: Iterator[bool]) -> Leaves:
    """A rebuilt stream, as a function gets it.

    [Note: why reads keep requires_grad] Autograd saves only what some gradient needs. With another `requires_grad` than in
    forward it would save other tensors, and their numbers would no longer match those in the graph.

    [Note: why a view] Tools that hook a module's inputs (FlopCounterMode, FSDP) treat leaves differently from other tensors.
    In forward the inputs were not leaves, so here they are views of one.
    """
    views = []
    for tensor in leaves:
        leaf = tensor.detach()
        views.append(leaf.requires_grad_().view_as(leaf) if next(needs_grad) else leaf)
    return views


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


def aliases(state: dict[str, Leaves]) -> dict[str, Leaves]:
    """The same memory in tensors of their own, outside the graph: `is_unshared` counts tensors, not names for one."""
    return {name: [leaf.detach() for leaf in leaves] for name, leaves in state.items()}


def undone(step: Step, leaves: Leaves, parts: Parts) -> Leaves:
    """The target before the update. Overwrites it where no one else can see it."""
    inverse = step.coupling.inverse
    in_place = getattr(step.coupling, "inverse_", inverse)
    return [(in_place if is_unshared(y) else inverse)(y, *out) for y, out in zip(leaves, parts)]


def is_unshared(tensor: Tensor) -> bool:
    """Whether no other tensor (a view, an alias, one that autograd saved) has the memory of this one.

    `torch._C._storage_Use_Count` is private; a public `UntypedStorage.use_count()` would replace it. It counts this tensor and
    the storage object made to ask.
    """
    return type(tensor) is Tensor and torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2


def activation_bytes(saved: list[Tensor]) -> int:
    """Bytes of distinct memory among saved tensors, parameters aside."""
    storages = [tensor.untyped_storage() for tensor in saved if not isinstance(tensor, torch.nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
