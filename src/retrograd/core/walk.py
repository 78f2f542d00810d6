"""The walk back: how backward gets the tensors that forward dropped.

When backward first asks for a tensor that update i saved, the streams after update i are at hand,
and the walk takes a step:

    output = fn(*reads)                           run again; what autograd saves is collected
    target = coupling.inverse(target, output)     now the streams are those before update i

An update that reads its target, or overwrites it, cannot be undone by its output. Then the target's
earlier value comes first: it was kept, or the inverse of the function gives it. After that the
function runs again, for what autograd saves.

A walk belongs to one forward call. It is in one of two states:

    idle       `position` is None: no streams are at hand
    at p       `position` is p: `state` has the streams before update p, and the hooks of update p
               have what autograd saved of it

Its rules:

 1. Order. Autograd runs its nodes newest first, so it asks for update i when it is done with every
    update after i. From `at p`, the walk undoes updates until it is `at i`. Where that order does
    not hold (several devices, `backward(inputs=...)`, a second backward), it begins again from its
    anchor. The values are the same, only the way is longer.
 2. Ownership. The graph holds the hooks of each update, the hooks hold the walk, and the walk holds
    neither the graph nor the hooks (weak references). Functions, modules and objects in keyword
    arguments may store tensors of the graph, so the walk refers to them weakly, too: the nodes of
    the outputs hold them, until backward arrives. Dropping the output frees everything.
 3. The anchor is a state that the walk can begin from. At first it is the state at the cut. The
    state before update p serves every update before p. As long as hooks from p on are alive,
    backward may come back to them (`retain_graph`), so a state at p or later stays saved. When all
    of these hooks are gone, backward has passed them for good. Then the anchor is dropped, and
    what was kept of the streams from p on, and the walk overwrites the only state there is.
 4. Freeing. A recomputed tensor is freed when autograd has taken it. If it is asked for again (a
    second read of `ctx.saved_tensors`), the update runs again and keeps its tensors until the walk
    leaves it. What nobody asked for is dropped when the walk leaves the update.
 5. Overwriting. An update is undone in place only if no other tensor uses that memory.
 6. Interrupts. The walk is idle while it changes `state`, so an exception leaves no half-undone
    state to go on from.
 7. Threads. Autograd may call from several threads; one at a time walks.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from retrograd.core import errors
from retrograd.core.guard import Guards, Undo
from retrograd.core.home_streams import HomeStreams, used_elsewhere
from retrograd.core.operations import ReuseOperations
from retrograd.core.pin import Pinned, boxes
from retrograd.core.private import (
    check_hooks_are_enabled,
    current_backward,
    is_compiler_active,
    never_compiled,
    pop_hooks,
    push_hooks,
    run_in_mode,
    set_grad_mode,
    surrounding_hooks,
    without_compiler,
)
from retrograd.core.program import (
    Application,
    HeldProgram,
    Output,
    Program,
    couple,
    couple_digits,
    digits_of,
    evaluate,
    inverted_leaves,
    place,
    with_reads,
)
from retrograd.core.saved import (
    PLAIN_TYPES,
    KeywordArguments,
    SavedAgain,
    SavedOutput,
    SavedState,
    leaf_view,
    load_leaves,
    load_state,
    save_state,
)
from retrograd.core.streams import (
    Dtypes,
    Spec,
    State,
    read,
)
from retrograd.core.structure import Structure
from retrograd.core.tensors import (
    ShapeAndDtype,
    is_unshared,
    shape_and_dtype,
    shapes_of,
    with_strides,
)
from retrograd.core.updates import TRUSTED, has_inverse_in_place

if TYPE_CHECKING:
    from retrograd.core.tape import ForwardHooks


class _Recomputing(threading.local):
    def __init__(self) -> None:
        self.depth = 0  # recomputes under way in this thread, one inside the other


recomputing = _Recomputing()


def is_recomputing() -> bool:
    """True inside a function of a stack while it runs a second time, during backward.

    Example:
        >>> class Counted(torch.nn.Linear):
        ...     calls = 0
        ...     def forward(self, x):
        ...         if not rg.is_recomputing():
        ...             self.calls += 1
        ...         return super().forward(x)
    """
    return recomputing.depth > 0


class Record:
    """What the walk remembers of one update."""

    __slots__ = (
        "before",
        "dtypes",
        "may_stop_early",
        "needs_grad",
        "output",
        "pinned",
        "saved_by_function",
        "shapes",
        "strides",
    )

    needs_grad: list[bool]  # of the target's leaves, then of the leaves of each read
    dtypes: dict[str, Dtypes]  # in which its function read the streams
    shapes: list[ShapeAndDtype]  # of each tensor that autograd saved
    saved_by_function: int  # how many of them the function saved; the coupling saved the rest
    strides: list[tuple[int, ...]] | None  # of the target before it, if the update changed them
    output: SavedOutput | None  # kept where the function does not run again
    pinned: Sequence[Pinned]  # what its function pinned
    # What is kept of the streams before it: its target if that cannot be rebuilt, or all of them.
    before: SavedState | None
    may_stop_early: bool  # see `watch.Usage`


class StartingPoint(NamedTuple):
    """The streams before update `position`, saved."""

    position: int
    streams: SavedState


class ForwardContext:
    """What backward needs of forward and that may refer to the graph: rule 2.

    A module may store an activation, and an object in a keyword argument may store the output. Then
    the graph, the walk and the module would hold each other, unseen by the garbage collector. So
    only the nodes of the outputs hold the context, until backward arrives: as metadata, which the
    collector does not see, or in a node of our own, which it does, if an object in a keyword
    argument could hold the output itself.
    """

    __slots__ = ("__weakref__", "objects", "program", "structure")

    def __init__(
        self,
        program: Program,
        structure: Structure,
        arguments: KeywordArguments,
    ) -> None:
        self.program = HeldProgram(program)
        self.structure = structure
        self.objects = [arguments.hand_over_objects()]

    def hold(self, arguments: KeywordArguments) -> None:
        """Hold the objects of more arguments: see `Tape.use_keywords`."""
        self.objects.append(arguments.hand_over_objects())

    @property
    def may_refer_to_output(self) -> bool:
        values = itertools.chain.from_iterable(self.objects)
        return not all(isinstance(value, PLAIN_TYPES) for value in values)

    @property
    def weak_program(self) -> Program:
        return weakref.proxy(self.program)

    @property
    def weak_structure(self) -> Structure:
        return weakref.proxy(self.structure)


class HoldContext(torch.autograd.Function):
    """The identity; its node holds a `ForwardContext`, seen by the garbage collector."""

    @staticmethod
    def forward(
        ctx: Any,
        leaf: Tensor,
        context: ForwardContext,
    ) -> Tensor:
        ctx.forward_context = context
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class Walk:
    """The state before update `position`, and how to get from there to earlier ones."""

    def __init__(
        self,
        context: ForwardContext,
        specs: dict[str, Spec],
        arguments: KeywordArguments,
        guards: Guards,
        home: HomeStreams | None,
    ) -> None:
        self.home = home
        self.context = weakref.ref(context)
        self.held_context: ForwardContext | None = None  # once backward has arrived
        self.program = context.weak_program
        self.specs = specs
        self.arguments = [(0, arguments)]  # from which update on
        self.guards = guards
        self.records: list[Record] = []
        self.hooks: list[weakref.ref[ForwardHooks]] = []
        self.lock = threading.RLock()
        self.position: int | None = None
        self.state: State = {}
        self.anchor: StartingPoint | None = None
        self.reruns: dict[int, tuple[Tensor, ...]] = {}  # targets before updates that ran once more
        self.newest = -1  # no hooks after this update are alive
        self.kept_until = 0  # no streams are kept of the updates from here on
        self.backward = -1  # the run of backward that walked last

    # --- called by the tape, in forward

    def remember(
        self,
        record: Record,
        hooks: ForwardHooks,
    ) -> None:
        self.records.append(record)
        self.hooks.append(weakref.ref(hooks))

    def use_arguments(self, index: int, arguments: KeywordArguments) -> None:
        """Updates from `index` on get these arguments."""
        self.arguments.append((index, arguments))

    def begin_at(self, state: State) -> None:
        """The state after the last record: the walk starts from here."""
        self.newest = len(self.records) - 1
        self.kept_until = len(self.records)
        if self.records:
            streams = save_state(state, surrounding_hooks())
            self.anchor = StartingPoint(len(self.records), streams)

    # --- called by autograd, in backward

    @never_compiled
    def saved_tensor(
        self,
        hooks: ForwardHooks,
        slot: int,
    ) -> SavedAgain:
        """A tensor that autograd saved of an update, made again."""
        # Backward may be called from a compiled function, and the compiler would compile functions
        # that forward ran as they are. [Note: torch.compile]
        if is_compiler_active():
            return self._saved_tensor_uncompiled(hooks, slot)
        if self.home is not None and not self.home.are_current():
            return self._saved_tensor_at_home(self.home, hooks, slot)
        return self._saved_tensor(hooks, slot)

    def _saved_tensor_at_home(
        self,
        home: HomeStreams,
        hooks: ForwardHooks,
        slot: int,
    ) -> SavedAgain:
        saved = home.run(functools.partial(self._saved_tensor, hooks, slot))
        used_elsewhere(saved[0])
        return saved

    def _saved_tensor(
        self,
        hooks: ForwardHooks,
        slot: int,
    ) -> SavedAgain:
        index = hooks.index
        with self.lock:
            if self.held_context is None:
                self._hold_context()
            saved = hooks.saved
            if saved is None or saved[slot] is None:  # else another thread was faster
                hooks.is_kept = self.position == index and saved is not None
                self.walk_to(index)
                if hooks.saved is None or hooks.is_kept:
                    self.recompute(index, undo=False)
            assert hooks.saved is not None
            found = hooks.saved[slot]
            assert found is not None
            return found

    @without_compiler
    def _saved_tensor_uncompiled(
        self,
        hooks: ForwardHooks,
        slot: int,
    ) -> SavedAgain:
        return self._saved_tensor(hooks, slot)

    @without_compiler
    def arrive(
        self,
        index: int,
        _: object,
    ) -> None:
        """A hook that runs when backward arrives at the output of update `index`.

        [Note: an optimizer inside backward] Usually the walk waits until a saved tensor is asked
        for. But a function that ends in `+ bias` has the gradient of the bias before that, and a
        hook may step the bias that the recompute needs. And a function that saves nothing is never
        asked: FSDP would reshard its parameters before it is undone.
        """
        with self.lock:
            if self.held_context is None:
                self._hold_context()
            if self._is_ahead(index):
                if self.home is None or self.home.are_current():
                    self.walk_to(index)
                else:
                    self.home.run(functools.partial(self.walk_to, index))

    def _hold_context(self) -> None:
        self.held_context = self.context()
        if self.held_context is None:
            raise errors.output_was_dropped()

    def _is_ahead(self, index: int) -> bool:
        """Whether the walk has not passed update `index`, or can begin again before it."""
        if self.position is not None and self.position >= index:
            return self.position > index
        return self.anchor is not None and self.anchor.position > index

    # --- walking

    def keywords_of(self, index: int) -> dict[str, Any]:
        """The keyword arguments of the call, as update `index` gets them when it runs again."""
        if not self.program[index].keywords:
            return {}
        return next(a for first, a in reversed(self.arguments) if first <= index).get()

    def walk_to(self, index: int) -> None:
        """Undo updates until the walk is at `index`."""
        backward = current_backward()
        if backward != self.backward or backward < 0:
            check_hooks_are_enabled()
            self.backward = backward
            for _, arguments in self.arguments:
                arguments.release()
            self.guards.begin_backward()
        if self.position is None or self.position < index:
            self.begin_again(index)
        while (position := self.position) is not None and position > index:
            self.leave()
            self._move_anchor(position)
            self.recompute(position - 1, undo=True)

    def begin_again(self, index: int) -> None:
        """Go to the anchor, to walk to `index` from there."""
        self.leave()
        self.position = None
        if torch.is_inference_mode_enabled():
            raise errors.in_inference_mode()
        if self.anchor is None or self.anchor.position < index:
            raise errors.already_passed(place(self.program, index))
        where = f"backward through {place(self.program, index)}"
        self.state = load_state(self.anchor.streams, where, "a stream that was returned")
        self.position = self.anchor.position

    def leave(self) -> None:
        """Drop what the update at `position` saved and nobody asked for: rule 4."""
        position = self.position
        if position is not None and position < len(self.hooks):
            hooks = self.hooks[position]()
            if hooks is not None and self.records[position].output is None:
                hooks.saved = None
                hooks.is_kept = False

    def _move_anchor(self, position: int) -> None:
        """Drop the anchor, or save the state before `position` as one: rule 3."""
        while self.newest >= position and self.hooks[self.newest]() is None:
            self.newest -= 1
        if self.newest < position:
            self.anchor = None
            while self.kept_until > position:
                self.kept_until -= 1
                self.records[self.kept_until].before = None
                self.records[self.kept_until].pinned = ()
        elif self.anchor is None:
            self.anchor = StartingPoint(position, save_state(self.state))

    def recompute(
        self,
        index: int,
        undo: bool,
    ) -> None:
        """Run update `index` again and give its hooks what autograd saves.

        With `undo`, the state becomes that before the update. Without, it is that already.
        """
        hooks = self.hooks[index]()
        recompute = Recompute(self, index, hooks)
        gradients = torch.is_grad_enabled()
        depth = recomputing.depth
        back = Undo()
        try:
            for before_recompute in self.guards.before_recompute:
                before_recompute(index, back)
            set_grad_mode(True)
            recomputing.depth = depth + 1
            output = recompute.run(undo)
        finally:  # [Note: interrupts]
            recomputing.depth = depth
            try:
                set_grad_mode(gradients)
                if back:
                    back.run()
            finally:
                if back:
                    back.run()
            # They refer to the recomputed graph, and that to these hooks.
            saved = list(recompute.hooks)
            recompute.hooks.clear()
        if undo and self.position != index:
            recompute.undo(output)  # not done yet
        if hooks is not None and self.records[index].output is None:
            hooks.saved = saved  # type: ignore[assignment]
        if undo:
            for after_undo in self.guards.after_undo:
                after_undo(index, self.state)

    def rebuild(
        self,
        index: int,
        output: Output,
    ) -> None:
        """Undo update `index`, given what its function returned."""
        step = self.program[index]
        target = self.state[step.target]
        coupling = step.coupling
        if step.gets_reads:
            output = with_reads(step, output, self.state)
        if step.stores_digits:
            self._rebuild_with_digits(index, output)
            return
        in_place = coupling.inverse
        if has_inverse_in_place(type(coupling)):
            in_place = coupling.inverse_
        self.position = None  # rule 6
        gradients = torch.is_grad_enabled()
        try:
            set_grad_mode(False)
            rebuilt = []
            for leaf, out in zip(target, output):
                rule = in_place if is_unshared(leaf) else coupling.inverse
                rebuilt.append(rule(leaf, *out))
            strides = self.records[index].strides
            if strides is not None:
                rebuilt = list(map(with_strides, rebuilt, strides))
        finally:
            set_grad_mode(gradients)
        self.state[step.target] = tuple(rebuilt)
        self.position = index

    def _rebuild_with_digits(
        self,
        index: int,
        output: Output,
    ) -> None:
        step = self.program[index]
        update = Application(self.program, index, self.state, self.specs[step.target], [])
        update.output = output
        coupling: Any = step.coupling

        def rule(leaf: Tensor, *stored_and_output: Any) -> Any:
            inverse = coupling.inverse_ if is_unshared(leaf) else coupling.inverse
            return inverse(leaf, *stored_and_output)

        self.position = None  # rule 6
        with torch.no_grad():
            couple_digits(update, rule, output)
        strides = self.records[index].strides
        if strides is not None:
            update.result = tuple(map(with_strides, update.result, strides))
        assert update.digits is not None
        self.state[step.target] = update.result
        self.state[digits_of(step.target)] = update.digits
        self.position = index

    def restore_target(
        self,
        index: int,
        target: tuple[Tensor, ...],
    ) -> None:
        """Put back the target before update `index`."""
        self.position = None
        self.state[self.program[index].target] = target
        self.position = index

    def resume_from(
        self,
        index: int,
        streams: SavedState,
    ) -> None:
        """Continue with the streams before update `index` that forward kept."""
        where = f"backward through {place(self.program, index)}"
        self.position = None
        self.state = {**self.state, **load_state(streams, where, "a stream that was kept")}
        self.position = index


class Recompute:
    """One update, run again."""

    __slots__ = (
        "forward_hooks",
        "hooks",
        "index",
        "pins",
        "record",
        "step",
        "stops_early",
        "walk",
    )

    outer = None  # what the function pins is its own: see `pin.Box`

    def __init__(
        self,
        walk: Walk,
        index: int,
        forward_hooks: ForwardHooks | None,
    ) -> None:
        self.walk = walk
        self.index = index
        self.step = walk.program[index]
        self.record = record = walk.records[index]
        self.forward_hooks = forward_hooks
        # If the plan kept what the function returned, or the streams before it, the function need
        # not get to its end; unless the coupling saves tensors too, which need that output.
        self.stops_early = (
            forward_hooks is not None
            and (
                forward_hooks.output is not None
                or record.before is not None
                or self.step.target_from != "output"
            )
            and record.may_stop_early
            and not walk.guards.need_output
            and len(record.shapes) == record.saved_by_function
        )
        self.hooks = RecomputeHooks()
        self.pins = 0  # how many values the function has pinned, so far

    def run(self, undo: bool) -> Output | None:
        """Run the function, and the coupling if autograd saves tensors of it.

        Returns what the function returned. Most updates are undone only after what forward saw is
        put away again: autocast, for instance, holds its casts of the weights until then.
        """
        record = self.record
        hooks = self.hooks
        coupling_saves = len(record.shapes) > record.saved_by_function
        if undo and self.step.target_from != "output":
            self._restore_target()
            undo = False
            if self.forward_hooks is None:  # nobody wants what autograd saves
                return None
        if self.forward_hooks is not None and self.forward_hooks.whole is not None:
            return self._kept(undo)
        pack = self._pack_until() if self.stops_early else hooks.pack
        try:
            push_hooks(pack, hooks.unpack)  # no call may come before it: [Note: interrupts]
            if record.output is not None:
                output = self.load(record.output)
                coupling_saves = False
            else:
                output = self._run_function()
                self._compare(record.shapes[: record.saved_by_function])
            if undo and (coupling_saves or type(self.step.coupling) not in TRUSTED):
                self.undo(output)  # the inverse of a user's own may depend on what is put back
            if coupling_saves:
                self._run_coupling(output)
                self._compare(record.shapes)
        finally:
            pop_hooks()
        if record.output is None:
            for after_recompute in self.walk.guards.after_recompute:
                after_recompute(self.index, hooks, output, self.walk.state)
        return output

    def _kept(self, undo: bool) -> Output | None:
        """What the function returned, and what autograd saved of it: both were kept.

        They serve one backward, and are freed on the way. A second one runs the function again.
        """
        forward_hooks = self.forward_hooks
        assert forward_hooks is not None
        assert forward_hooks.whole is not None
        self.hooks.extend([saved.again() for saved in forward_hooks.whole])
        forward_hooks.whole = None
        if not undo or self.record.before is not None:
            return None
        assert forward_hooks.output is not None
        return self.load(forward_hooks.output)

    def _pack_until(self) -> Callable[[Tensor], int]:
        """A hook that ends the recompute when autograd has saved all that it saved in forward."""
        return functools.partial(self.hooks.pack_until, self.record.saved_by_function)

    def _restore_target(self) -> None:
        """Make the state that before the update, whose function does not have to run for that."""
        walk = self.walk
        if self.record.before is not None:
            walk.resume_from(self.index, self.record.before)
        elif self.step.inverse is not None:
            walk.restore_target(self.index, self._inverted())
        else:
            walk.restore_target(self.index, Rerun(walk, self.index).target())

    def _inverted(self) -> tuple[Tensor, ...]:
        """The target before the update, by the inverse of its function."""
        walk = self.walk
        step = self.step
        keywords = walk.keywords_of(self.index)
        arguments = {inner: keywords[outer] for inner, outer in step.keywords.items()}
        value = read(walk.state[step.target], walk.specs[step.target], None)
        assert step.inverse is not None
        with torch.no_grad():
            value = step.inverse(value, **arguments)
        leaves = inverted_leaves(walk.program, self.index, value, walk.specs)
        strides = self.record.strides
        return leaves if strides is None else tuple(map(with_strides, leaves, strides))

    def _run_function(self) -> Output | None:
        """What the function returns; None if its output is not needed."""
        walk = self.walk
        hooks = self.forward_hooks
        update = self.application()
        keywords = walk.keywords_of(self.index)
        before = boxes.current
        try:
            boxes.current = self
            if hooks is None or not hooks.operations:
                if not self.stops_early or self.record.saved_by_function:
                    self.evaluate(update, keywords)
            else:
                reuse = ReuseOperations(hooks.operations, self.hooks)
                run_in_mode(reuse, self.evaluate, update, keywords)
        except StopRecompute:
            pass
        except (errors.RetrogradError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise errors.recompute_raised(update.where, error) from error
        finally:
            boxes.current = before
        if not self.stops_early:
            return update.output
        assert hooks is not None
        return None if hooks.output is None else self.load(hooks.output)

    def evaluate(self, update: Application, keywords: dict[str, Any]) -> None:
        """Run the function to its end."""
        evaluate(update, keywords, self.walk.guards)
        if self.pins != len(self.record.pinned):
            raise errors.other_pins(update.where, len(self.record.pinned), self.pins)

    def pin(self, value: Any) -> Any:
        """What forward had in place of `value`: see `pin`."""
        self.pins += 1
        where = place(self.walk.program, self.index)
        if self.pins > len(self.record.pinned):
            raise errors.other_pins(where, len(self.record.pinned), self.pins)
        return self.record.pinned[self.pins - 1].instead_of(value, where)

    def application(self) -> Application:
        """The update, with reads that have the `requires_grad` and the dtypes of forward."""
        walk = self.walk
        step = self.step
        needs_grad = self.record.needs_grad
        position = len(walk.state[step.target])
        views: dict[str, Any] = {}  # a stream that is read twice stays one tensor
        for name in step.reads:
            leaves = walk.state[name]
            if name not in views:
                flags = needs_grad[position : position + len(leaves)]
                views[name] = read(
                    list(map(leaf_view, leaves, flags)), walk.specs[name], self.record.dtypes[name]
                )
            position += len(leaves)
        reads = list(map(views.__getitem__, step.reads))
        spec = walk.specs[step.target]
        return Application(walk.program, self.index, walk.state, spec, reads)

    def undo(self, output: Output | None) -> None:
        """Make the state that before the update."""
        if self.record.before is not None:
            self.walk.resume_from(self.index, self.record.before)
        else:
            assert output is not None
            self.walk.rebuild(self.index, output)

    def _run_coupling(self, output: Output | None) -> None:
        """Run the coupling again, for the tensors that autograd saves of it."""
        assert output is not None
        step = self.step
        leaves = self.walk.state[step.target]
        needs_grad = iter(self.record.needs_grad)
        update = Application(self.walk.program, self.index, self.walk.state, None, [])
        update.target = tuple([leaf_view(leaf, next(needs_grad)) for leaf in leaves])
        update.output = output
        if step.gets_reads:
            reads = {
                name: tuple([leaf_view(leaf, next(needs_grad)) for leaf in self.walk.state[name]])
                for name in step.reads
            }
            update.state = {**self.walk.state, **reads}
        couple(update)

    def _compare(self, shapes: list[ShapeAndDtype]) -> None:
        """Raise unless autograd saved again what it saved in forward."""
        saved = [tensor for tensor, _ in self.hooks]
        try:
            now = list(map(shape_and_dtype, saved))
        except RuntimeError:
            now = shapes_of(saved)
        if now != shapes:
            raise errors.other_recompute(place(self.walk.program, self.index), shapes, now)

    def load(self, output: SavedOutput) -> Output:
        where = f"backward through {place(self.walk.program, self.index)}"
        what = "an output that was kept"
        return [tuple([saved.get(where, what) for saved in leaf]) for leaf in output]


class Rerun:
    """The target before an update that cannot be rebuilt, and perhaps was not kept.

    If it was not, updates run once more, from the nearest one whose target was: they all have the
    same target. What they make stays until the walk gets there.
    """

    def __init__(
        self,
        walk: Walk,
        index: int,
    ) -> None:
        self.walk = walk
        self.index = index

    def target(self) -> tuple[Tensor, ...]:
        walk = self.walk
        if self.index in walk.reruns:
            return walk.reruns.pop(self.index)
        start = self.index
        while (kept := self._kept(start)) is None:
            start -= 1
        target = kept
        for index in range(start, self.index):
            target = self._run(index, target)
            walk.reruns[index + 1] = target
        walk.reruns.pop(self.index, None)
        return target

    def _kept(self, index: int) -> tuple[Tensor, ...] | None:
        """The target before update `index`, if it is at hand."""
        walk = self.walk
        if index < 0 or walk.program[index].target != walk.program[self.index].target:
            raise errors.already_passed(place(walk.program, self.index))
        if index in walk.reruns:
            return walk.reruns[index]
        before = walk.records[index].before
        if before is None:
            return None
        where = f"backward through {place(walk.program, index)}"
        return load_leaves(before[walk.program[index].target], where, "a stream that was kept")

    def _run(
        self,
        index: int,
        target: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """The target after update `index`. What autograd saves is dropped at once."""
        walk = self.walk
        step = walk.program[index]
        back = Undo()
        gradients = torch.is_grad_enabled()
        before = walk.state
        depth = recomputing.depth
        try:
            recomputing.depth = depth + 1
            for before_recompute in walk.guards.before_recompute:
                before_recompute(index, back)
            set_grad_mode(True)
            walk.state = {**before, step.target: target}
            recompute = Recompute(walk, index, None)
            update = recompute.application()
            update.target = tuple(map(leaf_view, target, walk.records[index].needs_grad))
            box = boxes.current
            push_hooks(_drop, _drop)
            try:
                kept = walk.records[index].output
                if kept is None:
                    boxes.current = recompute
                    recompute.evaluate(update, walk.keywords_of(index))
                else:  # its function cannot run again
                    update.output = recompute.load(kept)
                couple(update)
            finally:
                boxes.current = box
                pop_hooks()
        finally:
            recomputing.depth = depth
            walk.state = before
            set_grad_mode(gradients)
            back.run()
        return tuple([leaf.detach() for leaf in update.result])


@never_compiled
def _drop(tensor: object) -> None:
    """A hook that keeps nothing."""


class RecomputeHooks(list[SavedAgain]):
    """The hooks of one recompute, and what autograd saves in it."""

    __slots__ = ()

    @never_compiled
    def pack(self, tensor: Tensor) -> int:
        slot = len(self)
        self.append((tensor, tensor._version))
        return slot

    @never_compiled
    def pack_until(self, count: int, tensor: Tensor) -> int:
        """Collect so many tensors, then end the recompute."""
        slot = self.pack(tensor)
        if slot + 1 == count:
            raise StopRecompute
        return slot

    @never_compiled
    def unpack(self, slot: int) -> Tensor:
        if slot >= len(self):
            raise errors.stale_activation()
        tensor, _ = self[slot]
        return tensor


class StopRecompute(BaseException):
    """Ends a recompute whose output is kept, once autograd has saved what it saved in forward.

    Not an `Exception`, because functions catch those.
    """
