"""What an error of the CUDA runtime says: out of memory, the program's own mistake, or a context that is lost.

Three ways out of a device's error, and a restart must know which one it has:
- *out of memory*: nothing was computed, the context is good, memory comes back when the generation's tensors go;
- *refused*: the runtime did not launch what was asked for (a bad argument, no kernel for this device); the context is
  good, the next attempt is refused again;
- *lost*: anything else, e.g. an illegal access, an assertion of a kernel, an uncorrectable ECC error. Such errors are
  sticky: every later call of the process returns them, so the process has to go.

The code of `torch.AcceleratorError` counts where there is one (`cudaError_t`, driver_types.h of CUDA 12 and 13), else
the text that goes with it: NCCL, Triton and cuBLAS hand the text on. What is in no table is taken for lost, since a
process replaced for nothing costs less than one that is kept with a dead context; a context that is lost without an
error being seen is found by the probe after the teardown (`restart.health`).

Pure; needs no torch. Thread safety: constants and functions only.
"""

from __future__ import annotations

import re
from enum import StrEnum


class DeviceError(StrEnum):
    """What becomes of the process."""

    OUT_OF_MEMORY = "out_of_memory"
    REFUSED = "refused"
    LOST = "lost"


OUT_OF_MEMORY_CODE = 2
REFUSED_TEXTS = {
    1: "invalid argument",
    9: "invalid configuration argument",
    98: "invalid device function",
    101: "invalid device ordinal",
    209: "no kernel image is available for execution on the device",
    400: "invalid resource handle",
    701: "too many resources requested for launch",
    801: "operation not supported",
}
"""Code and text (cudaGetErrorString) of errors that come before a launch and leave the context as it was."""

_OUT_OF_MEMORY_TYPES = frozenset({"OutOfMemoryError"})
_DEVICE_TYPES = frozenset({"AcceleratorError", "CudaError"})
_DEVICE_TEXTS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "cuDNN error", "Expected mha_graph.execute(")
"""How the text of a RuntimeError begins that is the runtime's, by who says so: torch and cuBLAS through it, Triton,
cuDNN. Its attention says no more than that it failed: seen with torch 2.11, of an assertion in another kernel."""
_OUT_OF_MEMORY_TEXTS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_REFUSED_BY_CUDNN = ("CUDNN_STATUS_NOT_SUPPORTED", "CUDNN_STATUS_BAD_PARAM")
_OF_NCCL = re.compile(r"Cuda failure (?:\d+ )?'(?P<reason>[^']*)'")
"""What NCCL's last error says when a call of its own to CUDA has failed (checks.h: 2.18 and later with the code)."""


def device_error(error: BaseException, text: str) -> DeviceError | None:
    """What `error`, whose text is `text`, says of this process's device; None if it is not about a device."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & _OUT_OF_MEMORY_TYPES:
        return DeviceError.OUT_OF_MEMORY
    code = getattr(error, "error_code", None)
    if names & _DEVICE_TYPES and isinstance(code, int):
        return _by_code(code)
    of_nccl = _OF_NCCL.search(text) if "DistBackendError" in names else None
    if of_nccl is not None:
        return _by_text(of_nccl["reason"])
    if names & _DEVICE_TYPES or (isinstance(error, RuntimeError) and text.startswith(_DEVICE_TEXTS)):
        return _by_text(text)
    return None


def _by_code(code: int) -> DeviceError:
    if code == OUT_OF_MEMORY_CODE:
        return DeviceError.OUT_OF_MEMORY
    return DeviceError.REFUSED if code in REFUSED_TEXTS else DeviceError.LOST


def _by_text(text: str) -> DeviceError:
    first_line = text.split("\n", 1)[0]
    if any(item in first_line for item in _OUT_OF_MEMORY_TEXTS):
        return DeviceError.OUT_OF_MEMORY
    is_refused = any(item in first_line for item in (*REFUSED_TEXTS.values(), *_REFUSED_BY_CUDNN))
    return DeviceError.REFUSED if is_refused else DeviceError.LOST
