"""The tree of the source in CONTRIBUTING.md: every file is in it, and nothing else is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "retrograd"
BLOCK = re.compile(r"^```text\nsrc/retrograd/\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINE = re.compile(r"((?:│   |    )*)[├└]── (\S+) {2,}(\S.*)")  # indent, name, words


def listed():
    """The paths of the tree, relative to the source, each with its words."""
    (block,) = BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text())
    found, parents = {}, []
    for line in block.splitlines():
        indent, name, words = LINE.fullmatch(line).groups()
        parents[len(indent) // 4 :] = [name]
        found["".join(parents)] = words
    return found


def test_the_tree_is_that_of_the_source():
    """A folder without lines of its own stands for all that is in it."""
    tree = listed()
    assert len(set(tree.values())) == len(tree), "words that are said twice"
    whole = {path for path in tree if path.endswith("/")}
    whole -= {other.rpartition("/")[0] + "/" for other in tree if not other.endswith("/")}
    expected = set()
    for path in SOURCE.rglob("*.py"):
        file = path.relative_to(SOURCE).as_posix()
        folder = file.rpartition("/")[0] + "/"
        expected.add(folder if folder in whole or file == f"{folder}__init__.py" else file)
    assert set(tree) == expected
