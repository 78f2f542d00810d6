"""The package: what is in the wheel and in the sdist, that each installs into an empty environment
and works there, and what `import retrograd` costs.

Installing takes the network; without it: `-k "not empty_environment"`.
"""

import email
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import retrograd as rg

ROOT = Path(__file__).parents[1]
NAME = f"retrograd-{rg.__version__}"

# What building and testing from the sdist takes: all that a clone has, except how CI starts.
FOLDERS = (
    *("src", "tests", "speedrun", "benchmarks"),
    *("compatibility", "examples", "notebooks", "docs"),
)
FILES = (
    *("README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE"),
    *("pyproject.toml", "constraints.txt", "conftest.py", "Makefile", "mkdocs.yml", ".gitignore"),
)
# What work leaves behind, and no package may have.
LITTER = (
    *(
        "src/retrograd/__pycache__/budget.cpython-310.pyc",
        "src/retrograd/core/__pycache__/tape.cpython-310.pyc",
    ),
    *("src/retrograd.egg-info/PKG-INFO", "tests/__pycache__/zoo.cpython-310.pyc"),
    *(
        "benchmarks/results/steps.jsonl",
        "examples/out/reformer.png",
        "runs/001/metrics.jsonl",
    ),
    *(
        "dist/retrograd-0.0.1-py3-none-any.whl",
        "build/lib/retrograd/__init__.py",
        "site/index.html",
    ),
    *(
        ".venv/lib/module.py",
        ".hypothesis/example",
        ".pytest_cache/README.md",
        ".ruff_cache/content",
    ),
)


def run(*command, cwd, **environment):
    """The output of a command that knows nothing of this process's paths; its errors, if it
    fails.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "COV_", "VIRTUAL_ENV"))
    }
    environment = {
        **inherited,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, (
        f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


def content(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


# --- what is in the packages


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the source as it is cloned."""
    tree = tmp_path_factory.mktemp("tree")
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name,
            tree / name,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "results", "out"),
        )
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def built(tree, tmp_path_factory):
    """A folder with the sdist, and the wheel that is built from it: by `python -m build`, in a tree
    that was worked in.
    """
    used, built = tmp_path_factory.mktemp("used"), tmp_path_factory.mktemp("built")
    shutil.copytree(tree, used, dirs_exist_ok=True)
    for name in LITTER:
        (used / name).parent.mkdir(parents=True, exist_ok=True)
        (used / name).write_text("litter")
    before = content(used)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", built, used, cwd=built)
    assert content(used) == before, "building leaves the tree as it was"
    assert sorted(path.name for path in built.iterdir()) == [
        f"{NAME}-py3-none-any.whl",
        f"{NAME}.tar.gz",
    ]
    return built


def unzipped(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def wheel(built):
    return unzipped(built / f"{NAME}-py3-none-any.whl")


@pytest.fixture(scope="module")
def metadata(wheel):
    return email.message_from_bytes(wheel[f"{NAME}.dist-info/METADATA"])


def test_the_wheel_is_the_source_and_nothing_else(tree, wheel):
    ours = {name: data for name, data in wheel.items() if not name.startswith(f"{NAME}.dist-info/")}
    source = {
        f"retrograd/{name}": data for name, data in content(tree / "src" / "retrograd").items()
    }
    missing, strange = sorted(source.keys() - ours.keys()), sorted(ours.keys() - source.keys())
    assert not missing and not strange
    assert ours == source
    assert "retrograd/py.typed" in ours
    about = {name.removeprefix(f"{NAME}.dist-info/") for name in wheel.keys() - ours.keys()}
    assert about == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def test_the_sdist_is_a_clone(tree, built):
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        members = {
            member.name: archive.extractfile(member).read()
            for member in archive.getmembers()
            if member.isfile()
        }
    found = {name.removeprefix(f"{NAME}/"): data for name, data in members.items()}
    assert found.pop("PKG-INFO")
    cloned = content(tree)
    missing, strange = sorted(cloned.keys() - found.keys()), sorted(found.keys() - cloned.keys())
    assert not missing, "add them to tool.hatch.build.targets.sdist in pyproject.toml"
    assert not strange, "not in a clone"
    assert found == cloned


def test_the_tree_gives_the_same_wheel_as_the_sdist(tree, wheel, tmp_path):
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--wheel",
        "--outdir",
        tmp_path,
        tree,
        cwd=tmp_path,
    )
    (straight,) = tmp_path.glob("*.whl")
    assert unzipped(straight) == wheel


def test_the_library_needs_torch_alone(metadata):
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(needed) == 1 and needed[0].startswith("torch>=")
    extras = {"plots", "train", "integrations", "test", "examples", "lint", "dev"}
    assert set(metadata.get_all("Provides-Extra")) >= extras


def test_the_page_of_the_package(tree, metadata):
    assert metadata["Name"] == "retrograd" and metadata["Version"] == rg.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Summary"] and "\n" not in metadata["Summary"]
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert (
        metadata.get_payload(decode=True).decode().strip()
        == (tree / "README.md").read_text().strip()
    )


def test_the_citation_has_the_version():
    assert f"\nversion: {rg.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_licence_is_in_both(tree, wheel, metadata):
    assert wheel[f"{NAME}.dist-info/licenses/LICENSE"] == (tree / "LICENSE").read_bytes()
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert (metadata["License-Expression"] or metadata["License"]).startswith("MIT")


