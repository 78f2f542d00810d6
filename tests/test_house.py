"""The house: what is public, which way imports run, how simple its functions are."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import retrograd as rg
from benchmarks import house

SOURCE = Path(rg.__file__).parent
CORE = sorted((SOURCE / "core").rglob("*.py"))

PUBLIC = [
    *("ReversibleSequence", "Duplicate", "Split", "AtRest"),
    *("Residual", "Euler", "Midpoint", "Leapfrog", "Blend", "Bdia", "TwoStep"),
    *("convert", "revert"),
    *("Reversible", "Update", "Transform", "WithAux"),
    *("Coupling", "Additive", "Affine", "Scaled", "Momentum"),
    *("Reverse", "Keep", "Anchor"),
    *("MemoryMode", "Call", "Plan", "Choice"),
    *("Budget", "BudgetError", "StepPlan"),
    "Grid",
    *("Chunked", "pin", "is_recomputing"),
    *(
        "RetrogradError",
        "OutputError",
        "InPlaceError",
        "RecomputeError",
        "CouplingError",
        "ConversionError",
        "DriftError",
        "DriftWarning",
        "GridError",
    ),
    "compat",
    *("set_memory", "plan", "stacks_of"),
    "measure",
    *("Report", "check"),
]


def test_the_public_names_are_frozen():
    """Adding or removing one is a decision: docs and changelog change in the same commit."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    exported = [
        alias.asname
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert exported == PUBLIC
    assert sorted(rg.__all__) == sorted(PUBLIC)
    assert all(getattr(rg, name).__doc__ for name in PUBLIC)


def test_completion_shows_public_names_only():
    assert dir(rg) == sorted([*PUBLIC, "__version__"])
    assert dir(rg.measure) == ["Flops", "LiveBytes", "Measurement", "activation_bytes", "step"]


def test_a_name_that_goes_is_there_for_one_release_and_warns(monkeypatch):
    monkeypatch.setitem(rg._RENAMED, "OldKeep", "Keep")
    with pytest.warns(DeprecationWarning, match="retrograd.OldKeep is now retrograd.Keep") as seen:
        assert rg.OldKeep is rg.Keep
    assert seen[0].filename == __file__
    with pytest.raises(AttributeError, match="no attribute 'Kept'"):
        rg.Kept  # noqa: B018


def test_errors_are_children_of_one():
    errors = [getattr(rg, name) for name in PUBLIC if name.endswith("Error")]
    assert all(issubclass(error, rg.RetrogradError) for error in errors)
    assert issubclass(rg.RetrogradError, RuntimeError)


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_the_core_imports_torch_and_itself_only():
    allowed = set(sys.stdlib_module_names) | {"torch"}
    for path in CORE:
        for name in imported(path):
            assert name.split(".")[0] in allowed or name.startswith("retrograd.core"), (
                path.name,
                name,
            )


def test_torch_is_used_through_its_public_names():
    """What is private of torch is named in core/private.py, with what would replace it."""
    private = re.compile(
        r"torch\._(?!_version)|torch\.[a-z.]*\._|import "
        r"_|_current_level|_post_accumulate|_storage_Use_Count"
    )
    for path in SOURCE.rglob("*.py"):
        if path.name not in ("private.py", "seams.py"):
            found = [line for line in path.read_text().splitlines() if private.search(line)]
            assert not found, (path.name, found)


def test_functions_are_simple():
    """Ruff checks C901 (pyproject.toml). This also counts boolean operators and comprehensions."""
    worst, name = house.by_all_branches(SOURCE.rglob("*.py"))[0]
    assert worst <= 20, name


def test_the_core_is_not_dense():
    assert house.tokens_per_line(CORE) <= 8


def test_nothing_is_named_for_nothing_in_particular():
    assert not {path.stem for path in SOURCE.rglob("*.py")} & {
        "utils",
        "util",
        "helpers",
        "common",
        "misc",
    }


def test_importing_loads_nothing_but_torch():
    """In a process of its own: which top-level packages does `import retrograd` add to those of
    `import torch`?
    """
    code = (
        "import sys, torch; before = set(sys.modules); import retrograd; "
        "print(*(set(sys.modules) - before))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {name.split(".")[0] for name in found} <= {"retrograd", "torch"} | set(
        sys.stdlib_module_names
    )
    assert "torch._dynamo" not in found  # seconds
