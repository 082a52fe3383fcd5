"""The other contestants of the recovery benchmark, and what each of them can do.

    torchrun                     `--max-restarts`, everything else by default
    ft_launcher                  NVRx's launcher: the same with heartbeats, monitored outside the rank
    NVRx in-process              its `Wrapper` with its defaults
    NVRx in-process, shortest    the same, every polling interval `SHORTEST_S` and no wait for further ranks

NVRx is `nvidia-resiliency-ext`, called through its public API; a row names its version. What a peer cannot do is a row
that says why. All save and load by DCP (`peer_training`). Blocking: as long as a run takes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvrx_sre.bench.recovery_cases import COLLECTIVE, EXCEPTION, GROUP_TIMEOUT_S, HANG, HEARTBEAT_S, SIGKILL
from nvrx_sre.bench.recovery_reading import Measured, Stamp, from_stamps, read_stamps
from nvrx_sre.bench.subprocesses import run_to_end

NVRX = "nvidia-resiliency-ext"
SHORTEST_S = 0.05
"""Shorter intervals make its monitors miss their own deadlines on two cores (seconds)."""
SAVE_EVERY = 20
FIRST_FAULT_STEP = 25
GAP_STEPS = 30
START_LIMIT_S = 60.0
"""ft_launcher's limit until the first heartbeat (seconds)."""


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """One run of a peer."""

    out: Path
    case: str
    ranks: int
    num_faults: int
    group_timeout_s: float = GROUP_TIMEOUT_S

    def arguments(self) -> list[str]:
        """Arguments of the rank (`peer_training.PeerOptions`)."""
        steps = [FIRST_FAULT_STEP + GAP_STEPS * number for number in range(self.num_faults)]
        return [
            *("--out", str(self.out), "--case", self.case, "--group-timeout", str(self.group_timeout_s)),
            *("--steps", str(steps[-1] + GAP_STEPS), "--save-every", str(SAVE_EVERY)),
            *("--fault-steps", *map(str, steps)),
        ]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One contestant. `cannot`: case -> why."""

    name: str
    cases: tuple[str, ...]
    command: Callable[[PeerRun], list[str]]
    cannot: dict[str, str]
    needs_nvrx: bool = True

    def missing(self) -> str:
        """Why it cannot be run here at all; empty if it can."""
        if self.needs_nvrx and importlib.util.find_spec("nvidia_resiliency_ext") is None:
            return f"{NVRX} is not installed: pip install 'nvrx-sre[bench]', on Python 3.11"
        return ""

    def version(self) -> str:
        """Name and version of what was measured."""
        name = NVRX if self.needs_nvrx else "torch"
        return f"{name} {importlib.metadata.version(name)}"


def _torchrun(run: PeerRun, max_restarts: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(run.ranks), "--max-restarts", str(max_restarts)),
    ]


def _torchrun_command(run: PeerRun) -> list[str]:
    return [*_torchrun(run, run.num_faults), "-m", "nvrx_sre.bench.torchrun_peer", *run.arguments()]


def _ft_launcher_command(run: PeerRun) -> list[str]:
    return [
        *(sys.executable, "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        *("--nproc-per-node", str(run.ranks), "--max-restarts", str(run.num_faults)),
        *("--ft-rank-heartbeat-timeout", str(HEARTBEAT_S), "--ft-initial-rank-heartbeat-timeout", str(START_LIMIT_S)),
        *("--ft-enable-nic-monitor", "false"),  # it would look for the network cards of GPUs
        *("-m", "nvrx_sre.bench.torchrun_peer", *run.arguments(), "--heartbeat"),
    ]


def _in_process_command(run: PeerRun) -> list[str]:
    own = ("--store-port", str(free_port()))
    return [*_torchrun(run, 0), "-m", "nvrx_sre.bench.inprocess_peer", *run.arguments(), *own]


def free_port() -> int:
    """A port of this machine that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


_NO_REPLACEMENT = "replaces no process: it goes on with fewer ranks"
_NO_WATCH = "has no watch for hangs: it waits for the timeout of the process group"

TORCHRUN = Peer(
    name="torchrun",
    cases=(EXCEPTION, SIGKILL),
    command=_torchrun_command,
    cannot={HANG: _NO_WATCH},
    needs_nvrx=False,
)
FT_LAUNCHER = Peer(name="ft_launcher", cases=(SIGKILL, HANG), command=_ft_launcher_command, cannot={})
IN_PROCESS = Peer(
    name="NVRx in-process",
    cases=(EXCEPTION,),
    command=_in_process_command,
    cannot={SIGKILL: _NO_REPLACEMENT},
)
SHORTEST = Peer(
    name="NVRx in-process, shortest",
    cases=(EXCEPTION, COLLECTIVE),
    command=lambda run: [*_in_process_command(run), "--interval", str(SHORTEST_S)],
    cannot={SIGKILL: _NO_REPLACEMENT},
)
PEERS = (IN_PROCESS, SHORTEST, TORCHRUN, FT_LAUNCHER)

TIMES_FASTER = {
    (SHORTEST.name, EXCEPTION): 3.0,
    (IN_PROCESS.name, EXCEPTION): 10.0,
    (TORCHRUN.name, SIGKILL): 15.0,
    (FT_LAUNCHER.name, SIGKILL): 25.0,
}
"""(peer, case) -> how many times its median total is to be of ours."""


def run_peer(peer: Peer, run: PeerRun) -> Measured:
    """Run a peer through its faults. Raises `InternalError` if it does not come back from one."""
    run.out.mkdir(parents=True)
    run_to_end(peer.command(run), run.out.with_suffix(".log"))
    return from_stamps(ranks_of(run), SAVE_EVERY)


def ranks_of(run: PeerRun) -> Sequence[Sequence[Stamp]]:
    """Stamps of each rank."""
    return [read_stamps(run.out / f"rank-{rank}.jsonl") for rank in range(run.ranks)]
