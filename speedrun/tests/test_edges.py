"""The edges of the trainer: signals, locks, terminals, files that are not what they were."""

from __future__ import annotations

import json
import math
import os
import pty
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from speedrun import checkpoints, folders, metrics
from speedrun.__main__ import main
from speedrun.ranks import with_rank
from speedrun.settings import Settings
from speedrun.tests.test_train import in_the_foreground
from speedrun.text import Piece, Text, fingerprint, read_text

ROOT = Path(__file__).parents[2]
TINY = "--depth 2 --width 16 --heads 2 --context 16 --batch 4 --warmup 3".split()
LONG = ["--steps", "100000", "--save-every", "100000"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"the square of {i} is {i * i}.\n" for i in range(2000)))
    return path


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A run of 9 steps, with three checkpoints."""
    run = tmp_path_factory.mktemp("finished") / "run"
    assert main(train(data, run, "--steps", 9, "--save-every", 3)) == 0
    return run


@pytest.fixture
def copy(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def train(data, run, *arguments):
    return ["train", *TINY, "--data", str(data), "--out", str(run), "--json", *map(str, arguments)]


def start(arguments, **options):
    """A process in the root of the repository, where `python -m speedrun` works."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("environment", {})}
    command = [sys.executable, "-m", "speedrun", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    options = {"preexec_fn": in_the_foreground, **options}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **options)


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def steps_of(run):
    path = run / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def stored(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def change_state(folder, **facts):
    state = json.loads((folder / "state.json").read_text())
    del state["checksum"]
    (folder / "state.json").write_text(json.dumps(checkpoints.sealed({**state, **facts})))


# --- signals


def test_signals_that_were_ignored_stay_ignored(data, tmp_path):
    """As SIGHUP is under nohup, and SIGINT in the background of a script."""
    run = tmp_path / "run"

    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    process = start(train(data, run, *LONG), preexec_fn=ignore)
    wait_for(lambda: steps_of(run) > 2)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    seen = steps_of(run)
    wait_for(lambda: steps_of(run) > seen + 20 or process.poll() is not None)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "and saved. Go on with: " in errors


# --- the text


def test_any_other_byte_of_the_text_is_noticed(finished, data, tmp_path, capsys):
    """Also in the middle, and in the text that is held out."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    text = tmp_path / "text.txt"
    configuration = json.loads((run / "configuration.json").read_text())
    (run / "configuration.json").write_text(json.dumps({**configuration, "data": str(text)}))
    content = data.read_bytes()
    half = bytes(byte if i % 2 else 0 for i, byte in enumerate(content))
    cut = len(content) - len(content) // 16
    held_out = content[:cut] + bytes(len(content) - cut)
    one = content[:20000] + bytes([content[20000] ^ 1]) + content[20001:]
    last = content[:-1] + bytes([content[-1] ^ 1])
    for other in (half, held_out, one, last):
        assert len(other) == len(content)
        text.write_bytes(other)
        assert main(["train", "--resume", "--out", str(run)]) == 2
        assert "is not what it was when the run was begun" in capsys.readouterr().err
    text.write_bytes(content)
    assert main(["train", "--resume", "--out", str(run), "--json"]) == 0
    (run / "configuration.json").write_text(
        json.dumps({**configuration, "data": str(text), "fingerprint": ""})
    )
    assert main(["train", "--resume", "--out", str(run)]) == 2


def test_a_fingerprint_sees_where_files_begin(tmp_path):
    def text(*contents):
        paths = [tmp_path / f"{i}-{len(contents)}" for i in range(len(contents))]
        for path, content in zip(paths, contents):
            path.write_bytes(content)
        return Text([Piece(path, 0, path.stat().st_size) for path in paths])

    cuts = [(b"abcd",), (b"ab", b"cd"), (b"a", b"bcd")]
    found = [fingerprint(text(*cut), text(b"held out", b".", b".", b".")) for cut in cuts]
    assert len({*found, fingerprint(text(b"abcd"), text(b"held ou", b"t.", b".", b"."))}) == 4


def test_a_text_larger_than_memory_is_mapped(tmp_path):
    """A file of twice the machine's memory, most of it a hole."""
    path = tmp_path / "large"
    size = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(size - 3)
        file.write(b"end")
    text, held_out = read_text(path)
    assert len(text) + len(held_out) == size
    assert bytes(held_out.read(len(held_out) - 4, 4).tolist()) == b"\x00end"
    assert text.batch(1, seed=1, count=2, context=5).sum() == 0


def test_names_that_are_not_utf_8(tmp_path, capsys):
    folder = tmp_path / os.fsdecode(b"d\xff")
    folder.mkdir()
    for i in range(4):
        (folder / os.fsdecode(b"%d\xfe.txt" % i)).write_text("some text. " * 100)
    run = tmp_path / os.fsdecode(b"r\xff")
    assert main(train(folder, run, "--steps", 2)) == 0
    assert main(["train", "--resume", "--out", str(run), "--steps", "3"]) == 0
    assert main(["sample", str(run), "--count", "3"]) == 0
    assert main(["sample", str(folder)]) == 2


# --- one run in a folder


def test_two_runs_never_share_a_folder(data, tmp_path, capsys):
    run = tmp_path / "run"
    first = start(train(data, run, *LONG))
    wait_for(lambda: steps_of(run) > 0)
    for arguments in (train(data, run), ["train", "--resume", "--out", run]):
        assert main([*map(str, arguments)]) == 2
        errors = capsys.readouterr().err
        assert f"process {first.pid} of " in errors and "is training in it" in errors
    os.kill(first.pid, signal.SIGKILL)  # the lock goes with the process
    first.communicate()
    assert main(["train", "--resume", "--out", str(run), "--steps", "2", "--json"]) == 0
    assert not (run / ".lock").exists()


def test_runs_that_begin_together_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    taken, release = [], threading.Barrier(9)

    def begin():
        with folders.begun(None) as folder:
            taken.append(folder.name)
            release.wait(30)
            (folder / "metrics.jsonl").write_text("a step\n")

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    release.wait(30)
    for thread in threads:
        thread.join()
    assert sorted(taken) == [f"{i:03d}" for i in range(1, 9)]


def test_numbers_go_on_after_999(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("998", "999", "1000", "0500", "12", "mine"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for expected in ("1001", "1002"):
        with folders.begun(None) as folder:
            assert folder.name == expected
            (folder / "metrics.jsonl").write_text("a step\n")
    assert [path.name for path in folders.numbered()] == ["998", "999", "1000", "1001", "1002"]


@pytest.mark.parametrize("out", [None, "mine/deep"])
def test_a_run_that_cannot_begin_leaves_nothing(out, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", *TINY, "--data", str(data), "--json"]
    arguments += [] if out is None else ["--out", out]
    assert main([*arguments, "--memory", "1 KiB"]) == 2
    assert "--memory 1 KiB: 1 KiB are less than the" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main([*arguments, "--steps", "1"]) == 0
    assert (tmp_path / (out or "runs/001") / "summary.json").exists()


def test_what_was_in_the_folder_stays(data, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "tensorboard").mkdir()
    assert main([*train(data, tmp_path), "--memory", "1 KiB"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "tensorboard"]


def test_what_a_killed_run_left_half_written_is_removed(copy):
    (copy / "checkpoints" / "00000012.part").mkdir()
    (copy / "checkpoints" / "00000012.part" / "model.safetensors").write_text("half")
    (copy / ".retrograd-0123.part").write_text("half")
    (copy / "mine.part").write_text("mine")
    assert main(["train", "--resume", "--out", str(copy), "--json"]) == 0
    assert {path.name for path in copy.glob("**/*.part")} == {"mine.part"}


def test_weights_are_readable_by_whom_the_umask_allows(data, tmp_path):
    before = os.umask(0o022)
    try:
        assert main(train(data, tmp_path / "run", "--steps", 1)) == 0
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o644}


def test_what_is_printed_can_be_typed(tmp_path, capsys):
    assert main(["sample", str(tmp_path / "my run; rm -r x")]) == 2
    assert f"--out '{tmp_path}/my run; rm -r x'" in capsys.readouterr().err
    assert folders.quoted(Path("-x")) == "./-x"


def test_an_empty_name_is_told(data, capsys):
    for name in ("", " "):
        with pytest.raises(SystemExit) as ended:
            main(["train", "--out", name])
        assert ended.value.code == 2
        assert "it is empty: name a folder" in capsys.readouterr().err


# --- checkpoints that are not ours


@pytest.fixture(scope="module")
def original(finished):
    return stored(finished / "checkpoints" / "00000006")


@pytest.mark.parametrize("share", [23])
def test_a_flipped_bit_of_the_state_falls_back(copy, original, share):
    """Every 23rd bit here; `make attack` flips every one."""
    newest = copy / "checkpoints" / "00000009" / "state.json"
    content = newest.read_bytes()
    for bit in range(0, 8 * len(content), share):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        newest.write_bytes(damaged)
        folder, state = checkpoints.newest(copy, lambda line: None)
        if json_of(damaged) == json.loads(content):
            continue
        assert (state["step"], stored(folder)) == (6, original), bit


def json_of(content):
    try:
        return json.loads(content)
    except ValueError:
        return None


@pytest.mark.parametrize(
    "facts",
    [
        {"sharded": "false"},
        {"sharded": 0},
        {"sharded": None},
        {"sharded": True, "sha256": {}},
        {"step": 9.0},
        {"sha256": {"../../../outside": "0" * 64}},
        {"more": 1},
    ],
)
def test_a_state_of_another_form_falls_back(copy, facts):
    change_state(copy / "checkpoints" / "00000009", **facts)
    assert checkpoints.newest(copy, lambda line: None)[1]["step"] == 6


def test_an_entry_that_is_missing_falls_back(copy):
    path = copy / "checkpoints" / "00000009" / "state.json"
    state = json.loads(path.read_text())
    for name in state:
        path.write_text(json.dumps({key: value for key, value in state.items() if key != name}))
        assert checkpoints.newest(copy, lambda line: None)[1]["step"] == 6
    path.write_text("[" * 100_000)
    assert checkpoints.newest(copy, lambda line: None)[1]["step"] == 6


def test_names_are_those_of_plain_files_in_the_folder(copy, tmp_path):
    """A pipe would be waited for, and a link or a path leads out."""
    folder = copy / "checkpoints" / "00000009"
    state = json.loads((folder / "state.json").read_text())
    outside = tmp_path / "outside.safetensors"
    shutil.move(folder / "model.safetensors", outside)
    os.mkfifo(folder / "model.safetensors")
    assert checkpoints.newest(copy, lambda line: None)[1]["step"] == 6
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(outside)
    assert checkpoints.newest(copy, lambda line: None)[1]["step"] == 6
    (folder / "model.safetensors").unlink()
    shutil.copy(outside, folder / "model.safetensors")
    assert checkpoints.newest(copy, lambda line: None)[1]["step"] == 9
    checksums = {**state["sha256"], str(outside): checkpoints.checksum(outside)}
    change_state(folder, sharded=True, sha256=checksums)
    assert checkpoints.newest(copy, lambda line: None)[1]["step"] == 6


def test_a_file_that_is_not_listed_is_not_read(copy):
    """The reader of sharded checkpoints would take weights from it."""
    folder = copy / "checkpoints" / "00000009"
    save_file({"model/embedding.weight": torch.zeros(256, 16)}, folder / "z.safetensors")
    told = []
    assert checkpoints.newest(copy, told.append)[1]["step"] == 6
    assert "z.safetensors does not belong to it" in told[0]
    (folder / "z.safetensors").unlink()
    (folder / ".DS_Store").write_text("what a file manager leaves")
    assert checkpoints.newest(copy, told.append)[1]["step"] == 9


def test_names_of_folders_that_are_no_steps(copy):
    for name in ("²", "1", "00000007.part", "9" * 30):
        (copy / "checkpoints" / name).mkdir()
    assert checkpoints.steps(copy) == [3, 6, 9]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(copy, value, capsys):
    folder = copy / "checkpoints" / "00000009"
    tensors = load_file(folder / "model.safetensors")
    tensors["embedding.weight"][3, 3] = value
    save_file(tensors, folder / "model.safetensors")
    checksums = {path: checkpoints.checksum(folder / path) for path in checkpoints.WHOLE}
    change_state(folder, sha256=checksums)
    for arguments in (["sample", copy], ["train", "--resume", "--out", copy]):
        assert main([*map(str, arguments)]) == 2
        errors = capsys.readouterr().err
        assert "model/embedding.weight has values that are not finite" in errors
        assert errors.count("\n") == 1


def test_weights_that_overflow(copy, capsys):
    folder = copy / "checkpoints" / "00000009"
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t.fill_(3e38) for name, t in tensors.items()}, folder / "model.safetensors")
    checksums = {path: checkpoints.checksum(folder / path) for path in checkpoints.WHOLE}
    change_state(folder, sha256=checksums)
    assert main(["sample", str(copy)]) == 2
    assert "the scores of the next byte are not finite" in capsys.readouterr().err


# --- files that are odd

CONFIGURATIONS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe",
    b"[" * 100_000,
    b"{}",
    {"depth": "2"},
    {"depth": True},
    {"depth": -1},
    {"depth": 10**9},
    {"width": 10**30},
    {"batch": 10**9},
    {"context": 2**31 - 1},
    {"lr": math.nan},
    {"lr": "x"},
    {"data": 5},
    {"exact": "yes"},
    {"memory": 3},
    {"memory": "\x1b]0;title\x07"},
    {"seed": 1.5},
    {"fingerprint": None},
    {"clip": -1},
    {"decay": math.inf},
    {"warmup": 10**400},
    {"more": 1},
]


@pytest.mark.parametrize("odd", CONFIGURATIONS, ids=lambda odd: repr(odd)[:30])
def test_odd_configurations_are_told_in_a_line(copy, odd, capsys):
    path = copy / "configuration.json"
    if isinstance(odd, dict):
        odd = json.dumps({**json.loads(path.read_text()), **odd}).encode()
    path.write_bytes(odd)
    for arguments in (["sample", str(copy)], ["train", "--resume", "--out", str(copy)]):
        assert main(arguments) == 2
        errors = capsys.readouterr().err
        assert "configuration.json cannot be read: " in errors
        assert errors.count("\n") == 1 and "\x1b" not in errors


def test_a_configuration_that_is_a_pipe(copy, capsys):
    (copy / "configuration.json").unlink()
    os.mkfifo(copy / "configuration.json")
    assert main(["sample", str(copy)]) == 2
    assert "not a regular file" in capsys.readouterr().err


def test_damaged_metrics_are_passed_over(copy, capsys):
    path = copy / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    odd = [
        b"\xff\xfe\x00\n",
        b"[1]\n",
        b'{"step": "2", "bits_per_byte": 1}\n',
        b"[" * 10**5 + b"\n",
    ]
    path.write_bytes(b"".join([*lines[:4], *odd, lines[3], *lines[5:8], lines[8][:20]]))
    assert main(["train", "--resume", "--out", str(copy), "--json"]) == 0
    assert "metrics.jsonl is damaged: 2 of 9 steps are lost from it" in capsys.readouterr().err
    assert [row["step"] for row in metrics.read(path)] == [1, 2, 3, 4, 6, 7, 8]
    assert (copy / "loss.png").stat().st_size > 1000


def test_an_exact_run_that_diverges_ends_in_a_line(data, tmp_path, capsys):
    arguments = train(data, tmp_path / "run", "--exact", "--lr", 1e4, "--steps", 50)
    assert main(arguments) == 2
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "smaller --lr" in line]
    assert "its grid ends at" in told and "Try a smaller --lr than 10000" in told


