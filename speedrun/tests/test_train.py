"""`python -m speedrun`: a run that was killed and resumed ends with the same bits."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from speedrun import checkpoints
from speedrun.__main__ import main
from speedrun.model import LanguageModel
from speedrun.settings import Settings
from speedrun.text import Text, TextError, bigram_bits, read_text

ROOT = Path(__file__).parents[2]
TINY = "--depth 2 --width 16 --heads 2 --context 16 --batch 4 --warmup 3".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"the square of {i} is {i * i}.\n" for i in range(2000)))
    return path


def command(*arguments, processes=1):
    launch = (
        ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    )
    return [sys.executable, *launch, "-m", "speedrun", *map(str, arguments)]


def start(command, **options):
    """A process in the root of the repository, where `python -m speedrun` works."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"preexec_fn": in_the_foreground, **options}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **options)


def in_the_foreground():
    """The background jobs of a script inherit ignored signals, and the trainer goes on ignoring
    them.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def run_to_end(command):
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def train(*arguments, processes=1, check=True):
    done = run_to_end(command("train", *arguments, processes=processes))
    assert not check or done.returncode == 0, done.stderr
    return done


def descendants(pid):
    """The processes that a process has started, and those have: torchrun starts its own in sessions
    of theirs.
    """
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]


def curve(run):
    """The loss of every step."""
    return [
        json.loads(line)["bits_per_byte"]
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


def weights(run):
    """Of the newest checkpoint, with the optimizer's moments."""
    settings = Settings.read(run / "configuration.json")
    model = LanguageModel(settings.config())
    moments = {
        f"{name}/{key}": torch.zeros_like(p)
        for name, p in model.named_parameters()
        for key in checkpoints.MOMENTS
    }
    checkpoints.load_into(
        checkpoints.newest(run, pytest.fail)[0],
        {"model": dict(model.named_parameters()), "optimizer": moments},
    )
    return {**dict(model.named_parameters()), **moments}


# --- a run, and what it writes


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("finished") / "run"
    done = train(
        *TINY, "--data", data, "--steps", 60, "--save-every", 10, "--dropout", 0.1, "--out", run
    )
    return run, done


def test_it_learns_and_says_what_it_took(finished):
    run, done = finished
    losses = curve(run)
    assert len(losses) == 60
    assert losses[-1] < losses[0] - 2
    for text in (
        "activations of a step, 2 layers",
        "the same with 8 layers",
        "plain autograd, 2 layers",
        "bits/byte",
        "a sample:",
    ):
        assert text in done.stdout
    assert "parameters, 2 layers" in done.stderr
    assert {path.name for path in run.iterdir()} >= {
        "configuration.json",
        "metrics.jsonl",
        "checkpoints",
        "loss.png",
        "memory.png",
    }
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [
        "00000040",
        "00000050",
        "00000060",
    ]
    facts = json.loads((run / "summary.json").read_text())
    assert (
        facts["deeper_activation_bytes"]
        <= 1.01 * facts["activation_bytes"]
        < facts["plain_activation_bytes"]
    )


def test_sampling(finished, capsys):
    run, _ = finished
    assert main(["sample", str(run), "--prompt", "the ", "--count", "20"]) == 0
    written = capsys.readouterr().out
    assert written.startswith("the ")
    assert main(["sample", str(run), "--prompt", "the ", "--count", "20"]) == 0
    assert capsys.readouterr().out == written
    for mistake in (["--temperature", "nan"], ["--seed", "-1"], ["--count", "-1"]):
        assert main(["sample", str(run), *mistake]) == 2
    process = start(
        command("sample", run, "--prompt", "ünï", "--temperature", "1e-45"), stdout=subprocess.PIPE
    )
    assert process.stdout.read(3)
    process.stdout.close()  # as `head` does
    assert process.wait(60) == 141


@pytest.mark.integration
def test_metrics_go_to_tensorboard(data, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    train(*TINY, "--data", data, "--steps", 5, "--out", run)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("bits_per_byte")]
    assert [step for step, _ in found] == [1, 2, 3, 4, 5]
    assert torch.allclose(torch.tensor([value for _, value in found]), torch.tensor(curve(run)))


# --- killed


