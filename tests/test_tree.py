"""The tree of the source in the README: every file is in it, each with a few words of its own, and
nothing else is.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP = "src/retrograd/"
LINE = re.compile(
    r"(?P<indent>(?:│   |    )*)(?:├── |└── )(?P<name>\S+?)(?P<folder>/?)(?: "
    r"{2,}(?P<words>\S.*?))? *"
)


def block(text):
    """The lines of the one block that begins with the source's folder, without that line."""
    found = re.findall(rf"^```text\n{TOP}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(found) == 1, (
        f"README.md has {len(found)} blocks that begin with ```text and the line {TOP}; it should "
        "have one"
    )
    return found[0].splitlines()


def parse(lines):
    """From each path, relative to the source and with a slash behind a folder, to its words."""
    entries, parents = {}, []
    for line in lines:
        match = LINE.fullmatch(line)
        assert match, f"not a line of a tree, one name and two spaces before its words: {line!r}"
        depth = len(match["indent"]) // 4
        assert depth <= len(parents), f"in no folder: {line!r}"
        path = "".join(parents[:depth]) + match["name"] + match["folder"]
        assert path not in entries, f"listed twice: {path}"
        parents[depth:] = [match["name"] + "/"] if match["folder"] else []
        entries[path] = match["words"] or ""
    return entries


def faults(entries, source):
    """What is wrong with the tree, in words. A folder of which no content is listed stands for all
    of it, and each folder for its own `__init__.py`."""
    found = []
    for path, words in entries.items():
        there = (source / path).is_dir() if path.endswith("/") else (source / path).is_file()
        found += [] if there else [f"does not exist: {path}"]
        found += [] if words else [f"no words: {path}"]
    said = [words for words in entries.values() if words]
    found += [f"said twice: {words}" for words in dict.fromkeys(said) if said.count(words) > 1]
    whole = {
        path
        for path in entries
        if path.endswith("/") and not any(p.startswith(path) and p != path for p in entries)
    }
    for path in actual(source):
        inside = any(path.startswith(folder) for folder in whole)
        spoken_for = path.endswith("/__init__.py") and path.removesuffix("__init__.py") in entries
        found += [] if path in entries or inside or spoken_for else [f"not listed: {path}"]
    return found


def actual(source):
    """Every Python file, and every folder with one in it."""
    files = [path.relative_to(source) for path in source.rglob("*.py")]
    folders = {f"{folder.as_posix()}/" for file in files for folder in file.parents if folder.name}
    return sorted({file.as_posix() for file in files} | folders)


def test_the_tree_in_the_readme_is_that_of_the_source():
    entries = parse(block((ROOT / "README.md").read_text()))
    assert faults(entries, ROOT / "src" / "retrograd") == []


# --- the test itself: planted faults must be found

GOOD = """\
├── __init__.py      the door
├── core/            the engine
│   ├── tape.py        forward, recorded
│   └── deep/          a folder
│       └── walk.py      backward, walked
├── models/          whatever is in it
└── py.typed         types are to be believed
"""


@pytest.fixture
def source(tmp_path):
    files = (
        "__init__.py core/__init__.py core/tape.py core/deep/__init__.py core/deep/walk.py "
        "models/__init__.py models/lm.py"
    )
    for name in [*files.split(), "py.typed", "__pycache__/tape.pyc", "notes.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_a_tree_without_faults(source):
    entries = parse(GOOD.splitlines())
    paths = [
        "__init__.py",
        "core/",
        "core/tape.py",
        "core/deep/",
        "core/deep/walk.py",
        "models/",
        "py.typed",
    ]
    assert list(entries) == paths
    assert entries["core/deep/walk.py"] == "backward, walked"
    assert faults(entries, source) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("├── models/ ", "├── model.py  a file\n├── models/ ", "does not exist: model.py"),
        ("└── py.typed ", "├── cli/  a folder of none\n└── py.typed ", "does not exist: cli/"),
        ("tape.py ", "tape/   ", "does not exist: core/tape/"),
        ("models/ ", "models  ", "does not exist: models"),
        ("│   ├── tape.py        forward, recorded\n", "", "not listed: core/tape.py"),
        (
            "│       └── walk.py      backward, walked\n",
            "",
            None,
        ),  # it is in a folder of which nothing is listed
        ("├── models/          whatever is in it\n", "", "not listed: models/"),
        ("├── __init__.py      the door\n", "", "not listed: __init__.py"),
        ("tape.py        forward, recorded", "tape.py", "no words: core/tape.py"),
        ("whatever is in it", "the engine", "said twice: the engine"),
    ],
)
def test_a_fault_in_the_tree(old, new, fault, source):
    assert GOOD.count(old) == 1
    found = faults(parse(GOOD.replace(old, new).splitlines()), source)
    assert fault in found if fault else found == []


def test_a_file_that_is_new(source):
    (source / "core" / "deep" / "new.py").touch()
    (source / "models" / "new.py").touch()  # in a folder that is not listed file by file
    (source / "more").mkdir()
    (source / "more" / "new.py").touch()
    found = faults(parse(GOOD.splitlines()), source)
    assert found == ["not listed: core/deep/new.py", "not listed: more/", "not listed: more/new.py"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("├── tape.py forward, recorded", "not a line of a tree"),
        ("├── tape.py walk.py  two at once", "not a line of a tree"),
        ("tape.py  without a branch", "not a line of a tree"),
        ("", "not a line of a tree"),
        ("│   │   ├── tape.py  too deep", "in no folder"),
        ("│   ├── tape.py  under a file", "in no folder"),
        ("├── __init__.py  once more", "listed twice"),
    ],
)
def test_a_line_that_cannot_be_read(line, message):
    with pytest.raises(AssertionError, match=message):
        parse(["├── __init__.py      the door", line])


@pytest.mark.parametrize(
    "text", ["", f"```text\n{TOP}\n```\n```text\n{TOP}\n```\n", f"```\n{TOP}\n```\n"]
)
def test_a_readme_without_the_tree_or_with_two(text):
    with pytest.raises(AssertionError, match="it should have one"):
        block(text)
