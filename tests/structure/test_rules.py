"""Rules of the style guide that a machine can hold: sleeps, broad excepts, environment, names, docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.structure.source import ROOT, Module, called_name, enclosing, functions, modules, read

FORBIDDEN_STEMS = {"utils", "util", "helpers", "helper", "common", "manager", "managers", "misc"}

BROAD_EXCEPTS: dict[str, str] = {
    "session/bootstrap.py:main": "outermost boundary of a child's process: the user's code may raise anything",
    "session/forkserver.py:_go_between": "outermost boundary of a forked process, which must not return to the server",
    "session/rehearsal.py:rehearse": "boundary of a rehearsal: torch may refuse anything, and a standby is fit without",
    "restart/wrapper.py:Restarter._run_generation": "boundary of the training function: whatever it raises is a fault",
    "telemetry/boundary.py:Boundary.call": "boundary of telemetry: a failure there is counted and never passes",
    "cli/main.py:main": "outermost boundary of the program: one line and an exit code for whatever arrives",
}
"""Boundary -> why it may catch everything. The style guide names what such a boundary is."""

ENVIRONMENT_READERS: dict[str, str] = {
    "core/output.py": "the values of secret variables, which are masked in what is printed of an error",
    "session/environment.py": "a child's settings, handed over by its launcher; watches what the user's code reads",
    "session/unmanaged.py": "rank and address where a script runs without a launcher",
    "launcher/node.py": "hands the user's environment on to the children",
    "bench/torchrun_peer.py": "torchrun hands a worker its restart count in the environment",
    "bench/inprocess_peer.py": "NVRx's wrapper hands a rank its number in the environment",
}
"""Module -> what configuration it reads from, or hands to a child through, the environment."""

SLEEPERS: dict[str, str] = {
    "core/threads.py": "the kernel tells nobody when a thread falls asleep; it can only be looked at again",
}
"""Module -> why it cannot wait on the thing itself."""

ENVIRONMENT = {"os.environ", "os.getenv", "os.putenv", "os.environb"}


def _tests() -> Iterator[Module]:
    return (read(path) for path in sorted((ROOT / "tests").rglob("*.py")))


def test_no_sleep_in_the_package() -> None:
    """A wait is a wait on the thing itself."""
    sleeps = [
        f"{module.short}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and called_name(node).split(".")[-1] == "sleep"
    ]
    assert {sleep.split(":")[0] for sleep in sleeps} == set(SLEEPERS), sleeps


def test_no_sleep_in_tests() -> None:
    """A test that sleeps to be safe is a defect."""
    sleeps = [
        f"{module.path.name}:{node.lineno}"
        for module in _tests()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and called_name(node) in ("time.sleep", "sleep")
    ]
    assert sleeps == []


def test_broad_except_only_at_named_boundaries() -> None:
    """Everything is caught only where the list says why; a boundary that is gone leaves the list."""
    found = set()
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _raises_again(node):
                found.add(f"{module.short}:{enclosing(module, node)}")
            if isinstance(node, ast.Call) and called_name(node).endswith("suppress") and any(map(_is_broad, node.args)):
                found.add(f"{module.short}:{enclosing(module, node)}")
    assert found == set(BROAD_EXCEPTS)


def _raises_again(handler: ast.ExceptHandler) -> bool:
    """Cleaning up on the way out catches nothing."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _is_broad(kind: ast.expr | None) -> bool:
    names = [ast.unparse(item) for item in kind.elts] if isinstance(kind, ast.Tuple) else [kind and ast.unparse(kind)]
    return any(name in (None, "Exception", "BaseException") for name in names)


def test_environment_is_read_only_where_configuration_is() -> None:
    """A module that touches the environment is listed with its reason."""
    found = {
        module.short
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ENVIRONMENT
    }
    assert found == set(ENVIRONMENT_READERS)


def test_names_say_a_role() -> None:
    """No drawer for everything."""
    wrong = [module.short for module in modules() if set(module.name.split(".")) & FORBIDDEN_STEMS]
    assert wrong == []


def test_every_module_says_what_it_is_for() -> None:
    """Purpose, model, invariants are the module's docstring."""
    missing = [module.short for module in modules() if not ast.get_docstring(module.tree)]
    assert missing == []


def test_public_functions_and_classes_have_docstrings() -> None:
    """What others call says units, errors and whether it blocks."""
    missing = [
        f"{module.short}:{node.name}"
        for module in modules()
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        if not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert missing == []


def test_every_test_has_a_docstring() -> None:
    """A test says what must hold, so that its failure says what broke."""
    missing = [
        f"{module.path.name}:{name}"
        for module in _tests()
        for name, function in functions(module)
        if name.split(".")[-1].startswith("test_") and not ast.get_docstring(function)
    ]
    assert missing == []


def test_no_test_is_skipped_or_retried() -> None:
    """A test runs everywhere or is none."""
    marker = re.compile(r"mark\.(skip|skipif|xfail|flaky)|pytest\.(skip|xfail|importorskip)\(")
    found = [module.path.name for module in _tests() if marker.search(module.text) and module.path.stem != "test_rules"]
    assert found == []


def test_nothing_is_left_to_do() -> None:
    """Work that remains is an issue, not a comment."""
    left = re.compile(r"#\s*(TODO|FIXME|XXX|HACK)\b")
    found = [module.short for module in modules() if left.search(module.text)]
    assert found == []


def test_lint_exceptions_carry_a_reason() -> None:
    """`type: ignore` and `noqa` name a code, and say why on the line or the one before."""
    pragma = re.compile(r"#\s*(?:type:\s*ignore|noqa)(?P<code>\S*)?(?P<rest>.*)$")
    wrong = []
    for module in modules():
        lines = module.text.splitlines()
        for number, line in enumerate(lines):
            match = pragma.search(line)
            if match is None:
                continue
            before = lines[number - 1].strip() if number else ""
            explained = "#" in match["rest"] or before.startswith("#") or len(match["rest"].split()) > 2
            if not match["code"] or not explained:
                wrong.append(f"{module.short}:{number + 1}")
    assert wrong == []
