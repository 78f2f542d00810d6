"""Forward, recorded: the real autograd graph, with a number wherever autograd would save a tensor.

While a function runs, autograd hands each tensor that it wants to save to `ForwardHooks.pack` and
stores the number that `pack` returns. When the function is done, the tensors are let go. In
backward, autograd hands the number to `ForwardHooks.unpack`, and the walk makes the tensor again.
For that it has one `Record` for each update, and whatever the guards of the call remember.

The last updates are kept (see `memory`): they run as plain autograd, and the state before them is
where the walk begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core import errors
from retrograd.core.exact import Precision
from retrograd.core.guard import Guard, Guards
from retrograd.core.guards import (
    guards_in_capture,
    guards_of_inspection,
    guards_of_recorded_pass,
)
from retrograd.core.guards.arguments import ArgumentObjects, are_opaque
from retrograd.core.guards.local_backward import LocalBackward
from retrograd.core.home_streams import home_streams
from retrograd.core.host_memory import HostMemory, HostTier
from retrograd.core.memory import (
    NOTHING,
    Choice,
    Operation,
    Plan,
    is_free,
)
from retrograd.core.operations import KeepOperations, KeptOperation
from retrograd.core.pin import Box, Pinned, boxes
from retrograd.core.private import (
    check_hooks_are_enabled,
    has_step_hooks,
    never_compiled,
    pop_hooks,
    push_hooks,
    run_in_mode,
    surrounding_hooks,
)
from retrograd.core.program import (
    Application,
    Pass,
    Program,
    Step,
    couple,
    evaluate,
    place,
)
from retrograd.core.saved import (
    KeywordArguments,
    Saved,
    SavedAgain,
    SavedOutput,
    SavedState,
    save_alias,
    save_state,
)
from retrograd.core.streams import State, flatten, tensors_in, unflatten
from retrograd.core.structure import Functions, StackCache, VerifyCalls
from retrograd.core.tensors import (
    describe,
    distinct_bytes,
    is_capturing,
    local,
    nbytes,
    requires_grad_of,
    shape_and_dtype,
    shapes_of,
    storage_of,
    stride_of,
)
from retrograd.core.updates import TRUSTED
from retrograd.core.walk import ForwardContext, HoldContext, Record, Walk

ChooseGuards = Callable[[list[Guard]], list[Guard]]


class Tape(Pass):
    """A pass that autograd can walk back."""

    is_recorded = True

    def __init__(
        self,
        program: Program,
        streams: dict[str, Any],
        keywords: dict[str, Any],
        precision: Precision,
        plan: Plan,
        cache: StackCache,
        choose_guards: ChooseGuards = list,
        verify: VerifyCalls = "first",
        host: HostMemory | None = None,
    ) -> None:
        super().__init__(program, streams, keywords, precision)
        check_hooks_are_enabled()
        self._copy_inference_tensors()
        self.plan = plan
        self.cache = cache
        self.sample = plan.sample
        self.sample_bytes: list[int] = []
        self.is_past_cut = False  # from here on updates are kept: plain autograd
        self.told_output: list[Callable[[Any], None]] = []  # get what is handed out
        arguments = KeywordArguments(keywords)
        self.structure = cache.structure_of(functions_of(program, arguments.objects))
        self.context = context = ForwardContext(program, self.structure, arguments)
        self.given_nodes = {leaf.grad_fn for leaves in self.state.values() for leaf in leaves}
        # Parameters may be stepped in backward: [Note: an optimizer inside backward].
        self.steps_in_backward = any(map(has_step_hooks, self.structure.parameters))
        devices = {leaf.device for leaves in self.state.values() for leaf in leaves}
        self.is_capturing = any(map(is_capturing, devices))
        guards = guards_of_recorded_pass(
            self, context.weak_program, context.weak_structure, arguments, precision, cache.notices
        )
        if self.is_capturing:
            guards = guards_in_capture(guards, self.structure, precision)
        self.inspect_from = cache.inspect_from(
            self.structure, self.state, verify, self.is_capturing
        )
        self.inspection = functools.partial(
            guards_of_inspection,
            guards,
            context.weak_program,
            context.weak_structure,
            precision,
            cache.notices,
            verify,
        )
        self.local_backward = next(g for g in guards if isinstance(g, LocalBackward))
        self.host = None if host is None else self._host_tier(host)
        guards = choose_guards(guards)
        if self.host is not None:
            guards = [*guards, self.host]
        self.guards_past_cut = Guards(guard for guard in guards if not guard.rebuilt_only)
        self.surround(guards)
        self.walk = Walk(context, self.specs, arguments, self.guards, home_streams(devices))

    def _host_tier(self, memory: HostMemory) -> HostTier | None:
        """None if the plan keeps nothing on the host."""
        if not any(choice.host for choice in self.plan.choices.values()):
            memory.trim()
            return None
        if self.is_capturing:
            raise errors.capture_copies()
        return HostTier(memory, self.context.weak_program)

    def _copy_inference_tensors(self) -> None:
        """Autograd cannot save tensors of inference mode."""
        for name, leaves in self.state.items():
            if any(leaf.is_inference() for leaf in leaves):
                self.state[name] = tuple([leaf.clone() for leaf in leaves])

    def use_keywords(self, keywords: dict[str, Any]) -> None:
        super().use_keywords(keywords)
        arguments = KeywordArguments(keywords)
        self.context.hold(arguments)
        self.walk.use_arguments(self.index, arguments)
        if are_opaque(arguments.objects):
            guard = ArgumentObjects(arguments.objects, self.context.weak_program)
            self.walk.guards.add([guard])

    # --- updates

    def update(self, step: Step) -> None:
        index = self.index
        if index >= self.plan.may_keep_from and not self.is_past_cut and self._is_at_cut():
            self.cut()
        if self.is_past_cut:
            super().update(step)
            return
        if index == self.inspect_from:
            self._inspect()
        update = self._application(step)
        for before_function in self.guards.before_function:
            before_function(update)
        hooks = ForwardHooks(self.walk, index)
        choice = self.plan.choices.get(index, NOTHING)
        is_usual = choice is NOTHING and step.target_from != "kept"
        before = None if is_usual else self._save_before(update, choice)
        needs_grad = list(map(requires_grad_of, update.inputs))
        self._run(update, hooks, choice)
        if hooks.pinned:
            update.pinned = [tensor for value in hooks.pinned for tensor in value.tensors()]
        for after_update in self.guards.after_update:
            after_update(update)
        record = self._record(update, needs_grad)
        record.pinned = hooks.pinned
        hooks.pinned = ()
        if not is_usual or not update.is_repeatable:
            self._keep(update, choice, hooks, record, before)
        self.walk.remember(record, hooks)
        if index in self.sample:
            self.sample_bytes.append(activation_bytes(update.saved))
        if self.steps_in_backward or not update.saved:
            self._follow_backward(update)
        self._accept(update)
        self.index += 1

    def _inspect(self) -> None:
        """Watch and verify functions from here on."""
        if self.is_capturing:
            raise errors.capture_looks("the functions have not been seen yet")
        self.guards.add(self.inspection())

    def _run(
        self,
        update: Application,
        hooks: ForwardHooks,
        choice: Choice,
    ) -> None:
        """Run the function and the coupling, while the hooks receive what autograd saves."""
        update.saved = hooks.recording
        hooks.outer = boxes.current
        try:
            boxes.current = hooks
            push_hooks(hooks.pack, hooks.unpack)
            if choice.operations:
                keep = KeepOperations(choice.operations, update.saved)
                run_in_mode(keep, evaluate, update, self.keywords, self.guards)
                hooks.operations = keep.kept
            else:
                evaluate(update, self.keywords, self.guards)
            update.saved_by_function = len(update.saved)
            couple(update)
        except Exception as error:
            self._explain(error, update)
            raise
        finally:
            # Let go of the tensors: they refer to the graph, and the graph refers to these hooks.
            # No call may come before the last line. [Note: interrupts]
            boxes.current = hooks.outer
            hooks.outer = None
            hooks.is_recording = False
            hooks.recording = []
            pop_hooks()
        if hooks.ran_backward:
            self.local_backward.updates.add(update.index)

    def _record(
        self,
        update: Application,
        needs_grad: list[bool],
    ) -> Record:
        record = Record()
        record.needs_grad = needs_grad
        record.dtypes = self.dtypes
        record.saved_by_function = update.saved_by_function
        record.output = None
        record.before = None
        try:
            record.shapes = list(map(shape_and_dtype, update.saved))
        except RuntimeError:
            record.shapes = shapes_of(update.saved)
        function = self.structure.functions[update.index]
        record.may_stop_early = function.may_stop_early
        if record.shapes == function.saved_shapes:  # nearly always: one list serves every call
            record.shapes = function.saved_shapes
        else:
            function.saved_shapes = record.shapes
        strides = list(map(stride_of, update.target))
        is_same = strides == list(map(stride_of, update.result))
        record.strides = None if is_same and update.step.inverse is None else strides
        return record

    def _keep(
        self,
        update: Application,
        choice: Choice,
        hooks: ForwardHooks,
        record: Record,
        before: SavedState | None,
    ) -> None:
        """Keep what the plan chose, a target that cannot be rebuilt, and everything of a function
        that cannot run again.
        """
        if before is not None and self._may_be_needed(update):
            record.before = before
        if choice is NOTHING and update.is_repeatable:
            return
        if not update.is_repeatable:
            record.output = self._save_output(update)
            hooks.keep(update.saved)
        elif (choice.output or choice.saved) and update.saved:
            self._keep_in_hooks(update, choice, hooks)
        elif choice.output:
            record.output = self._save_output(update)  # the graph will not hold the hooks

    def _keep_in_hooks(self, update: Application, choice: Choice, hooks: ForwardHooks) -> None:
        """Keep the output, and what autograd saved, as long as backward may ask for it."""
        save_one = save_alias
        is_undone_by_output = update.step.target_from == "output" and not choice.streams
        keeps_output = choice.output or is_undone_by_output
        if choice.host and self.host is not None:
            outputs = [out for outs in update.output for out in outs] if keeps_output else []
            tensors = [*outputs, *update.saved] if choice.saved else outputs
            saver = self.host.saver(update.index, tensors, self._memory_of_others(update))
            if saver is None:
                return  # the function runs again
            save_one = saver
        if keeps_output:
            hooks.output = self._save_output(update, save_one)
        if choice.saved:
            hooks.whole = list(map(save_one, update.saved))

    def _save_output(
        self, update: Application, save_one: Callable[[Tensor], Saved] = save_alias
    ) -> SavedOutput:
        """Save outputs; those that share memory with what the functions edit as copies."""
        edited = self._memory_of_state(update.index)
        return [
            tuple([save_one(out.clone() if storage_of(out) in edited else out) for out in outputs])
            for outputs in [[out.detach() for out in outputs] for outputs in update.output]
        ]

    def _memory_of_others(self, update: Application) -> set[int]:
        """Memory that is not of activations: it lives on whether it is kept or not."""
        function = self.structure.functions[update.index]
        arguments = [self.keywords[outer] for outer in update.step.keywords.values()]
        others = [*function.parameters, *tensors_in(arguments)]
        return self._memory_of_state(update.index) | {storage_of(local(one)) for one in others}

    def _save_before(self, update: Application, choice: Choice) -> SavedState | None:
        """Save the streams that have to be saved before the function runs."""
        if choice.streams:
            state = self.state
        elif update.step.target_from == "kept" and not choice.rerun:
            state = {update.step.target: update.target}
        else:
            return None
        if choice.host and self.host is not None:
            leaves = [leaf for leaves in state.values() for leaf in leaves]
            saver = self.host.saver(update.index, leaves, ())
            if saver is not None:
                return {name: tuple(map(saver, leaves)) for name, leaves in state.items()}
        return save_state(state, None if choice.streams else surrounding_hooks())

    def _may_be_needed(self, update: Application) -> bool:
        """Whether backward may come to this update, or run a later one again from here."""
        if self.plan.choices.get(update.index + 1, NOTHING).rerun:
            return True
        leaves = [*update.result, *(leaf for leaves in self.state.values() for leaf in leaves)]
        return any(map(requires_grad_of, leaves))

    def _memory_of_state(self, index: int) -> set[int]:
        """Memory that the functions edit: an output may be a view of it."""
        function = self.structure.functions[index]
        buffers = [b for module in function.modules for b in module._buffers.values()]
        state = [*buffers, *function.usage.written]
        return {storage_of(tensor) for tensor in state if tensor is not None}

    def _follow_backward(self, update: Application) -> None:
        """Let the walk know when backward arrives: [Note: an optimizer inside backward]."""
        if not self.structure.functions[update.index].parameters:
            return
        # A function may return what it read: a node of the caller's, which is not ours to follow.
        given = {leaf.grad_fn for leaf in update.inputs}
        nodes = set()
        for result, outputs in zip(update.result, update.output):
            for out in outputs:
                is_own = out.grad_fn is not None and out.grad_fn not in given
                nodes.add(out.grad_fn if is_own else result.grad_fn)
        for node in nodes - given:
            if node is not None:
                node.register_prehook(functools.partial(self.walk.arrive, update.index))

    # --- the cut: where rebuilding ends

    def _is_at_cut(self) -> bool:
        if self.index == self.plan.keep_from:
            return True
        return self.index == self.plan.keep_if_free_from and self._can_keep_last_block()

    def cut(self) -> None:
        """Leave the state to the walk. Whatever follows is plain autograd."""
        self.is_past_cut = True
        for at_cut in self.guards.at_cut:
            at_cut(self.state)
        self.walk.begin_at(self.state)
        self.guards = self.guards_past_cut

    def finish(self) -> None:
        if not self.is_past_cut:
            self.cut()
        for after_forward in self.walk.guards.after_forward:
            after_forward(self.state)

    def hand_out(self, values: Any) -> Any:
        """Let the graph of the outputs hold what backward needs: see `ForwardContext`."""
        for tell in self.told_output:
            tell(values)
        if not self.walk.records:
            return values
        leaves, spec = flatten(values)
        return unflatten([self._hold_by(leaf) for leaf in leaves], spec)

    def _hold_by(self, leaf: Any) -> Any:
        node = leaf.grad_fn if isinstance(leaf, Tensor) else None
        if node is None or node in self.given_nodes:
            return leaf
        if self.context.may_refer_to_output:
            return HoldContext.apply(leaf, self.context)
        metadata: Any = node.metadata  # its stub says that it is a method
        metadata.setdefault("retrograd", []).append(self.context)
        return leaf

    def _can_keep_last_block(self) -> bool:
        """Whether the last block may be kept without raising the peak: see `memory.Reverse`."""
        # Whoever surrounds us with hooks (an outer stack, checkpoint) may run this forward again,
        # after gradients came or went, and must find the same graph.
        if surrounding_hooks() is not None:
            return False
        # [Note: several processes] Functions may communicate, in forward and again in recompute.
        # What is rebuilt must be the same in every process, and here it would depend on the shapes
        # and the gradients of one.
        if number_of_processes() > 1:
            return False
        to_come = 0
        for function in self.structure.functions:
            for parameter in function.parameters:
                if parameter.requires_grad and parameter.is_leaf and parameter.grad is None:
                    to_come += nbytes(parameter)
            if is_free(self.sample_bytes, to_come):
                return True
        return False

    # --- hooks on blocks

    def check_casts(self, casts: State) -> None:
        """Raise if a hook on a block did more than cast the streams."""
        if self.cache.trusts_casts:
            return
        for name, leaves in casts.items():
            for after, before in zip(leaves, self.state[name]):
                if not torch.equal(after.detach(), before.detach().to(after.dtype)):
                    raise self.replaced_stream(name, before, f"another {describe(after)}")
        # A hook does what it did the first time. To look each time would wait for a device.
        self.cache.trusts_casts = True


class ForwardHooks:
    """The hooks of one update in forward.

    The graph holds them. As long as they live, backward may still ask for a tensor of the update.
    """

    __slots__ = (
        "__weakref__",
        "index",
        "is_kept",
        "is_recording",
        "operations",
        "outer",
        "output",
        "pinned",
        "ran_backward",
        "recording",
        "saved",
        "walk",
        "whole",
    )

    def __init__(
        self,
        walk: Walk,
        index: int,
    ) -> None:
        self.walk = walk
        self.index = index
        self.recording: list[Tensor] = []  # what autograd saves while the function runs
        self.is_recording = True
        self.ran_backward = False  # the function called autograd while it ran
        self.saved: list[SavedAgain | None] | None = None  # the same tensors again, in backward
        self.is_kept = False  # `saved` serves more than one request
        # What the plan keeps. It is here and not in the walk, so that it goes as backward goes.
        self.output: SavedOutput | None = None
        self.operations: dict[Operation, KeptOperation] = {}
        # What the function pins, while it runs. A tuple as long as it is nothing.
        self.pinned: list[Pinned] | tuple[()] = ()
        self.outer: Box | None = None
        self.whole: list[Saved] | None = None  # all that autograd saved; used once

    @never_compiled
    def pack(self, tensor: Tensor) -> int:
        recording = self.recording
        recording.append(tensor)
        return len(recording) - 1

    @never_compiled
    def unpack(self, slot: int) -> Tensor:
        tensors = self.saved
        saved = None if tensors is None else tensors[slot]
        if saved is None:
            if self.is_recording:  # the function is still running and calls autograd
                self.ran_backward = True
                return self.recording[slot]
            saved = self.walk.saved_tensor(self, slot)
        tensor, version = saved
        if tensor._version != version:
            versions = (version, tensor._version)
            where = place(self.walk.program, self.index)
            raise errors.edited_after_save(where, describe(tensor), versions)
        if not self.is_kept:
            # Autograd asks once. So the tensor is freed now, not when the update is over.
            self.saved[slot] = None  # type: ignore[index]
        return tensor

    def pin(self, value: Any) -> Any:
        """Keep a value for the recompute: see `pin`."""
        if not self.pinned:
            self.pinned = []
        self.pinned.append(Pinned(value))  # type: ignore[union-attr]
        return value

    def keep(self, tensors: list[Tensor]) -> None:
        """Keep what autograd saved until the graph is freed."""
        self.saved = [(tensor.detach(), tensor._version) for tensor in tensors]
        self.is_kept = True


def functions_of(program: Program, arguments: Iterable[Any]) -> list[Functions]:
    """What each update calls: its function, a user's own coupling, and modules in the arguments."""
    modules = tuple(value for value in arguments if isinstance(value, nn.Module))
    return [
        (step.fn, *modules)
        if type(step.coupling) in TRUSTED
        else (step.fn, step.coupling, *modules)
        for step in program
    ]


def number_of_processes() -> int:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def activation_bytes(saved: list[Tensor]) -> int:
    """Bytes of distinct memory among saved tensors, without parameters and views of them."""
    return distinct_bytes(tensor for tensor in saved if not is_parameter(tensor))


def is_parameter(tensor: Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, nn.Parameter)
