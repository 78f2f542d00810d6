"""retrograd: train very deep PyTorch networks without storing their activations."""

import typing

# first, because it says in a clear line if this torch is too old, too new or lacks something
import retrograd.core.private  # noqa: F401

# the usual case: a stack of (f, g) pairs
from retrograd.sequence import ReversibleSequence as ReversibleSequence
from retrograd.core.streams import Duplicate as Duplicate, Split as Split, AtRest as AtRest

# a residual network: a list of single layers, and the rule by which its states follow each other
from retrograd.residual import Residual as Residual
from retrograd.rules import (
    Euler as Euler,
    Midpoint as Midpoint,
    Leapfrog as Leapfrog,
    Blend as Blend,
    Bdia as Bdia,
    TwoStep as TwoStep,
)

# an existing model, made reversible in place
from retrograd.converting import convert as convert, revert as revert

# the general case: a program of updates over named streams
from retrograd.reversible import (
    Reversible as Reversible,
    Update as Update,
    Transform as Transform,
)
from retrograd.core.updates import WithAux as WithAux

# how a function's output enters its target
from retrograd.core.updates import (
    Coupling as Coupling,
    Additive as Additive,
    Affine as Affine,
    Scaled as Scaled,
    Momentum as Momentum,
)

# what is kept and what is rebuilt
from retrograd.core.memory import Reverse as Reverse, Keep as Keep, Anchor as Anchor
from retrograd.core.memory import (
    MemoryMode as MemoryMode,
    Call as Call,
    Plan as Plan,
    Choice as Choice,
)
from retrograd.budget import Budget as Budget, BudgetError as BudgetError
from retrograd.stepplan import StepPlan as StepPlan

# how exactly
from retrograd.core.exact import Grid as Grid

# inside a function
from retrograd.chunked import Chunked as Chunked
from retrograd.core.pin import pin as pin
from retrograd.core.walk import is_recomputing as is_recomputing

# what can go wrong
from retrograd.core.errors import (
    RetrogradError as RetrogradError,
    OutputError as OutputError,
    InPlaceError as InPlaceError,
    RecomputeError as RecomputeError,
    CouplingError as CouplingError,
    ConversionError as ConversionError,
    DriftError as DriftError,
    DriftWarning as DriftWarning,
    GridError as GridError,
)

# the systems that it grew out of, with their own names (after everything that they use)
from retrograd import compat as compat

# all stacks of a model
from retrograd.whole_model import set_memory as set_memory, plan as plan, stacks_of as stacks_of

# counting bytes, FLOPs and calls
from retrograd import measure as measure

# proof on a network of yours
from retrograd.checking import Report as Report, check as check

__version__ = "0.1.0"

__all__ = [
    "Additive",
    "Affine",
    "Anchor",
    "AtRest",
    "Bdia",
    "Blend",
    "Budget",
    "BudgetError",
    "Call",
    "Choice",
    "Chunked",
    "ConversionError",
    "Coupling",
    "CouplingError",
    "DriftError",
    "DriftWarning",
    "Duplicate",
    "Euler",
    "Grid",
    "GridError",
    "InPlaceError",
    "Keep",
    "Leapfrog",
    "MemoryMode",
    "Midpoint",
    "Momentum",
    "OutputError",
    "Plan",
    "RecomputeError",
    "Report",
    "Residual",
    "RetrogradError",
    "Reverse",
    "Reversible",
    "ReversibleSequence",
    "Scaled",
    "Split",
    "StepPlan",
    "Transform",
    "TwoStep",
    "Update",
    "WithAux",
    "check",
    "compat",
    "convert",
    "is_recomputing",
    "measure",
    "pin",
    "plan",
    "revert",
    "set_memory",
    "stacks_of",
]

# A public name that goes stands here for one minor release: its old name, and its new one.
_RENAMED: dict[str, str] = {}


def __dir__() -> list[str]:
    """What completion shows."""
    return [*__all__, "__version__"]


if not typing.TYPE_CHECKING:  # for type checkers, a name that is not there is a mistake

    def __getattr__(name):
        if name not in _RENAMED:
            raise AttributeError(f"module 'retrograd' has no attribute {name!r}", name=name)
        import warnings

        new = _RENAMED[name]
        message = f"retrograd.{name} is now retrograd.{new}, and goes in the next minor release."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return globals()[new]
