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
from retrograd.core.guards.modules import ModuleState
from retrograd.core.guards.random_state import RandomState, generators_for
from retrograd.core.guards.versions import InputVersions, ParameterVersions
from retrograd.core.holdings import Holdings
from retrograd.core.program import Pass, Program
from retrograd.core.saved import KeywordArguments
from retrograd.core.structure import StackCache, Structure


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
    cache: StackCache,
) -> list[Guard]:
    """What surrounds updates that backward rebuilds."""
    devices = {leaf.device for leaves in run.state.values() for leaf in leaves}
    generators = [g for function in structure.distinct for g in function.holdings.generators]
    generators += Holdings([(value,) for value in arguments.objects]).generators
    autocast = Autocast(devices)
    # The first ones only look, so that they raise before anything is put back.
    guards = guards_of_plain_pass(program, precision)
    guards += [ParameterVersions(structure, program), ModuleState(structure), autocast]
    if any(structure.buffers) or structure.has_user_modules:
        guards.append(Buffers(structure, program))
    guards.append(RandomState(generators_for(devices, generators)))
    dtypes = _dtypes_in_play(run, structure, autocast)
    guards.append(Drift(program, precision, cache, dtypes))
    if untrusted(program):
        guards.append(CouplingTrial(program))
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
