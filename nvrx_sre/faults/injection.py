"""Makes planned faults happen, in the rank's main thread, at the point where the plan says so.

Model: one function a kind. Some never return (signals, hangs), some raise, some return after they have changed
something outside. What a fault needs from its surroundings it asks of `InjectionActions`, so that this module
knows no session.

What each kind is good for:
- `hang` waits in Python and can be interrupted; `hang_native` blocks in a native call without the interpreter lock,
  so that only other threads turn; `hang_gil` holds the lock, so that nothing in the process turns.
- `oom_kill` cannot make the kernel's killer strike without endangering the machine: it makes this process the
  killer's first choice (oom_score_adj) and dies by the same signal. The announcement that goes out before
  tells the launcher that this SIGKILL stands for the killer's.
- `cuda_error` raises what a sticky device error raises; the device is left alone. `cuda_oom`, `cuda_illegal_access`
  and `cuda_assert` are the real thing: `faults.device`.
Faults of storage strike the writer: `faults.storage`.

Must not: import session or restart; run in a process without a plan.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from nvrx_sre.core.errors import InternalError
from nvrx_sre.faults import device
from nvrx_sre.faults.plan import FaultKind, FaultSpec

NOMINAL_STEP_S = 0.1
"""Stands for the usual step time where the caller does not know it (seconds)."""
VERIFY_WAIT_S = 30.0
"""Longest wait of `corrupt_checkpoint` for the newest checkpoint's verification (seconds)."""
VERIFY_POLL_S = 0.02
_MUTEX_BYTES = 128
"""Room for a pthread_mutex_t (40 bytes with glibc on x86-64, 48 on arm64)."""
_CHECKPOINT = re.compile(r"step-(\d{8})-g(\d{5})")


class InjectedError(Exception):
    """The planned exception."""


class AcceleratorError(RuntimeError):
    """Stands for `torch.AcceleratorError`, which cannot be raised without a device."""


class InjectionActions(Protocol):
    """What a fault may ask of the rank it strikes."""

    rank: int
    run_dir: Path
    launcher_pid: int

    def poison_loss(self) -> None:
        """Make the loss of the step in hand not-a-number."""

    def request_node_kill(self) -> None:
        """Ask the launcher to lose the node."""


@runtime_checkable
class StepTimed(Protocol):
    """Actions that know how long a step usually takes."""

    usual_step_s: float