@pytest.mark.parametrize(("processes", "options"), [(1, []), (2, []), (2, ["--shard"])])
def test_killed_at_any_moment_it_ends_with_the_same_bits(
    finished, data, tmp_path, processes, options
):
    arguments = [
        *TINY,
        "--data",
        data,
        "--steps",
        60,
        "--save-every",
        10,
        "--dropout",
        0.1,
        *options,
    ]
    run = tmp_path / "run"
    if processes > 1:  # a sum over processes rounds differently, so they are compared with theirs
        whole = tmp_path / "whole"
        train(*arguments, "--out", whole, processes=processes)
    else:
        whole, _ = finished
    moments, resume = random.Random(processes), []
    kills = [moments.randint(1, 25), moments.randint(26, 50)]
    for kill_after in kills if processes == 1 else kills[1:]:
        process = start(
            command("train", *(resume or arguments), "--out", run, processes=processes),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            metrics = run / "metrics.jsonl"
            if metrics.exists() and len(metrics.read_text().splitlines()) >= kill_after:
                break
            time.sleep(0.002)
        time.sleep(moments.random() / 20)
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        resume = ["--resume"]
    train(*resume, "--out", run, processes=processes)
    assert curve(run) == curve(whole)
    got, expected = weights(run), weights(whole)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_two_processes_have_the_curve_of_one(data, tmp_path, capsys):
    curves = []
    for name, processes, options in (("one", 1, []), ("two", 2, []), ("sharded", 2, ["--shard"])):
        run = tmp_path / name
        train(
            *TINY,
            "--data",
            data,
            "--steps",
            20,
            "--accumulate",
            2,
            *options,
            "--out",
            run,
            processes=processes,
        )
        curves.append(torch.tensor(curve(run)))
    for other in curves[1:]:
        assert torch.allclose(curves[0], other, rtol=1e-4)
    assert main(["sample", str(run), "--count", "3"]) == 0  # of a sharded run, by one process
    assert len(capsys.readouterr().out) >= 7


def test_kept_and_reversed_exact_runs_have_the_same_bits(data, tmp_path):
    found = []
    for memory in ("keep", "reverse"):
        run = tmp_path / memory
        train(
            *TINY,
            "--data",
            data,
            "--steps",
            20,
            "--memory",
            memory,
            "--exact",
            "--dtype",
            "bfloat16",
            "--out",
            run,
        )
        found.append((curve(run), weights(run)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_and_says_how_to_go_on(data, tmp_path, number):
    run = tmp_path / "run"
    process = start(
        command("train", *TINY, "--data", data, "--steps", 100000, "--out", run),
        stderr=subprocess.PIPE,
    )
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text()):
        time.sleep(0.01)
    process.send_signal(number)
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    steps = len(curve(run))
    assert f"interrupted after step {steps}, and saved. Go on with: " in errors
    assert f"-m speedrun train --resume --out {run}" in errors
    assert "Traceback" not in errors
    assert checkpoints.steps(run)[-1] == steps


# --- damaged


def test_a_damaged_checkpoint_is_passed_over(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    newest = run / "checkpoints" / "00000060"
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "model.safetensors").write_bytes(content)
    (run / "checkpoints" / "00000050" / "optimizer.safetensors").unlink()
    assert main(["sample", str(run), "--count", "1"]) == 0
    errors = capsys.readouterr().err
    assert (
        "00000060 is damaged (the checksum of model.safetensors is wrong); trying the one before "
        "it" in errors
    )
    assert "00000050 is damaged" in errors
    for path in (run / "checkpoints").glob("*/state.json"):
        path.write_text("{")
    assert main(["train", "--resume", "--out", str(run)]) == 2
    assert "no checkpoint to go on from, all of them are damaged" in capsys.readouterr().err


def test_a_checkpoint_never_runs_code(finished, tmp_path, capsys):
    """A pickle that would leave a file behind, under every name that is read."""

    class Malicious:
        def __reduce__(self):
            return Path.touch, (tmp_path / "was here",)

    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    evil = pickle.dumps(Malicious())
    for path in (run / "checkpoints").glob("*/*.safetensors"):
        path.write_bytes(evil)
        facts = json.loads((path.parent / "state.json").read_text())
        facts["sha256"][path.name] = checkpoints.checksum(path)
        (path.parent / "state.json").write_text(json.dumps(facts))
    assert main(["sample", str(run)]) == 2
    assert "all of them are damaged" in capsys.readouterr().err
    assert not (tmp_path / "was here").exists()


def test_a_full_disk_loses_nothing(finished, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    (run / "checkpoints" / "00000060" / "state.json").unlink()

    def full(tensors, path):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("safetensors.torch.save_file", full)
    assert main(["train", "--resume", "--out", str(run)]) == 2
    errors = capsys.readouterr().err
    assert (
        "No space left on device" in errors
        and "The checkpoints before it are as they were" in errors
    )
    assert not list((run / "checkpoints").glob("*.part"))
    assert checkpoints.newest(run, lambda line: None)[1]["step"] == 50


@pytest.mark.parametrize(("processes", "options"), [(1, []), (2, ["--shard"])])
def test_a_checkpoint_that_cannot_be_written_is_told_in_a_line(data, tmp_path, processes, options):
    """Files may have 24 KiB here, as a full disk would allow."""
    run = tmp_path / "run"
    line = shlex.join(
        command(
            "train",
            *TINY,
            "--data",
            data,
            "--steps",
            5,
            *options,
            "--out",
            run,
            processes=processes,
        )
    )
    done = run_to_end(["bash", "-c", f"ulimit -f 24; {line}"])
    assert done.returncode != 0
    (told,) = [line for line in done.stderr.splitlines() if "cannot be saved" in line]
    assert told.startswith("speedrun train: step 5 cannot be saved in")
    assert "File too large" in told
    assert not list((run / "checkpoints").iterdir())
    if processes == 1:
        assert "Traceback" not in done.stderr


def test_a_run_without_a_checkpoint_begins_again(data, tmp_path):
    """It failed, or was killed, before its first one."""
    run = tmp_path / "run"
    whole = tmp_path / "whole"
    for folder in (run, whole):
        train(*TINY, "--data", data, "--steps", 4, "--out", folder)
    shutil.rmtree(run / "checkpoints")
    done = train("--resume", "--out", run)
    assert "no checkpoint yet: beginning again" in done.stderr
    assert curve(run) == curve(whole)


def test_a_sharded_run_is_taken_up_by_one_process(data, tmp_path):
    run = tmp_path / "run"
    train(
        *TINY, "--data", data, "--steps", 6, "--save-every", 3, "--shard", "--out", run, processes=2
    )
    expected = curve(run)
    shutil.rmtree(run / "checkpoints" / "00000006")
    train("--resume", "--out", run)
    assert torch.allclose(torch.tensor(curve(run)), torch.tensor(expected), rtol=1e-4)


def test_a_run_does_not_read_what_it_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(f"some text, number {i}. " * 50)
    assert main(["train", *TINY, "--data", ".", "--steps", "4", "--save-every", "2", "--json"]) == 0
    before = curve(Path("runs/001"))
    shutil.rmtree("runs/001/checkpoints/00000004")
    assert main(["train", "--resume", "--json"]) == 0
    assert curve(Path("runs/001")) == before


def test_another_text_is_noticed(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    configuration = json.loads((run / "configuration.json").read_text())
    other = tmp_path / "other.txt"
    other.write_text("another text. " * 2000)
    (run / "configuration.json").write_text(json.dumps({**configuration, "data": str(other)}))
    assert main(["train", "--resume", "--out", str(run)]) == 2
    assert "is not what it was when the run was begun" in capsys.readouterr().err


@pytest.mark.parametrize(
    "facts", ["[]", "{}", '{"step": 60, "sha256": {}}', '{"step": 60, "sha256": []}', '{"step": 1}']
)
def test_a_damaged_state_is_passed_over(finished, tmp_path, capsys, facts):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    (run / "checkpoints" / "00000060" / "state.json").write_text(facts)
    assert main(["sample", str(run), "--count", "1"]) == 0
    assert "00000060 is damaged" in capsys.readouterr().err


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--data", "missing.txt"], "missing.txt: there is no such file or folder"),
        (["--data", "EMPTY"], "it has no text. Name a file"),
        (
            ["--data", "SHORT"],
            "has 10 bytes, less than a context of 16: use more data, or a smaller --context",
        ),
        (["--width", "30", "--heads", "4"], "each head needs an even number of channels"),
        (["--memory", "lots"], "pass a number of bytes, a size such as"),
        (["--memory", "1 KiB"], "--memory 1 KiB: 1 KiB are less than the"),
        (["--accumulate", "3"], "--accumulate 3: does not divide the batch of 4"),
        (["--lr", "0"], "--lr 0.0: must be a number above 0"),
        (["--lr", "inf"], "--lr inf: must be a number above 0"),
        (["--dropout", "1.5"], "--dropout 1.5: must be at least 0 and below 1"),
        (["--seed", "99999999999"], "--seed 99999999999: must be at least 0 and below 2**31"),
        (["--warmup", "-5"], "--warmup -5: must not be below 0"),
        (
            ["--lr", "1e30", "--steps", "20"],
            "Try a smaller --lr than 1e+30; the last checkpoint is as it was",
        ),
        (["--resume"], "--resume: there is no run in"),
        (["--data", "HIDDEN"], "it has no text. Name a file"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments, says, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "HIDDEN" / ".git" / "objects").mkdir(parents=True)
    (tmp_path / "HIDDEN" / ".git" / "objects" / "ab").write_text("not text" * 1000)
    (tmp_path / "SHORT").write_text("ten bytes.")
    given = [*TINY, "--data", str(data), "--steps", "3", *arguments, "--out", str(tmp_path / "run")]
    assert main(["train", *given]) == 2
    errors = capsys.readouterr().err
    assert says in errors
    assert "Traceback" not in errors


def test_without_safetensors_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main(["train"]) == 2
    assert "pip install -c constraints.txt -e '.[train]'" in capsys.readouterr().err


def test_a_run_is_not_overwritten_and_not_resumed_with_other_settings(finished, tmp_path, capsys):
    run, _ = finished
    (tmp_path / "checkpoints").mkdir()  # of a run whose configuration was lost
    assert main(["train", "--out", str(tmp_path)]) == 2
    assert "there is a run in it." in capsys.readouterr().err
    assert main(["train", "--out", str(run)]) == 2
    assert (
        "there is a run in it. Add --resume to go on with it, or name another folder"
        in capsys.readouterr().err
    )
    assert main(["train", "--resume", "--depth", "3", "--out", str(run)]) == 2
    assert "--depth 3: the run in" in capsys.readouterr().err


def test_more_processes_than_a_batch_has(data, tmp_path):
    done = train(
        *TINY,
        "--batch",
        1,
        "--data",
        data,
        "--steps",
        1,
        "--out",
        tmp_path / "run",
        processes=2,
        check=False,
    )
    assert done.returncode != 0
    assert (
        "a batch of 1 cannot be shared by 2 processes with --accumulate 1: use --batch 2."
        in done.stderr
    )


def test_a_checkpoint_of_another_shape(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    configuration = json.loads((run / "configuration.json").read_text())
    (run / "configuration.json").write_text(json.dumps({**configuration, "depth": 3}))
    assert main(["train", "--resume", "--out", str(run)]) == 2
    assert "its checkpoint is of another shape" in capsys.readouterr().err


# --- text


def test_text_is_read_across_files_and_split_by_file(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02d}.txt").write_bytes(bytes([i]) * (i + 1))
    text, held_out = read_text(tmp_path)
    assert len(text) + len(held_out) == sum(range(1, 41))
    assert 0 < len(held_out.pieces) < 10
    assert not {piece.path for piece in text.pieces} & {piece.path for piece in held_out.pieces}
    whole = text.read(0, len(text)).tolist()
    assert whole == [i for piece in text.pieces for i in piece.path.read_bytes()]
    assert text.read(30, 50).tolist() == whole[30:80]
    assert torch.equal(
        text.batch(3, seed=1, count=4, context=5), text.batch(3, seed=1, count=4, context=5)
    )
    assert not torch.equal(
        text.batch(3, seed=1, count=4, context=5), text.batch(4, seed=1, count=4, context=5)
    )
    with pytest.raises(TextError, match="no such file"):
        read_text(tmp_path / "none")


def test_the_bigram_baseline_is_the_entropy_of_pairs(tmp_path):
    (tmp_path / "a").write_bytes(bytes([0, 1] * 4000))
    text = Text([*read_text(tmp_path / "a")[0].pieces])
    assert bigram_bits(text, text) < 0.02


# --- for long


SOAK = """
import gc, os, sys
from pathlib import Path
import torch
from speedrun.loop import Run
from speedrun.settings import Settings
from speedrun.text import read_text

data, folder = map(Path, sys.argv[1:])
sizes = dict(depth=2, width=8, heads=1, context=8, batch=2)
settings = Settings(str(data), **sizes, steps=2000, save_every=500)
seen = []

def count(metrics):
    if metrics["step"] in (600, 2000):
        gc.collect()
        tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
        files = len(os.listdir("/proc/self/fd"))
        seen.append((len(tensors), sum(t.nbytes for t in tensors), files))
    return False

Run(settings, folder, *read_text(data)).train(count)
print(seen[0], seen[1])
assert seen[0] == seen[1]
"""


def test_a_long_run_does_not_grow(data, tmp_path):
    """2,000 steps: tensors, their bytes and open files are as many in the end as after the first
    six hundred.
    """
    done = run_to_end([sys.executable, "-c", SOAK, str(data), str(tmp_path)])
    assert done.returncode == 0, done.stderr
