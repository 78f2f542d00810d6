"""`python -m benchmarks.gpu`: it runs from end to end here, failures are results, and the docs have
the place for its table. What it measures on a GPU can only be seen on one.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import gpu, gpu_measure, gpu_table
from benchmarks.cases import CONTESTANTS

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "gpu.ipynb"
CPU = torch.device("cpu")


def check_record(record):
    """What every record has, whatever the device."""
    assert record["quick"] and set(record["seconds"]) == set(gpu.SECTIONS)
    assert record["facts"]["torch"] == torch.__version__
    rows = record["gradients"]
    assert [row["layers"] for row in rows] == [3, 3, 12, 12]
    assert {row["precision"] for row in rows} == {"float32", "bfloat16"}
    for row in rows:
        assert row["failures"] == {}
        assert row["plain_again"] == row["exact_keep"] == 0
        assert row["reverse_keep"] < 1e-5 and row["reverse_plain"] < 1e-5
    rows = record["steps"]
    assert [row["contestant"] for row in rows] == 2 * list(gpu_measure.NAMES)
    for row in rows:
        if row["contestant"] in ("plain", "checkpoint", "retrograd", "retrograd, exact"):
            assert row["failure"] is None
        if row["failure"] is None:
            assert row["activation_bytes"] > 0 and row["tokens_per_second"] > 0
            assert row["time_ratio"] > 0 and row["gradient_difference"] < 0.1
    by_name = {row["contestant"]: row for row in rows if row["blocks"] == 12}
    assert by_name["retrograd"]["activation_bytes"] < by_name["plain"]["activation_bytes"]
    assert by_name["retrograd, 25%"]["failure"] is None


def check_report(text):
    assert "| 3 layers: MiB | tokens/s | time | 12 layers: MiB |" in text
    assert "\n| plain autograd | " in text and "\n| **retrograd** | " in text
    assert "\n| 12 | bfloat16 autocast | 0 |" in text
    assert "What was run is as promised." in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {8}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "gpu.json"


def run(output, *more):
    return gpu.main(["--device", "cpu", "--quick", "--output", str(output), *more])


def test_it_runs_on_the_cpu(output, capsys):
    assert run(output) == 0
    printed = capsys.readouterr().out
    record = json.loads(output.read_text())
    check_record(record)
    check_report(printed)
    assert record["device"] == "cpu" and not record["has_allocator"]
    assert record["tests"] == {"not_run": "not for the CPU"}
    assert record["graph"] == {"not_run": "cpu has none"}
    assert not torch.are_deterministic_algorithms_enabled()
    assert gpu.main(["--table", str(output)]) == 0
    assert capsys.readouterr().out == printed
    assert [path.name for path in output.parent.iterdir()] == ["gpu.json"]


@pytest.mark.skipif(not (ROOT / "tests" / "device").exists(), reason="there is no test device")
def test_it_runs_on_the_test_device(output):
    """In a process of its own: the device has to be there before the first backward."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "rgdev", "--quick"]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [*command, "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    if done.returncode == 2 and "needs a C++ compiler" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(output.read_text())
    check_record(record)
    check_report(done.stdout)
    assert record["has_allocator"]
    assert record["tests"]["passed"] > 0 and record["tests"]["failed"] == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "name a device, such as --device cuda"),
        (["--device", "nonsense"], "--device nonsense: Expected one of"),
        (["--device", "meta"], "has no values"),
        (["--device", "cpu", "--rounds", "0"], "must be at least 1"),
        (["--device", "cpu", "--write-docs"], "the docs show a GPU"),
        (["--device", "cpu", "--output", "{folder}"], "is a folder; name a file"),
        (["--device", "cpu", "--output", "{folder}/no/gpu.json"], "no such folder"),
        (["--table", "{folder}/missing.json"], "not a record of this command"),
        (["--table", "{folder}/other.json"], "not a record of this command"),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda: Torch not compiled",
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="of a CPU build"),
        ),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, text, tmp_path, capsys):
    (tmp_path / "other.json").write_text('{"facts": []}')
    assert gpu.main([argument.format(folder=tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1


# --- failures are results


def test_a_section_that_fails_is_recorded_and_the_rest_runs(output, capsys, monkeypatch):
    def fail(*given):
        raise RuntimeError("the device is gone\nand more")

    monkeypatch.setitem(gpu.SECTIONS, "gradients", fail)
    assert run(output, "--sections", "facts", "gradients", "graph") == 1
    record = json.loads(output.read_text())
    assert record["gradients"] == {"error": "RuntimeError: the device is gone"}
    assert record["facts"] and record["graph"]
    text = "**Not as promised:** gradients ended with RuntimeError: the device is gone."
    assert text in capsys.readouterr().out


class Fails(torch.nn.Linear):
    """A network that fails in its third step."""

    def __init__(self, error):
        super().__init__(1, 1)
        self.error = error
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 2:
            raise self.error
        return x * self.weight


def not_there(blocks):
    raise ImportError("revtorch")


def test_contestants_that_fail_or_are_missing(monkeypatch):
    memory = torch.OutOfMemoryError("tried to allocate 1 TiB")
    monkeypatch.setitem(CONTESTANTS, "plain", lambda blocks: Fails(memory))
    monkeypatch.setitem(CONTESTANTS, "memcnn", lambda blocks: Fails(ValueError("a | b")))
    monkeypatch.setitem(CONTESTANTS, "revtorch", not_there)
    monkeypatch.setitem(CONTESTANTS, "revlib", lambda blocks: blocks.old)
    rows = gpu_measure.steps(gpu_measure.sizes(quick=True)[0], CPU, "float32", rounds=1)
    by_name = {row["contestant"]: row for row in rows}
    assert by_name["plain"]["failure"] == "out of memory"
    assert by_name["memcnn"]["failure"] == "ValueError: a | b"
    assert by_name["revtorch"]["failure"] == "not installed"
    assert by_name["revlib"]["failure"].startswith("AttributeError")
    ours = by_name["retrograd"]
    assert ours["failure"] is None and ours["time_ratio"] is None
    assert ours["tokens_per_second"] > 0
    record = {"device": "cpu", "date": "today", "has_allocator": False, "steps": rows}
    text = gpu_table.report(record)
    assert "| plain autograd | out of memory |  |  |" in text
    assert "| memcnn | ValueError: a \\| b |" in text
    assert "as promised" in text and not gpu_table.problems(record)


def test_a_size_that_fails_is_recorded(monkeypatch):
    def fail(*given):
        raise torch.OutOfMemoryError("weights")

    monkeypatch.setattr(gpu_measure, "pairs_on", fail)
    size = gpu_measure.sizes(quick=True)[0]
    row = gpu_measure.gradients(size, CPU, "float32")
    assert row["failures"] == {"all": "out of memory"} and row["exact_keep"] is None
    rows = gpu_measure.steps(size, CPU, "float32", rounds=1)
    assert [row["failure"] for row in rows] == ["out of memory"] * len(gpu_measure.NAMES)
    record = {"device": "cpu", "date": "today", "has_allocator": False}
    record |= {"gradients": [row], "steps": rows}
    text = gpu_table.report(record)
    assert "| 3 | float32 | – | – |" in text and "all: out of memory" in text
    assert not gpu_table.problems(record)


def test_errors_in_words():
    """The error, and the first one of those that led to it."""

    def after(error, cause):
        error.__cause__ = cause
        return gpu_measure.in_words(error)

    assert after(RuntimeError("a\nb"), KeyError("c")) == "RuntimeError: a after KeyError: 'c'"
    assert after(RuntimeError("a"), torch.OutOfMemoryError("1 TiB")) == "out of memory"
    assert after(RuntimeError("a"), RuntimeError("CUDA out of memory.")) == "out of memory"
    assert gpu_measure.in_words(ValueError()) == "ValueError: "


def test_problems_are_found():
    def row(**changes):
        same = dict.fromkeys(gpu_measure.COMPARED, 0.0)
        return {
            "layers": 9,
            "precision": "float32",
            "warnings": [],
            "failures": {},
            **same,
            **changes,
        }

    rows = [
        row(),
        row(exact_keep=1e-9),
        row(exact_keep=None),
        row(reverse_keep=1e-3),
        row(reverse_keep=None),
        row(reverse_keep=1e-3, precision="float16"),
        row(exact_keep=None, failures={"exact keep": "out of memory"}),
        row(failures={"reverse": "DriftError: far"}),
    ]
    record = {
        "gradients": rows,
        "tests": {"passed": 3, "failed": 2, "skipped": 0, "failures": []},
        "graph": [{"contestant": "retrograd", "failure": None, "equal": False, "difference": 1.0}],
    }
    assert gpu_table.problems(record) == [
        "2 device tests failed",
        "exact is not Keep to the bit (9 layers, float32)",
        "exact is not Keep to the bit (9 layers, float32)",
        "gradients off by 1e-03 (9 layers, float32)",
        "gradients off by – (9 layers, float32)",
        "reverse failed with DriftError: far (9 layers, float32)",
        "a captured step of retrograd is not equal",
    ]


def test_results_of_tests_are_counted():
    xml = """<testsuites><testsuite>
        <testcase name="a"/><testcase name="b"><failure message="no&#10;more"/></testcase>
        <testcase name="c"><error message="gone"/></testcase>
        <testcase name="d"><skipped/></testcase>
    </testsuite></testsuites>"""
    counts = gpu._counts(ElementTree.fromstring(xml).iter("testcase"))
    assert counts == {"passed": 1, "failed": 2, "skipped": 1, "failures": ["b: no", "c: gone"]}


# --- a captured step, with a device that runs at once what it should capture


@pytest.mark.parametrize("replays", [True, False])
def test_a_captured_step_is_compared_with_one_that_runs(replays, monkeypatch):
    run_step, latest = gpu_measure.step, []

    def remember(*given):
        latest[:] = given
        run_step(*given)

    stream = SimpleNamespace(wait_stream=lambda other: None)
    replay = lambda: run_step(*latest) if replays else None  # noqa: E731
    module = SimpleNamespace(
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda which: nullcontext(),
        CUDAGraph=lambda: SimpleNamespace(replay=replay),
        graph=lambda graph: nullcontext(),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(gpu_measure, "step", remember)
    rows = gpu_measure.capture(gpu_measure.sizes(quick=True)[0], CPU, "bfloat16")
    assert [row["failure"] for row in rows] == [None, None]
    assert [row["equal"] for row in rows] == [replays, replays]


def test_a_capture_that_fails_is_recorded(monkeypatch):
    monkeypatch.setattr(
        torch, "get_device_module", lambda device: SimpleNamespace(is_available=lambda: False)
    )
    rows = gpu_measure.capture(gpu_measure.sizes(quick=True)[0], CPU, "float32")
    assert all(row["failure"].startswith("AttributeError") for row in rows)
    assert len(gpu_table.problems({"graph": rows})) == 2


# --- the docs


def on_the_page():
    page = (ROOT / gpu_table.PAGE).read_text()
    return page.split(gpu_table.BEGIN)[1].split(gpu_table.END)[0].strip()


def test_the_docs_say_that_the_table_is_empty_as_long_as_it_is():
    figures = ROOT / gpu_table.FIGURES
    if figures.exists():
        assert on_the_page() == gpu_table.report(gpu_table.read(figures))
    else:
        assert on_the_page() == "**This table is empty: nobody has run it yet.**"


def test_a_record_is_written_into_the_docs(tmp_path, monkeypatch, output, capsys):
    page = tmp_path / gpu_table.PAGE
    page.parent.mkdir()
    page.write_text((ROOT / gpu_table.PAGE).read_text())
    before = page.read_text()
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    assert run(output, "--sections", "facts") == 0
    assert gpu.main(["--table", str(output), "--write-docs"]) == 2
    assert "the docs show a GPU" in capsys.readouterr().err
    assert page.read_text() == before
    left_out = {"not_run": "left out"}
    others = {"gradients": [], "steps": [], "tests": left_out, "graph": left_out}
    record = json.loads(output.read_text()) | {"device": "cuda", "quick": False, **others}
    output.write_text(json.dumps(record))
    for _ in range(2):
        assert gpu.main(["--table", str(output), "--write-docs"]) == 0
        assert json.loads((tmp_path / gpu_table.FIGURES).read_text()) == record
        written = page.read_text()
        assert "Measured on cpu, torch" in written and "is empty: nobody" not in written
        parts = [text.partition(gpu_table.BEGIN)[0] for text in (before, written)]
        parts += [text.partition(gpu_table.END)[2] for text in (before, written)]
        assert parts[0] == parts[1] and parts[2] == parts[3]


# --- the notebook


def cells(kind):
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_the_notebook_is_one_and_has_no_outputs():
    both = [*cells("markdown"), *cells("code")]
    assert len({cell["id"] for cell in both}) == len(both) > 5
    assert all("".join(cell["source"]).strip() for cell in both)
    assert not [cell for cell in cells("code") if cell["outputs"] or cell["execution_count"]]


COMMAND = re.compile(r"^(?:\w+ = )?[!%](.*)$", re.MULTILINE)  # of IPython


def test_the_code_of_the_notebook_compiles_and_its_commands_exist():
    commands = []
    for cell in cells("code"):
        source = "".join(cell["source"])
        commands += COMMAND.findall(source)
        compile(COMMAND.sub("lines = []", source), cell["id"], "exec")
    text = "\n".join("".join(cell["source"]) for cell in cells("markdown"))
    commands += re.findall(r"`(python -m [^`]+)`", text)
    assert len(commands) == 5
    for command in commands:
        words = shlex.split(command)
        if words[0] == "pip":
            assert words[1] == "install"
            assert all((ROOT / file).exists() for file in words if file.endswith(".txt"))
        else:
            assert words[:3] == ["python", "-m", "benchmarks.gpu"]
            gpu.parser().parse_args(words[3:])
    assert all((ROOT / path).exists() for path in re.findall(r"`(docs/\w+\.md)`", text))
