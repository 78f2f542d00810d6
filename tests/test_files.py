"""Files are there as a whole or not at all, and what was in the way is not destroyed."""

import os
import stat
import threading
from pathlib import Path

import pytest

from retrograd.files import open_regular, write_whole


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_of_the_users_own_is_not_in_the_way(tmp_path):
    (tmp_path / "page.part").write_text("mine")
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / "other.part").symlink_to(tmp_path / "elsewhere")
    write_whole(tmp_path / "page.html", "new")
    write_whole(tmp_path / "other.html", "new")
    assert (tmp_path / "page.part").read_text() == "mine"
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert (tmp_path / "page.html").read_text() == (tmp_path / "other.html").read_text() == "new"
    assert names(tmp_path) == ["elsewhere", "other.html", "other.part", "page.html", "page.part"]


def test_a_symlink_stays_and_its_file_is_written(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "real").write_text("old")
    (tmp_path / "link").symlink_to(Path("folder") / "real")
    (tmp_path / "chain").symlink_to("link")
    (tmp_path / "dangling").symlink_to("not yet")
    for name, text in (("link", "one"), ("chain", "two"), ("dangling", "three")):
        write_whole(tmp_path / name, text)
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_text() == text
    assert (tmp_path / "folder" / "real").read_text() == "two"
    assert names(tmp_path / "folder") == ["real"]


def test_a_circle_of_links_is_told(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels of symbolic links") as raised:
        write_whole(tmp_path / "a", "text")
    assert raised.value.filename == str(tmp_path / "a")


def test_devices_and_pipes_are_written_to(tmp_path):
    write_whole(Path("/dev/null"), "nothing")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "through")
    reader.join(10)
    assert read == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_an_open_file_is_written_to(tmp_path):
    """As /dev/stdout is, where it is redirected to a file: the link leads to /proc/self/fd/1."""
    target = tmp_path / "target"
    with target.open("w") as file:
        (tmp_path / "link").symlink_to(f"/proc/self/fd/{file.fileno()}")
        write_whole(tmp_path / "link", "text")
        assert os.path.samestat(os.fstat(file.fileno()), target.stat())
    assert target.read_text() == "text"


def test_permissions_are_the_users(tmp_path):
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "new", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    (tmp_path / "new").chmod(0o604)
    write_whole(tmp_path / "new", "again")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o604


@pytest.mark.parametrize("step", ["os.fsync", "os.replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(step, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def fails(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(step, fails)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_full_disk_names_the_file(tmp_path):
    with pytest.raises(OSError, match="No space left") as raised:
        write_whole(Path("/dev/full"), "text")
    assert raised.value.filename == "/dev/full"


def test_any_name_and_any_text(tmp_path):
    names = [os.fsdecode(b"\xff\xfe"), "n" * 255, "ünï"]
    for name in names:
        write_whole(tmp_path / name, "\udcff ü")
        assert (tmp_path / name).read_bytes() == b"\\udcff \xc3\xbc"


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it: reading it would not end
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"text"
    with pytest.raises(OSError, match="symbolic links"):
        open_regular(tmp_path / "link", follow_links=False)
