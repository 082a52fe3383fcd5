"""Sizes of the style guide, as a ratchet: a listed exception may shrink, never grow, and goes when it fits."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.structure.source import Function, functions, modules

MAX_FUNCTION_LINES = 70
P90_FUNCTION_LINES = 30
MAX_FILE_LINES = 600
P90_FILE_LINES = 400
MAX_PARAMETERS = 6
MAX_NESTING = 3

EXCEPTIONS: dict[str, dict[str, int]] = {
    "function lines": {},
    "file lines": {},
    "parameters": {},
    "nesting": {},
}
"""Measure -> place -> its present value. Nothing may be added."""


def _p90(values: list[int]) -> int:
    return sorted(values)[int(0.9 * (len(values) - 1))]


def _check(measure: str, limit: int, values: Iterator[tuple[str, int]]) -> None:
    listed = EXCEPTIONS[measure]
    above = {place: value for place, value in values if value > limit}
    assert above == listed, f"{measure} above {limit}; the list may only lose entries and hold smaller values"


def _function_lines() -> Iterator[tuple[str, int]]:
    for module in modules():
        for name, function in functions(module):
            yield f"{module.short}:{name}", (function.end_lineno or 0) - function.lineno + 1


def _parameters(function: Function) -> int:
    arguments = function.args
    names = [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def _depth(node: ast.AST, depth: int = 0) -> int:
    """Deepest nesting of control flow below `node`.

    `with` is a scope, not a branch; `elif` is no deeper than its `if`; nested functions start anew.
    """
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue
        block = isinstance(child, ast.If | ast.For | ast.While | ast.Try | ast.Match)
        is_elif = isinstance(node, ast.If) and node.orelse == [child]
        deepest = max(deepest, _depth(child, depth + (block and not is_elif)))
    return deepest


def test_functions_are_short() -> None:
    """No function is longer than a screen, and nine of ten fit half of one."""
    _check("function lines", MAX_FUNCTION_LINES, _function_lines())
    assert _p90([lines for _, lines in _function_lines()]) <= P90_FUNCTION_LINES


def test_files_are_short() -> None:
    """A file holds one role."""
    lines = [(module.short, module.text.count("\n")) for module in modules()]
    _check("file lines", MAX_FILE_LINES, iter(lines))
    assert _p90([value for _, value in lines]) <= P90_FILE_LINES


def test_functions_take_few_parameters() -> None:
    """Beyond six, a frozen config says more."""
    counts = (
        (f"{module.short}:{name}", _parameters(function))
        for module in modules()
        for name, function in functions(module)
    )
    _check("parameters", MAX_PARAMETERS, counts)


def test_blocks_are_flat() -> None:
    """Three levels of blocks at most."""
    depths = (
        (f"{module.short}:{name}", _depth(function)) for module in modules() for name, function in functions(module)
    )
    _check("nesting", MAX_NESTING, depths)
