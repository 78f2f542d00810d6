"""The guards of a pass. Each is one file; `guard.py` says when their methods run."""

from __future__ import annotations

import torch

from retrograd.core.exact import Precision
from retrograd.core.guard import Guard
from retrograd.core.guards.autocast import Autocast
from retrograd.core.guards.buffers import Buffers
from retrograd.core.guards.coupling_trial import CouplingTrial, untrusted
from retrograd.core.guards.drift import Drift
from retrograd.core.guards.grid_range import GridRange
from retrograd.core.guards.local_backward import LocalBackward
from retrograd.core.guards.modules import ModuleState
from retrograd.core.guards.random_state import RandomState, generators_for
from retrograd.core.guards.verify import Verify
from retrograd.core.guards.versions import InputVersions, ParameterVersions
from retrograd.core.guards.watching import Watching
from retrograd.core.guards.written import WrittenTensors
from retrograd.core.program import Pass, Program
from retrograd.core.saved import KeywordArguments
from retrograd.core.structure import Notices, Structure, VerifyCalls


def guards_of_plain_pass(
    program: Program, precision: Precision, start: str = "the input"
) -> list[Guard]:
    """What surrounds updates that run as plain autograd."""
    guards: list[Guard] = [InputVersions()]
    if precision.grid is not None:
        guards.append(GridRange(precision.grid, program, start))
    return guards


def guards_of_recorded_pass(
    run: Pass,
    program: Program,
    structure: Structure,
    arguments: KeywordArguments,
    precision: Precision,
    notices: Notices,
    inspect: VerifyCalls | None,
) -> list[Guard]:
    """What surrounds updates that backward rebuilds.

    With `inspect`, functions are watched, and verified unless it is "never":
    [Note: which calls are inspected].
    """
    devices = {leaf.device for leaves in run.state.values() for leaf in leaves}
    generators = [g for g in arguments.objects if isinstance(g, torch.Generator)]
    generators += structure.generators
    autocast = Autocast(devices)
    buffers = Buffers(structure, program)
    written = WrittenTensors(structure)
    random_state = RandomState(generators_for(devices, generators), structure.draws)
    dtypes = _dtypes_in_play(run, structure, autocast)
    # The first ones only look, so that they raise before anything is put back.
    guards = guards_of_plain_pass(program, precision)
    versions = ParameterVersions(structure, program)
    guards += [versions, ModuleState(structure), autocast]
    if inspect is not None or any(structure.buffers) or structure.has_user_modules:
        guards.append(buffers)
    if inspect is not None or structure.has_written:
        guards.append(written)
    guards.append(random_state)
    guards.append(LocalBackward(structure))
    guards.append(Drift(program, precision, notices, dtypes))
    if untrusted(program):
        guards.append(CouplingTrial(program))
    if inspect is not None:
        watching = Watching(structure, random_state, buffers, written, versions)
        guards.append(watching)
        if inspect != "never":
            is_exact = precision.grid is not None
            guards.append(Verify(program, structure, watching, is_exact, dtypes))
    return guards


def _dtypes_in_play(
    run: Pass, structure: Structure, autocast: Autocast
) -> list[torch.dtype | None]:
    """The dtypes that functions compute in, whatever they return."""
    return [
        *structure.dtypes,
        *(state[0] for state in autocast.states if state is not None),
        *(dtype for dtypes in run.caller_dtypes.values() for dtype in dtypes or ()),
    ]
