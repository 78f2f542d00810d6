"""Forward, recorded: the real autograd graph, with a number wherever autograd would have saved a
tensor.

While a function runs, `torch.autograd.graph.saved_tensors_hooks` hand each tensor that autograd
wants to save to a `Frame`, which lets go of them all when the function is done. What backward needs
to make them again is a few facts for each update, which the tape leaves in a `walk.Walk`. The graph
holds the frames, the frames hold the walk, and the walk holds neither: so dropping the output frees
everything at once, without the garbage collector.

The last updates are *kept* (see `memory`): they run as plain autograd, and the state before them is
where the walk begins.
"""

from __future__ import annotations

import functools
import operator
import weakref
from typing import Any

import torch
from torch import Tensor

from retrograd.core import errors
from retrograd.core.exact import Precision
from retrograd.core.memory import Choice, Plan, is_spare
from retrograd.core.operations import KeepOperations
from retrograd.core.private import pop_hooks, push_hooks, surrounding_hooks
from retrograd.core.program import Parts, Program, Run, State, Step, call, couple, fit, place
from retrograd.core.replay import Backstage, Scene, version_of
from retrograd.core.streams import Leaves, describe, distinct_bytes, nbytes
from retrograd.core.updates import TRUSTED
from retrograd.core.walk import Arguments, Frame, Record, Walk, aliases, meta, versions_of
from retrograd.core.waypoints import Waypoints

stride_of = operator.methodcaller("stride")
NOTHING = Choice()