def test_the_index_would_take_them(built):
    if importlib.util.find_spec("twine") is None:
        pytest.skip("twine is not installed")
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)


# --- installed


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """The Python of an environment that has pip and torch alone.

    What torch consists of is linked, not installed: copying it takes most of a minute.
    """
    folder = tmp_path_factory.mktemp("empty")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    for file in {file for name in needed_by("torch") for file in top_level_files(name)}:
        if not (packages / file.name).exists():  # the environment has setuptools
            (packages / file.name).symlink_to(file)
    return folder / "venv" / "bin" / "python"


def needed_by(name, found=()):
    """A distribution and those that it needs, if they are installed."""
    if name in found:
        return set(found)
    found = {*found, name}
    for line in distribution(name).requires or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found |= needed_by(requirement.name.lower(), found)
    return found


def top_level_files(name):
    """The files and folders of a distribution in `site-packages`."""
    found = distribution(name)
    site = Path(found.locate_file("")).resolve()
    names = {file.parts[0] for file in found.files or [] if file.parts[0] != ".."}
    return [site / name for name in names - {"__pycache__"}]


@pytest.mark.parametrize("kind", ["whl", "tar.gz"])
def test_it_installs_into_an_empty_environment_and_works(kind, empty, built, tmp_path):
    """pip builds the sdist as it does for a user: in isolation."""
    (package,) = built.glob(f"*.{kind}")
    shutil.copy(ROOT / "tests" / "smoke.py", tmp_path)
    fresh = (
        ["--no-cache-dir"] if kind == "tar.gz" else []
    )  # or pip may take what it once built from a file of this path
    # Without dependencies: pip would replace a torch that it does not want, and that is linked.
    run(empty, "-m", "pip", "install", *fresh, "--no-deps", package, cwd=tmp_path)
    run(empty, "-m", "pip", "check", cwd=tmp_path)
    try:
        printed = run(empty, "-I", "smoke.py", cwd=tmp_path)
        assert printed.startswith(f"retrograd {rg.__version__} on torch")
        assert str(ROOT) not in printed
        installed = json.loads(run(empty, "-m", "pip", "list", "--format", "json", cwd=tmp_path))
        assert not {one["name"] for one in installed} & {
            "numpy",
            "matplotlib",
            "safetensors",
            "rich",
            "pytest",
        }
    finally:
        run(empty, "-m", "pip", "uninstall", "--yes", "retrograd", cwd=tmp_path)
    left = run(
        empty,
        "-I",
        "-c",
        "import importlib.util; print(importlib.util.find_spec('retrograd'))",
        cwd=tmp_path,
    )
    assert left.strip() == "None", "uninstalling leaves nothing"


# --- what an import costs


@pytest.fixture(scope="module")
def added():
    """The modules that `import retrograd` adds to those of `import torch`, in a process of
    its own.
    """
    code = (
        "import sys, torch; before = set(sys.modules); import retrograd; "
        "print(*(set(sys.modules) - before))"
    )
    return set(importing(code).split())


def importing(code):
    """What a new interpreter prints that finds retrograd where this one does."""
    return run(
        sys.executable,
        "-W",
        "ignore",
        "-c",
        code,
        cwd=ROOT,
        PYTHONPATH=str(Path(rg.__file__).parents[1]),
    )


def test_importing_adds_the_library_and_two_modules_of_torch(added):
    others = {
        name for name in added if name.split(".")[0] not in {"retrograd", *sys.stdlib_module_names}
    }
    assert others <= {
        "torch.utils.flop_counter",
        "torch.utils.module_tracker",
    }  # measure.py counts with them
    assert len([name for name in added if not name.startswith("retrograd")]) < 10


def test_importing_adds_nothing_that_only_commands_tests_or_others_need(added):
    """The test above implies it. This one says what: each takes longer to load than all of
    retrograd.
    """
    parts = {f"retrograd.{name}" for name in ("cli", "models")}
    of_torch = {
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.fsdp",
        "torch.onnx",
        "torch.utils.tensorboard",
    }
    others = {"numpy", "matplotlib", "rich", "safetensors", "hypothesis", "sympy", "scipy"}
    assert not (parts | of_torch) & added
    assert not others & {name.split(".")[0] for name in added}


def test_importing_makes_few_calls_beside_those_of_torch():
    """Function calls, of Python and of C, counted by the interpreter: 32 thousand, and 1.3 million
    of torch. Most of them make the small classes: 300 for each named tuple.
    """
    code = """
import sys
calls = 0
def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)
import torch
of_torch, calls = calls, 0
import retrograd
sys.setprofile(None)
print(of_torch, calls)
"""
    of_torch, ours = map(int, importing(code).split())
    assert ours < of_torch / 30, (ours, of_torch)


def test_importing_takes_little_time_beside_that_of_torch():
    """A twentieth, measured in each of a few processes; the best of them, as another program can
    only add.
    """
    code = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import retrograd
print((time.perf_counter() - middle) / (middle - start))
"""
    ratios = []
    while len(ratios) < 5 and not any(ratio < 0.25 for ratio in ratios):
        ratios.append(float(importing(code)))
    assert min(ratios) < 0.25, ratios