def fire(spec: FaultSpec, actions: InjectionActions) -> None:
    """Make `spec` happen. Returns, raises `InjectedError` or an error of the device, or never comes back."""
    _KINDS[spec.kind](spec, actions)


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Newest committed checkpoint that does not belong to an abandoned line, None if there is none."""
    fences = _fences(run_dir)
    found: list[tuple[int, int, Path]] = []
    for manifest in (run_dir / "checkpoints").glob("step-*/manifest.json"):
        match = _CHECKPOINT.fullmatch(manifest.parent.name)
        if match is None:
            continue
        step, generation = int(match[1]), int(match[2])
        if not any(generation < fence and step > last for fence, last in fences):
            found.append((step, generation, manifest.parent))
    return max(found)[2] if found else None


def _fences(run_dir: Path) -> list[tuple[int, int]]:
    try:
        return [(item["generation"], item["step"]) for item in json.loads((run_dir / "fences.json").read_bytes())]
    except FileNotFoundError:
        return []


def _raise_exception(spec: FaultSpec, actions: InjectionActions) -> None:
    raise InjectedError(f"planned fault {spec} on rank {actions.rank}")


def _raise_cuda_error(spec: FaultSpec, actions: InjectionActions) -> None:
    raise AcceleratorError(f"CUDA error: an illegal memory access was encountered (planned fault {spec})")


def _kill(spec: FaultSpec, actions: InjectionActions) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(spec: FaultSpec, actions: InjectionActions) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _oom_kill(spec: FaultSpec, actions: InjectionActions) -> None:
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate_launcher(spec: FaultSpec, actions: InjectionActions) -> None:
    os.kill(actions.launcher_pid, signal.SIGTERM)


def _hang(spec: FaultSpec, actions: InjectionActions) -> None:
    if spec.phase == "collective":
        _hang_in_collective(actions)
    threading.Event().wait()


def _hang_in_collective(actions: InjectionActions) -> None:
    """Wait for a message that no peer sends. Returns at once in a world of one, where there is nobody to wait for."""
    import torch
    import torch.distributed as dist

    world_size = dist.get_world_size()
    if world_size > 1:
        place = "cuda" if dist.get_backend() == "nccl" else "cpu"
        dist.recv(torch.zeros(1, device=place), src=(actions.rank + 1) % world_size)


def _hang_native(spec: FaultSpec, actions: InjectionActions) -> None:
    _lock_twice(ctypes.CDLL(None))


def _hang_gil(spec: FaultSpec, actions: InjectionActions) -> None:
    _lock_twice(ctypes.PyDLL(None))  # a PyDLL keeps the interpreter lock during the call


def _lock_twice(library: ctypes.CDLL) -> None:
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)  # zeros are PTHREAD_MUTEX_INITIALIZER of a normal mutex
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def _poison(spec: FaultSpec, actions: InjectionActions) -> None:
    actions.poison_loss()


def _wait_verified(run_dir: Path) -> Path | None:
    """Newest checkpoint once the writer has verified it, so that the damage is found by the restore, not by the writer.

    Waits at most `VERIFY_WAIT_S`; then the newest as it is.
    """
    for _ in range(round(VERIFY_WAIT_S / VERIFY_POLL_S)):
        directory = newest_checkpoint(run_dir)
        if directory is None or directory.name in _verified(run_dir):
            return directory
        threading.Event().wait(VERIFY_POLL_S)
    return newest_checkpoint(run_dir)


def _verified(run_dir: Path) -> set[str]:
    try:
        return set(json.loads((run_dir / "checkpoints" / "verified.json").read_bytes()))
    except FileNotFoundError:
        return set()


def _corrupt_checkpoint(spec: FaultSpec, actions: InjectionActions) -> None:
    directory = _wait_verified(actions.run_dir)
    if directory is None:
        raise InternalError(f"planned fault {spec}: there is no committed checkpoint yet in {actions.run_dir}")
    shards = sorted(directory.glob(f"__{actions.rank}_*.distcp"))
    if not shards:
        raise InternalError(f"planned fault {spec}: {directory} holds no shard of rank {actions.rank}")
    os.truncate(shards[0], shards[0].stat().st_size // 2)


def _slow(spec: FaultSpec, actions: InjectionActions) -> None:
    usual_s = actions.usual_step_s if isinstance(actions, StepTimed) else NOMINAL_STEP_S
    threading.Event().wait((spec.value - 1.0) * usual_s)


def _kill_node(spec: FaultSpec, actions: InjectionActions) -> None:
    actions.request_node_kill()
    threading.Event().wait()  # the launcher's SIGKILL ends it


_KINDS: dict[FaultKind, Callable[[FaultSpec, InjectionActions], None]] = {
    FaultKind.EXCEPTION: _raise_exception,
    FaultKind.SIGKILL: _kill,
    FaultKind.SIGSTOP: _stop,
    FaultKind.HANG: _hang,
    FaultKind.HANG_NATIVE: _hang_native,
    FaultKind.HANG_GIL: _hang_gil,
    FaultKind.OOM_KILL: _oom_kill,
    FaultKind.CUDA_ERROR: _raise_cuda_error,
    FaultKind.CUDA_OOM: lambda spec, actions: device.out_of_memory(),
    FaultKind.CUDA_ILLEGAL_ACCESS: lambda spec, actions: device.illegal_access(),
    FaultKind.CUDA_ASSERT: lambda spec, actions: device.failed_assertion(),
    FaultKind.NONFINITE: _poison,
    FaultKind.CORRUPT_CHECKPOINT: _corrupt_checkpoint,
    FaultKind.SLOW: _slow,
    FaultKind.SIGTERM: _terminate_launcher,
    FaultKind.NODE_KILL: _kill_node,
}
