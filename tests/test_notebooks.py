"""The notebooks run from top to bottom, in a kernel of their own. (That of the GPU:
`tests/test_gpu_script.py`.)
"""

import importlib.util
import json
import os
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
NEEDED = ("nbclient", "nbformat", "ipykernel")


@pytest.mark.parametrize("name", NAMES)
def test_it_is_stored_without_output_and_opens_in_colab(name):
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    place = f"colab.research.google.com/github/OWNER/retrograd/blob/main/notebooks/{name}.ipynb"
    assert place in "".join(cells[0]["source"])


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDED)),
    reason="what runs notebooks is not installed: pip install -e '.[notebooks]'",
)
@pytest.mark.filterwarnings("ignore")  # of Jupyter and what it stands on
@pytest.mark.parametrize("name", ["tour", "convert"])
def test_it_runs(name, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    source = str(NOTEBOOKS.parent / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=folder).execute()
    shown = {cell.id: cell.get("outputs", []) for cell in notebook.cells}
    assert "ok. Gradients and state" in shown["check"][-1]["data"]["text/html"]
    if name == "tour":
        assert (
            "text/html" in shown["plan"][-1]["data"] and "text/html" in shown["measure"][-1]["data"]
        )
        assert shown["exact"][-1]["data"]["text/plain"] == "True"
        assert "RecomputeError" not in str(shown) and "Usual causes" in shown["error"][-1]["text"]
