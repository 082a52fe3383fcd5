"""The package's source as syntax trees, and what the structure tests ask of it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nvrx_sre"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: Path
    name: str
    tree: ast.Module
    text: str

    @property
    def package(self) -> str:
        """Package below nvrx_sre, '' for the root."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 and (PACKAGE / parts[1]).is_dir() else ""

    @property
    def short(self) -> str:
        """Path relative to the package, for messages and allow-lists."""
        return self.path.relative_to(PACKAGE).as_posix()


@functools.cache
def modules() -> tuple[Module, ...]:
    """Every module of the package."""
    return tuple(read(path) for path in sorted(PACKAGE.rglob("*.py")))


def read(path: Path) -> Module:
    """Parse one file; its name is that of the import statement."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    text = path.read_text(encoding="utf-8")
    return Module(path=path, name=name, tree=ast.parse(text), text=text)


def imports_of(module: Module) -> set[str]:
    """Dotted names that the module imports anywhere, `from a import b` as `a.b`."""
    return set(_imported(ast.walk(module.tree)))


def top_level_imports_of(module: Module) -> set[str]:
    """Dotted names imported when the module is imported: not those in functions or for type checkers only."""
    return set(_imported(_executed_on_import(module.tree)))


def _imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _executed_on_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _executed_on_import(child)


def functions(module: Module) -> Iterator[tuple[str, Function]]:
    """Every function with its qualified name."""
    yield from _functions(module.tree, "")


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if isinstance(child, Function):
                yield name, child
            yield from _functions(child, f"{name}.")
        else:
            yield from _functions(child, prefix)


def called_name(node: ast.Call) -> str:
    """Dotted text of what is called, e.g. `time.sleep`."""
    return ast.unparse(node.func)


def enclosing(module: Module, target: ast.AST) -> str:
    """Qualified name of the innermost function around `target`, '' at module level."""
    best = ""
    for name, function in functions(module):
        if any(node is target for node in ast.walk(function)):
            best = name
    return best
