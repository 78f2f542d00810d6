"""Finds, in the source of a package, the autograd functions that walk a list of blocks.

Such a function is recognised by what its `forward` does, not by its name: it loops over one of its
arguments, and calls what it finds there.

    def forward(ctx, x, blocks, kwargs):
        for block in blocks:
            x = block(x, **kwargs)

Nothing is imported to find out.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

Loop = ast.For | ast.comprehension


def engine_functions(package: ModuleType) -> Iterator[tuple[str, list[str]]]:
    """The modules of a package that define such functions, and the names of these."""
    for name, path in source_files(package):
        source = path.read_text(encoding="utf-8", errors="ignore")
        if "Function" in source and "def backward" in source:
            found = engines_in(source)
            if found:
                yield name, found


def source_files(package: ModuleType) -> Iterator[tuple[str, Path]]:
    """The names of a package's modules, and their files."""
    name = package.__name__
    if not hasattr(package, "__path__"):  # a single file
        file = inspect.getsourcefile(package)
        if file is not None:
            yield name, Path(file)
        return
    for folder in map(Path, package.__path__):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([name, *parts]).removesuffix(".__init__"), path


def engines_in(source: str) -> list[str]:
    """The names of the classes that are autograd functions and walk a list of blocks."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # a template, or code for another Python
        return []
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and is_engine(node)]


def is_engine(node: ast.ClassDef) -> bool:
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    is_function = bool(node.bases) and {"forward", "backward"} <= set(methods)
    return is_function and walks_a_list(methods["forward"])


def walks_a_list(forward: ast.FunctionDef) -> bool:
    """Whether a function loops over one of its arguments and calls the items."""
    arguments = {each.arg for each in forward.args.args}
    items: set[str] = set()
    for node in ast.walk(forward):
        if isinstance(node, Loop) and names_in(node.iter) & arguments:
            items |= names_in(node.target)
    return any(
        isinstance(node, ast.Call) and called_item(node, arguments, items)
        for node in ast.walk(forward)
    )


def called_item(call: ast.Call, arguments: set[str], items: set[str]) -> bool:
    """Whether a call is `item(...)` of a loop, or `argument[i](...)`."""
    if isinstance(call.func, ast.Name):
        return call.func.id in items
    return isinstance(call.func, ast.Subscript) and bool(names_in(call.func.value) & arguments)


def names_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
