"""`nvrx-sre doctor`: can this machine do it? One line a check, with the cure.

Model: a check is a function that returns a `Finding`; all run, in order, and none changes the machine (the storage
check makes and removes one private directory). `fail` means a run cannot work, `warn` that something is less than
it could be. Only the gloo check starts a process, which loads torch; this one never does.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import importlib.util
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import click

from nvrx_sre.checkpoint import discover, layout
from nvrx_sre.checkpoint.memory import check_room
from nvrx_sre.checkpoint.slots import NUM_SLOTS, total_size_bytes
from nvrx_sre.cli.devices import num_nvidia_devices
from nvrx_sre.cli.narrate import bytes_text
from nvrx_sre.cli.report import make_console
from nvrx_sre.core.atomic import create_exclusively
from nvrx_sre.core.errors import NvrxError
from nvrx_sre.core.identity import RUN_FILE
from nvrx_sre.launcher.config import RunConfig

MIN_PYTHON, END_PYTHON = (3, 11), (3, 14)
MIN_TORCH, END_TORCH = (2, 11), (2, 14)
"""Private names of torch that recovery uses exist in these releases (docs/adr)."""
MIN_FREE_DISK_BYTES = 200_000_000
GOOD_FREE_DISK_BYTES = 2_000_000_000
GOOD_SHM_BYTES = 64_000_000
"""Data loaders of torch pass batches through /dev/shm; containers often have 64 MB."""
SMALL_STATE_BYTES = 64 * 1024
"""What a slot holds of small state beside the tensors, at least."""
GOOD_NUM_CORES = 2
GOOD_NUM_FILES = 1024
WANTED_MEMORY_BYTES = 1_500_000_000
"""The reference trainer's two ranks, standby, writer and slots."""
GLOO_TIMEOUT_S = 120.0
PR_GET_PDEATHSIG = 2
INTERRUPT_SIGNAL = RunConfig.interrupt_signal

_GLOO_PROBE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
value = torch.ones(1)
dist.all_reduce(value)
dist.destroy_process_group()
print("a group of one rank formed" + (", NCCL available" if dist.is_nccl_available() else ""))
"""


class Status(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check; `cure` says what to do where the status is not ok."""

    name: str
    status: Status
    detail: str
    cure: str = ""


def _graded(name: str, *, good: bool, detail: str, cure: str, otherwise: Status = Status.FAIL) -> Finding:
    return Finding(name=name, status=Status.OK if good else otherwise, detail=detail, cure="" if good else cure)


def check_python() -> Finding:
    """The interpreter is one of those that are tested."""
    good = MIN_PYTHON <= sys.version_info[:2] < END_PYTHON
    return _graded("python", good=good, detail=sys.version.split()[0], cure="use Python 3.11, 3.12 or 3.13")


def check_torch() -> Finding:
    """torch is installed in a release whose private names are known; read from its metadata, not imported."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding(name="torch", status=Status.FAIL, detail="not installed", cure="pip install torch==2.13.0")
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    good = MIN_TORCH <= release < END_TORCH
    return _graded("torch", good=good, detail=version, cure="pip install torch==2.13.0", otherwise=Status.WARN)


def check_memfd() -> Finding:
    """Hot slots are anonymous memory files."""
    try:
        os.close(os.memfd_create("nvrx-sre-doctor"))
    except (OSError, AttributeError) as error:
        return Finding(name="memfd", status=Status.FAIL, detail=str(error), cure="use Linux 3.17 or newer")
    return Finding(name="memfd", status=Status.OK, detail="memfd_create works")


def check_pidfd() -> Finding:
    """Deaths are noticed through pidfds."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        cure = "use Linux 5.3 or newer; in a container, a seccomp profile that allows pidfd_open"
        return Finding(name="pidfd", status=Status.FAIL, detail=str(error), cure=cure)
    return Finding(name="pidfd", status=Status.OK, detail="pidfd_open works")


