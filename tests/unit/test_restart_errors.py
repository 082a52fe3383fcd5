"""Classification of exceptions on the rank: closed classes, bounded text, the user's own frame."""

from __future__ import annotations

import errno

import pytest

from nvrx_sre.core.errors import NothingRestorable, UserError
from nvrx_sre.events.schema import FaultClass, Layer
from nvrx_sre.policy.classify import RULES
from nvrx_sre.restart.torch_errors import MAX_MESSAGE_CHARS, MAX_STACK_CHARS, describe


class DistBackendError(RuntimeError):
    """Named like torch's."""


class NonFiniteLoss(Exception):
    """Named like the session's."""


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


class AcceleratorError(RuntimeError):
    """Named like torch's, with the runtime's code where torch knows it."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        if code is not None:
            self.error_code = code


def cuda_error(reason: str, name: str) -> str:
    """The text of torch's error for a failed call of CUDA, in the form of torch 2.11 (c10/cuda/CUDAException)."""
    return (
        f"CUDA error: {reason}\n"
        f"Search for `{name}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more "
        "information.\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
        "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )


def nccl_error(what: str, code: str, last: str) -> str:
    """The text of torch's error for a failed call of NCCL, in the form of torch 2.11 (c10d/NCCLUtils)."""
    return (
        f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {what}, NCCL version 2.28.9\n"
        f"{code}\nLast error:\n{last}"
    )


UNHANDLED = "unhandled cuda error (run with NCCL_DEBUG=INFO for details)"
CALL_FAILED = "ncclUnhandledCudaError: Call to CUDA function failed."
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
MISUSE = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."


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


@pytest.mark.parametrize(
    ("reason", "name", "code"),
    [
        ("an illegal memory access was encountered", "cudaErrorIllegalAddress", 700),
        ("device-side assert triggered", "cudaErrorAssert", 710),
        ("unspecified launch failure", "cudaErrorLaunchFailure", 719),
        ("the launch timed out and was terminated", "cudaErrorLaunchTimeout", 702),
        ("an illegal instruction was encountered", "cudaErrorIllegalInstruction", 715),
        ("misaligned address", "cudaErrorMisalignedAddress", 716),
        ("uncorrectable ECC error encountered", "cudaErrorECCUncorrectable", 214),
        ("uncorrectable NVLink error detected during the execution", "cudaErrorNvlinkUncorrectable", 220),
        ("a reason that no table of ours has", "cudaErrorOfTomorrow", 9999),
    ],
)
def test_a_sticky_error_is_the_devices_whoever_reports_it(reason: str, name: str, code: int) -> None:
    """With its code, by its text alone, through NCCL and Triton: this process's context, and no peer's fault."""
    for error in (
        AcceleratorError(cuda_error(reason, name), code),
        AcceleratorError(cuda_error(reason, name)),
        RuntimeError(cuda_error(reason, name)),
        RuntimeError(f"Triton Error [CUDA]: {reason}"),
        DistBackendError(nccl_error(UNHANDLED, CALL_FAILED, f"Cuda failure {code} '{reason}'")),
        DistBackendError(nccl_error(UNHANDLED, CALL_FAILED, f"Cuda failure '{reason}'")),
    ):
        described = describe(error)
        assert (described.fault, described.communication) == (FaultClass.CUDA_ERROR, False), error
        assert RULES[described.fault].first_layer is Layer.WORKER


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "Expected mha_graph.execute(handle, variant_pack, workspace_ptr.get()).is_good() to be true, but got "
            "false.  (Could this error message be improved?  If so, please report an enhancement request to PyTorch.)"
        ),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    ],
)
def test_a_sticky_error_may_come_up_in_cudnn(error: Exception) -> None:
    """An assertion of torch's index kernel, as torch 2.11 on an H200 reported it: by the attention that came next."""
    described = describe(error)
    assert (described.fault, described.communication) == (FaultClass.CUDA_ERROR, False)


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 279.60 GiB. GPU 1 has a total capacity of 139.80 GiB of which "
            "137.21 GiB is free. Including non-PyTorch memory, this process has 2.58 GiB memory in use."
        ),
        AcceleratorError(cuda_error("out of memory", "cudaErrorMemoryAllocation"), 2),
        AcceleratorError(cuda_error("out of memory", "cudaErrorMemoryAllocation")),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        DistBackendError(nccl_error(UNHANDLED, CALL_FAILED, "Cuda failure 2 'out of memory'")),
    ],
)
def test_memory_that_does_not_suffice_is_cured_in_process(error: Exception) -> None:
    """Torch's allocator, the runtime, cuBLAS and NCCL say it in their own ways; the context is good in all."""
    described = describe(error)
    assert (described.fault, described.communication) == (FaultClass.CUDA_OOM, False)
    assert RULES[described.fault].first_layer is Layer.IN_PROCESS


@pytest.mark.parametrize(
    "error",
    [
        AcceleratorError(cuda_error("invalid configuration argument", "cudaErrorInvalidConfiguration"), 9),
        AcceleratorError(cuda_error("invalid device ordinal", "cudaErrorInvalidDevice")),
        RuntimeError(cuda_error("no kernel image is available for execution on the device", "cudaErrorNoKernelImage")),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
        DistBackendError(nccl_error("invalid usage", MISUSE, "Duplicate GPU detected : rank 1 and rank 0 both on X")),
        DistBackendError(nccl_error(UNHANDLED, CALL_FAILED, "Cuda failure 1 'invalid argument'")),
    ],
)
def test_what_was_never_launched_is_the_programs_error(error: Exception) -> None:
    """The context is as it was, the device is good, and the same call fails again: an exception like any other."""
    described = describe(error)
    assert (described.fault, described.communication) == (FaultClass.EXCEPTION, False)


@pytest.mark.parametrize(
    "error",
    [
        DistBackendError(
            nccl_error("remote process exited or there was a network error", REMOTE, "socketPollConnect: timeout")
        ),
        DistBackendError(nccl_error(UNHANDLED, CALL_FAILED, "")),
        DistBackendError(
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=24, OpType=ALLREDUCE, NumelIn=1, "
            "NumelOut=1, Timeout(ms)=5000) ran for 5000 milliseconds before timing out."
        ),
        DistBackendError("NCCL communicator was aborted on rank 1."),
    ],
)
def test_what_nccl_says_of_peers_is_suspicion(error: Exception) -> None:
    """A timeout, a lost peer, an aborted communicator, an unexplained failure: the culprit may be anybody."""
    described = describe(error)
    assert (described.fault, described.communication) == (FaultClass.COLLECTIVE_ERROR, True)


def test_the_message_of_an_nccl_error_ends_with_its_cause() -> None:
    """Its first line says where; people need what."""
    error = DistBackendError(nccl_error(UNHANDLED, CALL_FAILED, "Cuda failure 719 'unspecified launch failure'"))
    assert describe(error).message.endswith("NCCL version 2.28.9: Cuda failure 719 'unspecified launch failure'")
    assert describe(ValueError("boom\nmore")).message == "boom"


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


def test_no_half_of_a_secret_is_left_where_a_text_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """User info at the end of what a message may have, and a variable's value where a stack begins: both are masked."""
    monkeypatch.setenv("HF_TOKEN", "hf-0123456789")
    message = f"{'x' * (MAX_MESSAGE_CHARS - 25)} postgres://me:pa55word@db"
    assert describe(ValueError(message)).message.endswith("x postgres://***@db")
    stack = describe(ValueError("hf-0123456789" * (2 * MAX_STACK_CHARS // 13) + "y" * (MAX_STACK_CHARS - 9))).stack
    assert set(stack.strip()) == {"*", "y"}