class Tape(Run):
    """A `Run` that autograd can walk back."""

    def __init__(
        self,
        streams: dict[str, Any],
        keywords: dict[str, Any],
        program: Program,
        precision: Precision,
        plan: Plan,
        backstage: Backstage,
    ) -> None:
        super().__init__(streams, keywords, program, precision)
        for name, leaves in self.state.items():  # autograd cannot save a tensor of inference mode
            if any(leaf.is_inference() for leaf in leaves):
                self.state[name] = tuple([leaf.clone() for leaf in leaves])
        self.plan = plan
        self.backstage = backstage
        self.sample = plan.sample
        self.sample_bytes: list[int] = []
        self.sealed = False  # from here on updates are kept: plain autograd
        self.untried = {
            id(step.coupling) for step in program if not isinstance(step.coupling, TRUSTED)
        }
        arguments = Arguments(keywords)
        leaves = (leaf for values in self.state.values() for leaf in values)
        # A coupling of ours has no state; a user's own may be a module, and so may an argument.
        given = tuple(value for value in arguments.leaves if isinstance(value, torch.nn.Module))
        functions = [
            (s.fn, *given) if isinstance(s.coupling, TRUSTED) else (s.fn, s.coupling, *given)
            for s in program
        ]
        self.scene = Scene(backstage.get(functions), leaves, arguments.leaves)
        self.waypoints: Waypoints = (plan.waypoints or Waypoints)(program, precision, backstage)
        # What functions compute in, whatever they return.
        for dtype in (
            *self.scene.structure.dtypes,
            *(autocast[0] for autocast in self.scene.autocast if autocast),
            *(dtype for dtypes in self.given.values() for dtype in dtypes or ()),
        ):
            self.waypoints.saw(dtype)
        self.walk = Walk(program, self.specs, self.scene, arguments, self.waypoints)

    def begin_block(self, state: State) -> None:
        super().begin_block(state)
        if self.casts and not self.backstage.trusts_casts:
            for name, leaves in self.casts.items():
                for after, before in zip(leaves, self.state[name]):
                    if not torch.equal(after.detach(), before.detach().to(after.dtype)):
                        raise self.replaced(name, before, f"another {describe(after)}")
            # A hook does what it did the first time; to look each time would wait for a device.
            self.backstage.trusts_casts = True

    def resume(self, state: State) -> None:
        for name, leaves in state.items():
            if leaves is self.state[name]:
                continue  # nearly always
            for before, after in zip(self.state[name], leaves):
                if after is not before and (
                    after.dtype != before.dtype or after.data_ptr() != before.data_ptr()
                ):
                    raise self.replaced(name, before, describe(after))
        super().resume(state)

    def update(self, step: Step) -> None:
        index, plan = self.index, self.plan
        if (
            not self.sealed
            and index >= plan.spare
            and (index == plan.kept or (index == plan.spare and self.can_spare()))
        ):
            self.seal()
        if self.sealed:
            return super().update(step)
        state, specs, walk = self.state, self.specs, self.walk
        if index in self.waypoints.at:
            self.waypoints.note(index, state)
        target = state[step.target]
        leaves, reads = [*target], []
        for name in step.reads:
            leaves += state[name]
            reads.append(self.read(name))
        versions = list(map(version_of, leaves))
        scene, record, frame = self.scene, Record(), Frame(walk, index)
        cast = scene.casts[index]
        choice = plan.choices.get(index, NOTHING)
        planned = bool(choice.operations) or plan.watcher is not None
        if choice.streams:
            frame.streams, frame.stream_versions = aliases(state), versions_of(state)
        record.dtypes = self.dtypes
        record.needs_grad = [leaf.requires_grad for leaf in leaves]
        record.versions, record.kept = scene.versions[cast.number], None
        seen = scene.buffers(cast) if scene.has_buffers else []
        record.random = walk.note_random()
        push_hooks(frame.pack, frame.unpack)
        try:
            output = (
                self.call_as_planned(step, reads, frame)
                if planned
                else call(step, reads, self.keywords)
            )
            parts, aux = fit(output, self.program, index, target, specs[step.target])
            del output
            record.by_fn = len(frame.store)  # type: ignore[arg-type]
            updated = couple(step, target, parts)
        except Exception as error:
            self.blame(error, leaves)
            raise
        finally:
            pop_hooks()
            saved: list[Tensor] = frame.store  # type: ignore[assignment]
            frame.store = None  # they refer to the graph, and the graph to this frame
        if versions != list(map(version_of, leaves)):
            raise self.edited_input(leaves, versions)
        if self.untried and id(step.coupling) in self.untried:
            self.untried.remove(id(step.coupling))
            self.try_coupling(step, parts, updated)
        record.strides = None
        for x, y, outs in zip(target, updated, parts):
            if x.stride() != y.stride():
                record.strides = list(map(stride_of, target))
            for out in outs:
                if out.dtype != x.dtype:
                    self.waypoints.saw(out.dtype)
        record.saved = list(map(meta, saved))
        if record.saved == cast.saved:  # nearly always: then one list serves every call
            record.saved = cast.saved
        else:
            cast.saved = record.saved
        record.buffers, replayable = scene.changes(cast, seen)
        if not replayable:
            record.versions, record.kept = (
                scene.versions[cast.number],
                [tuple(o.detach() for o in outs) for outs in parts],
            )
            frame.keep(saved)
        elif choice.output:
            kept = [tuple(o.detach() for o in outs) for outs in parts]
            if saved:
                frame.output, frame.output_versions = (
                    kept,
                    [o._version for outs in kept for o in outs],
                )
            else:
                record.kept = kept  # no one will hold the frame
        if plan.watcher is not None:
            plan.watcher.note(index, saved, record.by_fn, parts, cast.parameters, leaves)
        if index in self.sample:
            self.sample_bytes.append(activation_bytes(saved))
        walk.records.append(record)
        walk.frames.append(weakref.ref(frame))
        if cast.parameters and (scene.steps_in_backward or not saved):
            for node in {
                out.grad_fn or y.grad_fn for y, outs in zip(updated, parts) for out in outs
            }:
                if node is not None:
                    node.register_prehook(functools.partial(walk.arrive, index))
        state[step.target] = updated
        if self.casts:
            self.casts.pop(step.target, None)
        if self.grid is not None:
            self.note_range(step.target, index)
        if aux:
            self.aux += aux
        self.index += 1

    def call_as_planned(self, step: Step, reads: list[Any], frame: Frame) -> Any:
        """Run the function while someone watches, or keeping outputs of operations inside it."""
        choice, watcher = self.plan.choices.get(self.index, NOTHING), self.plan.watcher
        if watcher is not None:
            with watcher.watch(self.index, frame, self.scene.casts[self.index].parameters):
                return call(step, reads, self.keywords)
        with KeepOperations(choice.operations, frame) as keep:
            frame.operations = keep.kept
            return call(step, reads, self.keywords)

    def can_spare(self) -> bool:
        """Whether the last block may be kept without raising the peak: see `memory.Reverse`."""
        # Whoever surrounds us with hooks (an outer stack, checkpoint) may run this forward again,
        # after gradients came or went, and must find the same graph.
        if surrounding_hooks():
            return False
        # [Note: several processes] Functions may communicate, in forward and again in recompute.
        # What is rebuilt must be the same in every process, and here it would depend on the shapes
        # and gradients of one.
        if (
            torch.distributed.is_available()
            and torch.distributed.is_initialized()
            and torch.distributed.get_world_size() > 1
        ):
            return False
        to_come = 0
        for cast in self.scene.casts:
            to_come += sum(
                nbytes(p)
                for p in cast.parameters
                if p.requires_grad and p.is_leaf and p.grad is None
            )
            if is_spare(self.sample_bytes, to_come):
                return True
        return False

    def seal(self) -> None:
        """The end of what is rebuilt: leave the state to the walk, and let whatever follows be
        plain autograd.
        """
        self.sealed = True
        self.walk.begin_at(self.state)

    def finish(self) -> None:
        super().finish()
        if not self.sealed:
            self.seal()
        if self.plan.watcher is not None:
            self.plan.watcher.finish(self.state)

    @torch.no_grad()
    def try_coupling(self, step: Step, parts: Parts, updated: Leaves) -> None:
        """A user's own coupling, once a call: does its inverse undo its forward? Otherwise
        gradients would be wrong.
        """
        for x, y, out in zip(self.state[step.target], updated, parts):
            if not (x.is_floating_point() or x.is_complex()) or not x.numel() or x.is_meta:
                continue
            where, coupling = place(self.program, self.index), type(step.coupling).__name__
            copy, out = y.clone(), [o.detach() for o in out]
            error = (step.coupling.inverse(copy, *out) - x).abs().max().item()
            if copy._version:
                raise errors.inverse_in_place(where, coupling)
            scale, limit = (
                max(t.abs().max().item() for t in (x, y, *out)),
                torch.finfo(x.dtype).eps ** 0.5,
            )
            if error > limit * scale:
                raise errors.wrong_inverse(
                    where, coupling, error / scale, limit, str(x.dtype).removeprefix("torch.")
                )


def activation_bytes(saved: list[Tensor]) -> int:
    """Bytes of distinct memory among saved tensors, parameters (and views of them) aside."""
    return distinct_bytes(
        t for t in saved if not isinstance(t if t._base is None else t._base, torch.nn.Parameter)
    )