def check_seqpacket() -> Finding:
    """Ranks talk to the launcher over SOCK_SEQPACKET."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        return Finding(name="seqpacket", status=Status.FAIL, detail=str(error), cure="allow AF_UNIX sockets")
    ours.close()
    theirs.close()
    return Finding(name="seqpacket", status=Status.OK, detail="SOCK_SEQPACKET socketpairs work")


def check_pdeathsig() -> Finding:
    """Children die with their launcher."""
    value = ctypes.c_int()
    good = ctypes.CDLL(None, use_errno=True).prctl(PR_GET_PDEATHSIG, ctypes.byref(value), 0, 0, 0) == 0
    detail = "PR_SET_PDEATHSIG is available" if good else os.strerror(ctypes.get_errno())
    return _graded("pdeathsig", good=good, detail=detail, cure="allow prctl in the container's seccomp profile")


def check_signal() -> Finding:
    """The signal that carries the interrupt is free."""
    free = signal.getsignal(INTERRUPT_SIGNAL) == signal.SIG_DFL
    detail = f"signal {INTERRUPT_SIGNAL} carries the interrupt"
    return _graded("signal", good=free, detail=detail, cure="do not start under a program that ignores it")


def check_memory() -> Finding:
    """The cgroup's limit and the host leave room for the reference trainer."""
    try:
        check_room(WANTED_MEMORY_BYTES)
    except NvrxError as error:
        cure = "raise the memory limit or use --hot-every 0"
        return Finding(name="memory", status=Status.WARN, detail=str(error), cure=cure)
    return Finding(name="memory", status=Status.OK, detail=f"room for {bytes_text(WANTED_MEMORY_BYTES)}")


def check_slots(state_bytes: int | None, run_dir: Path) -> Finding:
    """Hot slots of a given state (all ranks of this node) would fit.

    Else those of the newest checkpoint of `run_dir`, or of the runs below it.
    """
    ranks_bytes = [state_bytes] if state_bytes is not None else _rank_state_bytes(run_dir)
    if not ranks_bytes:
        return Finding(
            name="slots",
            status=Status.OK,
            detail=f"size not known: no checkpoint in {run_dir} nor in a run below it; give --state-bytes, or "
            "--run-dir of a run with one",
        )
    wanted_bytes = sum(total_size_bytes(NUM_SLOTS, size_bytes, SMALL_STATE_BYTES) for size_bytes in ranks_bytes)
    detail = f"{NUM_SLOTS} slots of {bytes_text(sum(ranks_bytes))} of state are {bytes_text(wanted_bytes)} of memory"
    try:
        check_room(wanted_bytes)
    except NvrxError as error:
        cure = "raise the memory limit, use --hot-slots 2, or --hot-every 0"
        return Finding(name="slots", status=Status.WARN, detail=f"{detail}: {error}", cure=cure)
    return Finding(name="slots", status=Status.OK, detail=f"{detail}, for which there is room")


def _rank_state_bytes(run_dir: Path) -> list[int]:
    """Bytes of state of each rank as the newest checkpoint has it; nothing where there is none to read."""
    places = [run_dir, *(path.parent for path in run_dir.glob(f"*/{RUN_FILE}"))]
    found = [path for place in places for path in _newest_checkpoint(place)]
    newest = max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
    try:
        files = [] if newest is None else sorted(newest.glob("rank-*.json"))
        layouts = [layout.from_json(json.loads(path.read_bytes())["layout"]) for path in files]
    except (NvrxError, OSError, ValueError, KeyError, TypeError):
        return []  # `checkpoint verify` says what is wrong with it
    return [item.data_bytes for item in layouts]


def _newest_checkpoint(run_dir: Path) -> list[Path]:
    try:
        return [item.path for item in discover.discover(run_dir, discover.read_fences(run_dir)).restorable[:1]]
    except NvrxError:
        return []


def check_shm() -> Finding:
    """/dev/shm holds what the user's loader workers pass on; hot slots are memfds, which its size does not bound."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding(name="shm", status=Status.WARN, detail=str(error), cure="mount a tmpfs on /dev/shm")
    return _graded(
        "shm",
        good=usage.free > GOOD_SHM_BYTES,
        detail=f"/dev/shm has {bytes_text(usage.free)} of {bytes_text(usage.total)} free: "
        "it bounds the batches of loader workers, not hot slots",
        cure="give the container more (--shm-size) if data loaders use workers",
        otherwise=Status.WARN,
    )


def check_cores() -> Finding:
    """Cores this process may use."""
    cores = len(os.sched_getaffinity(0))
    return _graded(
        "cores",
        good=cores >= GOOD_NUM_CORES,
        detail=f"{cores} usable",
        cure="recovery times were measured on 2 cores; one core is slower",
        otherwise=Status.WARN,
    )


def check_files() -> Finding:
    """Open files allowed."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _graded(
        "files",
        good=soft == resource.RLIM_INFINITY or soft >= GOOD_NUM_FILES,
        detail="no limit on open files" if soft == resource.RLIM_INFINITY else f"{soft} open files allowed",
        cure=f"ulimit -n {GOOD_NUM_FILES}",
        otherwise=Status.WARN,
    )


