"""The source in numbers: complexity, density, types, size.

    python -m benchmarks.house [../before/src/retrograd]

There are two counts of complexity. `C901` is ruff's: branches, loops and handlers. The other also
counts boolean operators, conditional expressions, comprehensions and assertions. Tokens a line are
those of lines with code, without docstrings and comments. Imports of `Any` do not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
BRANCHES = (
    *(ast.If, ast.For, ast.While, ast.ExceptHandler),
    *(ast.IfExp, ast.comprehension, ast.Assert),
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Ranking = list[tuple[int, str]]  # complexity and function, the most complex first


def tokens(text: str) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(text).readline))


# --- complexity


def complexity(function: ast.AST) -> int:
    number = 1
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            number += 1
        elif isinstance(node, ast.BoolOp):
            number += len(node.values) - 1
    return number


def by_all_branches(paths: Iterable[Path]) -> Ranking:
    found = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, FUNCTIONS):
                found.append((complexity(node), f"{path.name}:{node.name}"))
    return sorted(found, reverse=True)


def by_ruff(source: Path) -> Ranking:
    """Every function whose C901 is above 1."""
    limit = "lint.mccabe.max-complexity=1"
    options = ["--isolated", "--select", "C901", "--config", limit, "--output-format", "json"]
    command = [sys.executable, "-m", "ruff", "check", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = []
    for finding in json.loads(done.stdout):
        match = re.fullmatch(r"`(\w+)` is too complex \((\d+) > 1\)", finding["message"])
        assert match is not None, finding["message"]
        found.append((int(match[2]), f"{Path(finding['filename']).name}:{match[1]}"))
    return sorted(found, reverse=True)


def worst(ranking: Ranking, limit: int) -> str:
    number, name = ranking[0]
    return f"{number} ({name}); {sum(n > limit for n, _ in ranking)} functions above {limit}"


# --- density and types


def tokens_per_line(paths: Iterable[Path]) -> float:
    """Tokens a line, over all lines with code."""
    number = 0
    lines = 0
    for path in paths:
        text = path.read_text()
        skipped = docstring_lines(text)
        code = [t.start[0] for t in tokens(text) if t.type in CODE and t.start[0] not in skipped]
        number += len(code)
        lines += len(set(code))
    return number / max(lines, 1)


def docstring_lines(text: str) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def uses_of_any(text: str) -> int:
    """`Any` in annotations, aliases and casts."""
    return sum(
        isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(text))
    )


def ignored_types(text: str) -> int:
    return sum(t.type == tokenize.COMMENT and "type: ignore" in t.string for t in tokens(text))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source",
        nargs="?",
        type=Path,
        default=ROOT / "src" / "retrograd",
        help="the package; this one by default",
    )
    source: Path = parser.parse_args().source
    if not (source / "core").is_dir():
        parser.error(f"{source} is no retrograd package: it has no folder core.")
    print(f"| | core | {source.name} |\n| --- | ---: | ---: |")
    columns = [rows(folder) for folder in (source / "core", source)]
    for name in columns[0]:
        print(f"| {name} | {' | '.join(column[name] for column in columns)} |")


def rows(folder: Path) -> dict[str, str]:
    paths = sorted(folder.rglob("*.py"))
    texts = [path.read_text() for path in paths]
    ranking = by_all_branches(paths)
    return {
        "files": f"{len(paths)}",
        "lines": f"{sum(text.count(chr(10)) for text in texts):,}",
        "functions": f"{len(ranking):,}",
        "worst complexity, C901": worst(by_ruff(folder), 10),
        "worst complexity, all branches": worst(ranking, 20),
        "tokens a line": f"{tokens_per_line(paths):.1f}",
        "`Any`": f"{sum(map(uses_of_any, texts))}",
        "`type: ignore`": f"{sum(map(ignored_types, texts))}",
    }


if __name__ == "__main__":
    main()
