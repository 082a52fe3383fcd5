"""Classification of exceptions on the rank: closed classes, bounded text, the user's own frame."""

from __future__ import annotations

import errno

import pytest

from nvrx_sre.core.errors import NothingRestorable, UserError
from nvrx_sre.events.schema import FaultClass
from nvrx_sre.restart.torch_errors import MAX_MESSAGE_CHARS, MAX_STACK_CHARS, describe


class DistBackendError(RuntimeError):
    """Named like torch's."""


class NonFiniteLoss(Exception):
    """Named like the session's."""


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


@pytest.mark.parametrize(
    ("error", "fault", "communication"),
    [
        (ValueError("boom"), FaultClass.EXCEPTION, False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer"), FaultClass.COLLECTIVE_ERROR, True),
        (RuntimeError("Timed out waiting 1000ms for recv operation"), FaultClass.COLLECTIVE_ERROR, True),
        (DistBackendError("NCCL error"), FaultClass.COLLECTIVE_ERROR, True),
        (ValueError("Connection closed by peer"), FaultClass.EXCEPTION, False),
        (UserError("bad value"), FaultClass.USER_ERROR, False),
        (NothingRestorable("none"), FaultClass.CHECKPOINT_CORRUPT, False),
        (OSError(errno.ENOSPC, "No space left"), FaultClass.STORAGE, False),
        (OSError(errno.ENOENT, "missing"), FaultClass.EXCEPTION, False),
        (NonFiniteLoss("nan"), FaultClass.NONFINITE, False),
        (OutOfMemoryError("CUDA out of memory"), FaultClass.CUDA_OOM, False),
        (RuntimeError("CUDA error: an illegal memory access"), FaultClass.CUDA_ERROR, False),
        (RuntimeError("unable to allocate shared memory(shm)"), FaultClass.SHM_EXHAUSTED, False),
    ],
)
def test_each_kind_of_error_has_its_class(error: Exception, fault: FaultClass, communication: bool) -> None:
    """The class of an error, and whether it is only suspicion."""
    described = describe(error)
    assert (described.fault, described.communication) == (fault, communication)


def test_text_is_bounded_and_names_the_users_frame() -> None:
    """Huge messages are cut; the frame is the innermost one outside the runtime."""
    try:
        raise ValueError("x" * 100_000)
    except ValueError as error:
        described = describe(error)
    assert len(described.message) <= MAX_MESSAGE_CHARS
    assert len(described.stack) <= MAX_STACK_CHARS
    assert described.frame.startswith("test_restart_errors.py:")
    assert described.frame.endswith("test_text_is_bounded_and_names_the_users_frame")