def check_storage(directory: Path) -> Finding:
    """The run directory's file system links, renames and syncs."""
    existing = next(parent for parent in (directory.absolute(), *directory.absolute().parents) if parent.exists())
    cure = "choose a directory on a file system with hard links and fsync, that you may write"
    try:
        with tempfile.TemporaryDirectory(prefix=".nvrx-sre-doctor-", dir=existing) as probe:
            create_exclusively(Path(probe) / "file", b"probe")
            free_bytes = shutil.disk_usage(probe).free
    except (OSError, NvrxError) as error:
        return Finding(name="storage", status=Status.FAIL, detail=f"{existing}: {error}", cure=cure)
    detail = f"{existing}: {bytes_text(free_bytes)} free, links and syncs work"
    if free_bytes < GOOD_FREE_DISK_BYTES:
        status = Status.FAIL if free_bytes < MIN_FREE_DISK_BYTES else Status.WARN
        return Finding(name="storage", status=status, detail=detail, cure="free some space")
    return Finding(name="storage", status=Status.OK, detail=detail)


def check_tool(name: str, executables: tuple[str, ...], package: str) -> Finding:
    """A monitoring tool on the PATH; only the demo and the tests start one."""
    found = next((path for path in map(shutil.which, executables) if path is not None), None)
    return _graded(
        name,
        good=found is not None,
        detail=found or "not on the PATH",
        cure=f"apt-get install --no-install-recommends {package} (runs work without it)",
        otherwise=Status.WARN,
    )


def check_gpu() -> Finding:
    """NVIDIA devices, if there are any; a machine without one is fine."""
    num_devices = num_nvidia_devices()
    if num_devices == 0:
        return Finding(name="gpu", status=Status.OK, detail="no NVIDIA device: gloo on CPU")
    library = ctypes.util.find_library("nvidia-ml")
    has_binding = importlib.util.find_spec("pynvml") is not None
    binding = "" if has_binding else ", nvidia-ml-py missing: no checks of the devices' health"
    return _graded(
        "gpu",
        good=library is not None and has_binding,
        detail=f"{num_devices} NVIDIA devices, NVML {library or 'not found'}{binding}",
        cure="install the driver's libnvidia-ml" if library is None else "pip install 'nvrx-sre[gpu]'",
        otherwise=Status.WARN,
    )


def check_gloo() -> Finding:
    """A process loads torch and forms a gloo group of one: host name, interface and build are right."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _GLOO_PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GLOO_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        done = None
    if done is not None and done.returncode == 0:
        return Finding(name="gloo", status=Status.OK, detail=done.stdout.strip())
    last = done.stderr.strip().splitlines()[-1:] if done is not None else [f"no group after {GLOO_TIMEOUT_S:.0f} s"]
    cure = "check that torch imports and that the host name resolves (or set GLOO_SOCKET_IFNAME)"
    return Finding(name="gloo", status=Status.FAIL, detail=" ".join(last) or "no reason given", cure=cure)


def examine(directory: Path, state_bytes: int | None = None) -> list[Finding]:
    """Run all checks; `directory` is a run directory, or where runs would lie. Blocks up to `GLOO_TIMEOUT_S`.

    `state_bytes`: state of all ranks of this node, if it is known.
    """
    checks: tuple[Callable[[], Finding], ...] = (
        check_python,
        check_torch,
        check_gloo,
        check_memfd,
        check_pidfd,
        check_seqpacket,
        check_pdeathsig,
        check_signal,
        check_memory,
        lambda: check_slots(state_bytes, directory),
        check_shm,
        check_cores,
        check_files,
        lambda: check_storage(directory),
        check_gpu,
        lambda: check_tool("prometheus", ("prometheus",), "prometheus"),
        lambda: check_tool("promtool", ("promtool",), "prometheus"),
        lambda: check_tool("alertmanager", ("alertmanager", "prometheus-alertmanager"), "prometheus-alertmanager"),
    )
    return [check() for check in checks]


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    metavar="DIR",
    help="A run's directory, or where runs would lie.",
)
@click.option(
    "--state-bytes",
    type=click.IntRange(1),
    metavar="BYTES",
    help="State of this node's ranks, for the size of hot slots: 12 a parameter with float32 and AdamW.",
)
def command(as_json: bool, run_dir: Path, state_bytes: int | None) -> int:
    """Check what this machine can do, and say the cure. Exit 1 if it cannot run."""
    findings = examine(run_dir, state_bytes)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        console = make_console()
        styles = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}
        for finding in findings:
            cure = f"; {finding.cure}" if finding.cure else ""
            text = f"{finding.status:6}{finding.name:14}{finding.detail}{cure}"
            console.print(text, style=styles[finding.status])
    return int(any(finding.status is Status.FAIL for finding in findings))
