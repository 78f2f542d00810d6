"""The guards of a pass. Each is one file; `guard.py` says when their methods run."""

from __future__ import annotations

from typing import TypeVar

import torch

from retrograd.core import errors
from retrograd.core.exact import Precision
from retrograd.core.guard import Guard
from retrograd.core.guards.arguments import ArgumentObjects, are_opaque
from retrograd.core.guards.autocast import Autocast
from retrograd.core.guards.batched_gradients import BatchedGradients
from retrograd.core.guards.buffers import Buffers
from retrograd.core.guards.coupling_trial import CouplingTrial, has_trials
from retrograd.core.guards.drift import Drift
from retrograd.core.guards.grid_range import GridRange
from retrograd.core.guards.local_backward import LocalBackward
from retrograd.core.guards.modules import ModuleState
from retrograd.core.guards.other_threads import OtherThreads
from retrograd.core.guards.random_state import RandomState
from retrograd.core.guards.scripts import Scripts
from retrograd.core.guards.verify import Verify
from retrograd.core.guards.versions import InputVersions, ParameterVersions
from retrograd.core.guards.watching import Watching
from retrograd.core.guards.written import WrittenTensors
from retrograd.core.program import Pass, Program
from retrograd.core.readback import Readback
from retrograd.core.saved import KeywordArguments
from retrograd.core.structure import Notices, Structure, VerifyCalls


def guards_of_plain_pass(
    program: Program, precision: Precision, readback: Readback, start: str = "the input"
) -> list[Guard]:
    """What surrounds updates that run as plain autograd."""
    guards: list[Guard] = [InputVersions()]
    if precision.grid is not None:
        guards.append(GridRange(precision.grid, program, readback, start))
    return guards


def guards_of_recorded_pass(
    run: Pass,
    program: Program,
    structure: Structure,
    arguments: KeywordArguments,
    precision: Precision,
    notices: Notices,
) -> list[Guard]:
    """What surrounds updates that backward rebuilds."""
    readback = Readback()
    devices = {leaf.device for leaves in run.state.values() for leaf in leaves}
    devices |= structure.random_devices
    generators = [g for g in arguments.objects if isinstance(g, torch.Generator)]
    generators += structure.generators
    autocast = Autocast(devices)
    random_state = RandomState(devices, generators, structure.draws)
    dtypes = _dtypes_in_play(run, structure, autocast)
    # The first ones only look, so that they raise before anything is put back.
    guards = guards_of_plain_pass(program, precision, readback)
    guards += [ParameterVersions(structure, program), ModuleState(structure), autocast]
    if any(structure.buffers) or structure.has_user_modules:
        guards.append(Buffers(structure, program))
    if structure.has_written:
        guards.append(WrittenTensors(structure))
    guards += [random_state, OtherThreads(program, random_state), LocalBackward(structure)]
    guards.append(BatchedGradients())
    if arguments.objects and are_opaque(arguments.objects):
        guards.append(ArgumentObjects(arguments.objects, program))
    if structure.has_scripts:
        guards.append(Scripts())
    if structure.forgets_casts:
        guards.append(_fsdp_casts(structure))
    guards.append(Drift(program, precision, notices, dtypes, readback))
    return guards


def _fsdp_casts(structure: Structure) -> Guard:
    from retrograd.core.guards.fsdp_casts import FsdpCasts  # few need it: torch before 2.13

    return FsdpCasts(structure)


def guards_in_capture(
    guards: list[Guard], structure: Structure, precision: Precision
) -> list[Guard]:
    """Those guards that work while a graph is captured. Raise if others are needed.

    [Note: graph capture] While work is captured (`torch.cuda.graph`), nothing runs: there are no
    values to look at, and the states of generators cannot be read.
    """
    if structure.draws:
        raise errors.capture_draws()
    if precision.drift != "ignore":
        raise errors.capture_looks(f"drift={precision.drift!r}")
    return [guard for guard in guards if not isinstance(guard, (Drift, GridRange))]


def guards_of_inspection(
    guards: list[Guard],
    program: Program,
    structure: Structure,
    precision: Precision,
    notices: Notices,
    verify: VerifyCalls,
) -> list[Guard]:
    """What `guards` need beside them to watch functions, and to verify them unless it is "never".

    See [Note: which calls are inspected].
    """
    added: list[Guard] = []
    buffers = find(guards, Buffers)
    if buffers is None:
        buffers = Buffers(structure, program)
        added.append(buffers)
    written = find(guards, WrittenTensors)
    if written is None:
        written = WrittenTensors(structure)
        added.append(written)
    modules = find(guards, ModuleState)
    random_state = find(guards, RandomState)
    versions = find(guards, ParameterVersions)
    assert modules is not None
    assert random_state is not None
    assert versions is not None
    is_verified = verify != "never"
    watching = Watching(structure, modules, random_state, buffers, written, versions, is_verified)
    added.append(watching)
    if has_trials(program):
        added.append(CouplingTrial(program, precision.grid))
    if is_verified:
        drift = find(guards, Drift)
        epsilon = drift.epsilon if drift is not None else 0.0
        readback = drift.readback if drift is not None else Readback()
        added.append(Verify(program, structure, watching, precision, notices, epsilon, readback))
    return added


AnyGuard = TypeVar("AnyGuard", bound=Guard)


def find(guards: list[Guard], kind: type[AnyGuard]) -> AnyGuard | None:
    return next((guard for guard in guards if isinstance(guard, kind)), None)


def _dtypes_in_play(
    run: Pass, structure: Structure, autocast: Autocast
) -> list[torch.dtype | None]:
    """The dtypes that functions compute in, whatever they return."""
    return [
        *structure.dtypes,
        *(state[0] for state in autocast.states if state is not None),
        *(dtype for dtypes in run.caller_dtypes.values() for dtype in dtypes or ()),
    ]