# --- the terminal


def test_a_sample_cannot_write_to_the_terminal(copy, monkeypatch, capsys):
    written = b"\x1b]0;title\x07\x1b[2J\r$ \xc2\x9b1m\xe2\x80\xae\ttab\n"
    monkeypatch.setattr("speedrun.model.LanguageModel.generate", lambda *_, **__: iter(written))
    assert main(["sample", str(copy), "--prompt", "p\x1b"]) == 0
    assert capsys.readouterr().out == (
        "p\\x1b\\x1b]0;title\\x07\\x1b[2J\\r$ \\x9b1m\\u202e\ttab\n\n"
    )
    assert main(["sample", str(copy), "--prompt", "p", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == written.decode()
    assert main(["train", "--resume", "--out", str(copy)]) == 0
    assert not {"\x1b", "\r", "\x9b"} & {*capsys.readouterr().out}


def test_a_checkpoint_cannot_write_to_the_terminal(copy, capsys):
    change_state(copy / "checkpoints" / "00000009", sharded=True, sha256={"\x1b[2J/": "0"})
    assert main(["sample", str(copy), "--count", "1"]) == 0
    errors = capsys.readouterr().err
    assert "\x1b" not in errors and errors.count("\n") == 1


def test_a_terminal_that_goes_away_does_not_end_training(data, tmp_path):
    run = tmp_path / "run"
    master, slave = pty.openpty()
    process = start(
        [option for option in train(data, run, "--steps", 300) if option != "--json"],
        stdout=slave,
        stderr=slave,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    os.close(slave)
    wait_for(lambda: steps_of(run) > 5)
    assert os.read(master, 100)
    os.close(master)
    process.wait(120)
    assert steps_of(run) == 300
    assert (run / "summary.json").exists()
    assert checkpoints.steps(run)[-1] == 300


@pytest.mark.parametrize("closed", ["2> /dev/full", ">&- 2>&-"])
def test_output_that_nobody_reads_does_not_end_training(closed, data, tmp_path):
    run = tmp_path / "run"
    arguments = [argument for argument in train(data, run, "--steps", 12) if argument != "--json"]
    line = f'"$0" -m speedrun "$@" {closed}'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert steps_of(run) == 12
    assert (run / "summary.json").exists()
    assert ("a sample:" in done.stdout) == (">&-" not in closed.replace("2>&-", ""))


# --- several processes


def ranks(code, *, count=2, **environment):
    """Run `code` in processes of their own that find each other."""
    port = str(random.randint(20000, 60000))
    started = []
    for rank in range(count):
        own = {
            **{"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"},
            **{"MASTER_PORT": port, "OMP_NUM_THREADS": "1", **environment},
        }
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=ROOT,
                env={**os.environ, **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = [process.communicate(timeout=100) for process in started]
    return [process.returncode for process in started], [errors for _, errors in ended]


FAILS = """
import os, sys
from speedrun import train
from speedrun.text import TextError
from speedrun.__main__ import main

read = train.read_text
def fails(*arguments, **options):
    if os.environ["RANK"] in "{ranks}":
        raise TextError("the data is not here")
    return read(*arguments, **options)
train.read_text = fails
sys.exit(main({arguments!r}))
"""


def test_every_rank_says_its_own_error(data, tmp_path):
    run = tmp_path / "run"
    code = FAILS.format(ranks="1", arguments=train(data, run, "--steps", 3))
    assert ranks(code) == ([2, 2], ["", "speedrun train: rank 1: the data is not here\n"])
    assert not run.exists()


def test_what_all_have_in_common_is_said_once(data, tmp_path):
    code = FAILS.format(ranks="01", arguments=train(data, tmp_path / "run", "--steps", 3))
    assert ranks(code) == ([2, 2], ["speedrun train: the data is not here\n", ""])


@pytest.mark.parametrize("size", ["two", "", "-1", "0", "1.5", "²"])
def test_a_bad_world_size_is_told_in_a_line(size, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", size)
    assert main(train(data, tmp_path / "run")) == 2
    errors = capsys.readouterr().err
    assert f"WORLD_SIZE={size!r} is not a number of processes" in errors
    assert errors.count("\n") == 1


def test_a_world_without_its_other_variables(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert main(train(data, tmp_path / "run")) == 2
    errors = capsys.readouterr().err
    assert "Start them with torchrun" in errors and errors.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    assert with_rank("text") == "rank 1: text"


# --- busy cores


def test_threads_sleep_while_they_wait(monkeypatch):
    """libgomp says what it was told when torch was loaded."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    _, errors = start(["--help"], environment={"OMP_DISPLAY_ENV": "true"}).communicate(timeout=100)
    if "OMP_WAIT_POLICY" not in errors:
        pytest.skip("this torch uses another library than libgomp")
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in errors


# --- longer runs


def test_a_run_is_made_longer(copy, capsys):
    before = metrics.read(copy / "metrics.jsonl")
    assert main(["train", "--resume", "--out", str(copy), "--steps", "14", "--json"]) == 0
    assert "going on after step 9 of 14" in capsys.readouterr().err
    after = metrics.read(copy / "metrics.jsonl")
    assert after[:9] == before and [row["step"] for row in after] == [*range(1, 15)]
    assert Settings.read(copy / "configuration.json").steps == 14
    assert checkpoints.steps(copy)[-1] == 14
    shutil.rmtree(copy / "checkpoints" / "00000014")  # killed, and resumed without the option
    assert main(["train", "--resume", "--out", str(copy), "--json"]) == 0
    again = metrics.read(copy / "metrics.jsonl")
    for row, other in zip(after, again, strict=True):
        assert {**row, "bytes_per_second": 0} == {**other, "bytes_per_second": 0}


def test_a_run_is_not_made_shorter_than_it_is(copy, capsys):
    assert main(["train", "--resume", "--out", str(copy), "--steps", "8"]) == 2
    assert "--steps 8: the run in" in (errors := capsys.readouterr().err)
    assert "has taken 9 steps. Give more" in errors
    assert Settings.read(copy / "configuration.json").steps == 9


def test_a_configuration_that_was_changed_is_noticed(copy, capsys):
    path = copy / "configuration.json"
    path.write_text(path.read_text().replace('"lr": 0.003', '"lr": 0.002'))
    assert main(["train", "--resume", "--out", str(copy)]) == 2
    assert "configuration.json is damaged or was changed" in capsys.readouterr().err


def test_another_setting_is_refused_with_both_values(copy, capsys):
    assert main(["train", "--resume", "--out", str(copy), "--batch", "8"]) == 2
    assert "--batch 8: the run in" in (errors := capsys.readouterr().err)
    assert "was begun with 4" in errors
