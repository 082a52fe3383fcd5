"""What an exception of the training function says about the fault.

This and `restart.device_errors` are the only places that read the text of a torch error: gloo raises plain
`RuntimeError`s, so peers' deaths can be told from the user's own errors only by wording, and NCCL one type for all that
can happen to it. The result is a closed class; policy never sees the text. Works on type names, so it needs no import
of torch.
"""

from __future__ import annotations

import errno
import os
import traceback
from dataclasses import dataclass
from types import TracebackType

from nvrx_sre.core.errors import CheckpointError, StorageError, UserError
from nvrx_sre.core.output import masked
from nvrx_sre.events.schema import FaultClass
from nvrx_sre.restart.device_errors import DeviceError, device_error

MAX_MESSAGE_CHARS = 500
MAX_STACK_CHARS = 12_000
CUT_FROM = 4
"""Limits' worth of a longer text that is looked at: an error may hold megabytes."""

_COMMUNICATION_TYPES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
# Wording of torch 2.11 to 2.13: gloo's transport (tcp/pair.cc, unbound_buffer.cc) and NCCL's watchdog.
_COMMUNICATION_TEXTS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Broken pipe",
    "Socket closed",
    "ncclRemoteError",
    "ncclSystemError",
    "NCCL communicator was aborted",
)
_MISUSE_TEXTS = ("ncclInvalidUsage", "ncclInvalidArgument")
"""NCCL's own words for what the program asks of it, e.g. two ranks on one device: no peer's fault, and it stays."""
_OF_DEVICE_ERRORS = {
    DeviceError.OUT_OF_MEMORY: FaultClass.CUDA_OOM,
    DeviceError.REFUSED: FaultClass.EXCEPTION,
    DeviceError.LOST: FaultClass.CUDA_ERROR,
}
_LAST_ERROR = "Last error:\n"
"""Behind it NCCL says what has happened; the line before the first says only where."""
_SHARED_MEMORY_TEXTS = ("insufficient shared memory", "unable to allocate shared memory")


@dataclass(frozen=True, kw_only=True)
class Description:
    """Text-only description of an exception; holds no frame, so it pins no model."""

    fault: FaultClass
    communication: bool
    exception_type: str
    frame: str
    message: str
    stack: str


def describe(error: BaseException) -> Description:
    """Classify `error` and reduce it to bounded text."""
    text = str(error)
    communication = is_communication_error(error, text)
    name = type(error).__name__
    module = type(error).__module__
    return Description(
        fault=FaultClass.COLLECTIVE_ERROR if communication else classify(error, text),
        communication=communication,
        exception_type=name if module in ("builtins", "nvrx_sre.core.errors") else f"{module}.{name}",
        frame=user_frame(error.__traceback__),
        message=_head(_message(text)),
        stack=_tail("".join(traceback.format_exception(error))),
    )


def is_communication_error(error: BaseException, text: str) -> bool:
    """True if a peer's fault may look like this from here.

    Not where NCCL reports that this process's own device has failed, or that it was misused.
    """
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & _COMMUNICATION_TYPES:
        is_own = device_error(error, text) is not None or any(item in text for item in _MISUSE_TEXTS)
        return not is_own
    return isinstance(error, RuntimeError) and any(item in text for item in _COMMUNICATION_TEXTS)


def classify(error: BaseException, text: str) -> FaultClass:
    """Fault class of an error that is not a communication error."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, UserError):
        return FaultClass.USER_ERROR
    if isinstance(error, CheckpointError):
        return FaultClass.CHECKPOINT_CORRUPT
    if isinstance(error, StorageError) or _is_storage(error):
        return FaultClass.STORAGE
    if "NonFiniteLoss" in names:
        return FaultClass.NONFINITE
    of_device = device_error(error, text)
    if of_device is not None:
        return _OF_DEVICE_ERRORS[of_device]
    if isinstance(error, RuntimeError) and any(item in text for item in _SHARED_MEMORY_TEXTS):
        return FaultClass.SHM_EXHAUSTED
    return FaultClass.EXCEPTION


def _message(text: str) -> str:
    """First line, and what NCCL says last, which is the cause."""
    first, _, rest = text.strip().partition("\n")
    _, mark, last = rest.partition(_LAST_ERROR)
    cause = last.strip().split("\n", 1)[0] if mark else ""
    return f"{first}: {cause}" if cause else first


def _head(message: str) -> str:
    """What is not too long of it. Masked before it is cut: half a secret is none by its form."""
    is_long = len(message) > MAX_MESSAGE_CHARS
    return masked(message[: CUT_FROM * MAX_MESSAGE_CHARS])[:MAX_MESSAGE_CHARS] if is_long else message


def _tail(stack: str) -> str:
    is_long = len(stack) > MAX_STACK_CHARS
    return masked(stack[-CUT_FROM * MAX_STACK_CHARS :])[-MAX_STACK_CHARS:] if is_long else stack


def _is_storage(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS)


_LIBRARY_MARKS = tuple(
    os.sep.join(("", *parts, "")) for parts in (("torch",), ("nvrx_sre", "session"), ("nvrx_sre", "restart"))
)


def user_frame(trace: TracebackType | None) -> str:
    """Innermost frame outside torch and the runtime as `file:line function`, '' without a traceback."""
    found = ""
    for frame in traceback.extract_tb(trace):
        if not any(mark in frame.filename for mark in _LIBRARY_MARKS):
            found = f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}"
    return found
