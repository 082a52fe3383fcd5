"""Who may import whom (the table of packages in docs/ARCHITECTURE.md), and what loads torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nvrx_sre.cli.main import COMMANDS
from tests.structure.source import PACKAGE, Module, imports_of, modules, top_level_imports_of

ANYTHING = ("*",)
NO_TORCH_CHECKPOINT = "checkpoint (no-torch part)"

ALLOWED: dict[str, tuple[str, ...]] = {
    "core": (),
    "events": ("core",),
    "policy": ("core", "events"),
    "goodput": ("core", "events"),
    "telemetry": ("core", "events", "goodput"),
    "checkpoint": ("core", "events"),
    "restart": ("core", "events"),
    "faults": ("core", "events"),
    "session": ("core", "events", "checkpoint", "restart", "faults.plan", "telemetry.context"),
    "launcher": ("core", "events", "policy", "goodput", "telemetry", NO_TORCH_CHECKPOINT, "faults.plan"),
    "trainer": ("core", "session", "faults"),
    # The catalog's own types are part of the catalog.
    "monitoring": ("core", "telemetry.catalog", "telemetry.metric"),
    "archive": ("core", "events", "goodput"),
    "advise": ("core", "events", "goodput"),
    "deploy": ("core", "monitoring"),
    "integrations": ("core", "events", "session"),
    "bench": ANYTHING,
    # The machine's inputs and commands are its signature.
    "testing": (
        *("core", "events", "policy", "goodput", NO_TORCH_CHECKPOINT),
        *("launcher.machine", "launcher.commands", "launcher.started_saves"),
        # What travels between launchers, and when: pure as well.
        *("launcher.link", "launcher.link_codec", "launcher.pace"),
    ),
    "cli": ANYTHING,
}
"""Package -> what it may import of nvrx_sre, beside itself and the root (version and rank-side API)."""

TORCH_PACKAGES = {"session", "restart", "bench"}
"""Packages of which every module may load torch."""
TORCH_MODULES = {
    "nvrx_sre.checkpoint": {
        "capture",
        "supported",
        "dcp_metadata",
        "encoding",
        "export",
        "filling",
        "fixed",
        "kept",
        "fit",
        "install",
        "page_lock",
        "replicas",
        "restore",
        "ring",
        "rng",
        "routes",
        "save",
        "safetensors_file",
        "spare",
        "stand_ins",
        "storage",
        "tracked",
        "write",
        "writer",
    },
    "nvrx_sre.faults": {"injection", "storage"},
    "nvrx_sre.trainer": {"digests", "loop", "model", "__main__"},
}
"""Modules that may load torch in packages that otherwise must not."""

CLOCK_MODULES = {"time", "random"}
CLOCK_EXCEPTIONS = {"checkpoint/rng.py": "captures and restores the state of `random`"}


def _loads_torch(module: Module) -> bool:
    """True if importing the module imports torch, through modules of ours included."""
    by_name = {item.name: item for item in modules()}
    seen: set[str] = set()
    waiting = [module.name]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in by_name:
            continue
        seen.add(name)
        for imported in top_level_imports_of(by_name[name]):
            if imported.split(".")[0] == "torch":
                return True
            waiting += [imported, imported.rpartition(".")[0]]
    return False


def _may_load_torch(module: Module) -> bool:
    parent, _, leaf = module.name.rpartition(".")
    leaf = "__main__" if module.path.stem == "__main__" else leaf
    return module.package in TORCH_PACKAGES or leaf in TORCH_MODULES.get(parent, set())


def _ours(imported: str) -> str | None:
    """`core.clock.seconds` for `nvrx_sre.core.clock.seconds`; None for what is not in a package of ours."""
    parts = imported.split(".")
    if parts[0] != "nvrx_sre" or len(parts) < 2 or not (PACKAGE / parts[1]).is_dir():
        return None
    return ".".join(parts[1:])


def _is_allowed(module: Module, target: str) -> bool:
    allowed = ALLOWED[module.package]
    if allowed == ANYTHING:
        return module.package == "cli" or not target.startswith("cli.")
    for rule in allowed:
        if rule == NO_TORCH_CHECKPOINT:
            if target.startswith("checkpoint") and not _torch_part(target):
                return True
        elif target == rule or target.startswith(f"{rule}."):
            return True
    return target.split(".")[0] == module.package


def _torch_part(target: str) -> bool:
    parts = target.split(".")
    return len(parts) > 1 and parts[1] in TORCH_MODULES["nvrx_sre.checkpoint"]


def test_every_package_is_in_the_table() -> None:
    """A new package must say what it may import before it exists."""
    found = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert found <= set(ALLOWED), f"unknown packages: {sorted(found - set(ALLOWED))}"


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_package_imports_only_what_it_may(package: str) -> None:
    """Imports inside functions and for type checkers count as well."""
    wrong = [
        f"{module.short} imports {imported}"
        for module in modules()
        if module.package == package
        for imported in sorted(imports_of(module))
        if (target := _ours(imported)) is not None and not _is_allowed(module, target)
    ]
    assert wrong == []


def test_core_is_standard_library_only() -> None:
    """The foundation has no dependency that could fail to import."""
    foreign = [
        f"{module.short} imports {imported}"
        for module in modules()
        if module.package == "core"
        for imported in imports_of(module)
        if imported.split(".")[0] not in {*sys.stdlib_module_names, "nvrx_sre"}
    ]
    assert foreign == []


def test_clocks_and_random_only_in_core() -> None:
    """Everything else takes time as an argument or through a Clock."""
    wrong = [
        f"{module.short} imports {imported}"
        for module in modules()
        if module.package != "core" and module.short not in CLOCK_EXCEPTIONS
        for imported in imports_of(module)
        if imported.split(".")[0] in CLOCK_MODULES
    ]
    assert wrong == []


def test_only_named_modules_load_torch_by_their_imports() -> None:
    """The launcher, the views and the readers stay small and start fast."""
    wrong = [module.short for module in modules() if _loads_torch(module) and not _may_load_torch(module)]
    assert wrong == []


def _run_without_torch(code: str) -> None:
    program = f"import sys\n{code}\nassert 'torch' not in sys.modules, 'torch was loaded'\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_does_not_load_torch() -> None:
    """`import nvrx_sre` is cheap for every tool that only wants the version."""
    _run_without_torch("import nvrx_sre; nvrx_sre.__version__")


def test_help_of_every_command_does_not_load_torch() -> None:
    """Help and the list of commands answer at once, on machines without torch as well."""
    calls = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
    _run_without_torch(f"from nvrx_sre.cli.main import main\nfor call in {calls!r}:\n    assert main(call) == 0, call")


def test_modules_without_torch_can_all_be_imported_without_it() -> None:
    """The analysis above is checked against the interpreter."""
    names = [module.name for module in modules() if not _may_load_torch(module) and module.path.stem != "__main__"]
    _run_without_torch(f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)")
