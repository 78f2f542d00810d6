"""`install` imports what it replaces, and no other file of a package; one that fails is told of.

The package is made here: a copy of reformer-pytorch's engine among files that look like it.
"""

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest

import retrograd as rg


@pytest.fixture
def package(tmp_path, monkeypatch):
    spec = importlib.util.find_spec("reformer_pytorch")
    if spec is None or spec.origin is None:
        pytest.skip("reformer-pytorch is not installed")
    engine = Path(spec.origin).with_name("reversible.py").read_text()
    folder = tmp_path / "neighbourly"
    (folder / "tests").mkdir(parents=True)
    left = "open('was here', 'w')\n"
    (folder / "__init__.py").write_text("from neighbourly import engine\n")
    (folder / "engine.py").write_text(engine)
    (folder / "notes.py").write_text(f"{left}TEXT = '''\nclass ReversibleSequence(object):\n'''\n")
    (folder / "broken.py").write_text(f"raise RuntimeError('cannot be imported')\n{engine}")
    (folder / "template.py").write_text(f"{left}class ReversibleSequence({{base}}): {{{{\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield "neighbourly"
    rg.compat.uninstall("neighbourly")
    for name in [name for name in sys.modules if name.startswith("neighbourly")]:
        del sys.modules[name]


def test_neighbours_are_not_imported_and_do_not_abort(package, tmp_path):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        report = rg.compat.install(package)
    assert [each.module for each in report] == ["neighbourly.engine"]
    assert not (tmp_path / "was here").exists()
    assert any("broken" in str(warning.message) for warning in told)
