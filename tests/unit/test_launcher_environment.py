"""What a node's children find in their environment beside the launcher's own, and which of the user's values warn."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nvrx_sre.cli import running
from nvrx_sre.core.errors import UserError
from nvrx_sre.launcher.nccl_variables import VARIABLES, Variable, contrary_values, unset_variables
from nvrx_sre.launcher.node import child_environment

BY_NAME = {item.name: item for item in VARIABLES}
KILL_SWITCHES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody has chosen anything."""
    for item in VARIABLES:
        for name in (item.name, *item.older_names):
            monkeypatch.delenv(name, raising=False)
    yield


def test_nothing_but_the_launcher_ends_a_rank() -> None:
    """Each of torch's ways to end a process over NCCL is switched off in children, and nobody is warned."""
    environment = child_environment(2)
    assert {name: environment[name] for name in KILL_SWITCHES} == KILL_SWITCHES
    assert environment["NCCL_NVLS_ENABLE"] == "0"
    assert "TORCH_NCCL_DESYNC_DEBUG" not in environment, "a variable that is best left alone"
    assert contrary_values(environment) == []


@pytest.mark.parametrize("item", VARIABLES, ids=lambda item: item.name)
def test_the_users_value_is_kept_under_each_name(item: Variable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newer name would outweigh an older one, so it is not set beside it."""
    for name in (item.name, *item.older_names):
        with monkeypatch.context() as patch:
            patch.setenv(name, "7")
            environment = child_environment(2)
        assert environment[name] == "7"
        assert {item.name, *item.older_names} & environment.keys() == {name}


@pytest.mark.parametrize("item", VARIABLES, ids=lambda item: item.name)
def test_a_contrary_value_is_one_line(item: Variable) -> None:
    """It names the variable as the user wrote it, the value, what was wanted, and what follows."""
    value = item.contrary[0].upper() if item.contrary else "3"
    for name in (item.name, *item.older_names):
        (line,) = contrary_values({name: value})
        assert line.startswith(f"{name}={value} is kept (wanted: {item.name}")
        assert line.endswith(item.consequence)
        assert "\n" not in line


@pytest.mark.parametrize("word", ["0", "false", "No", "F", "n", " 0 ", "00"])
def test_a_value_that_means_the_same_warns_nobody(word: str) -> None:
    """Torch takes several words for false, in any case."""
    assert contrary_values(dict.fromkeys(KILL_SWITCHES, word)) == []
    assert unset_variables(dict.fromkeys(BY_NAME, word)) == {}


def test_the_newest_name_is_the_one_that_counts() -> None:
    """As for torch: an older name beside it is ignored."""
    assert contrary_values({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_ASYNC_ERROR_HANDLING": "1"}) == []
    (line,) = contrary_values({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_ASYNC_ERROR_HANDLING": "0"})
    assert line.startswith("TORCH_NCCL_ASYNC_ERROR_HANDLING=1 ")


def test_the_flight_recorder_is_short_unless_somebody_has_chosen() -> None:
    """Reading a long one takes time out of a recovery: any length is the user's to choose, but none is a loss."""
    assert child_environment(2)["TORCH_FR_BUFFER_SIZE"] == "128"
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        assert contrary_values({name: "5000"}) == []
        assert contrary_values({name: "0"})


@pytest.mark.parametrize(("num_devices", "is_refused"), [(0, True), (2, False)])
def test_a_planned_fault_of_a_device_asks_for_one(
    num_devices: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both `train` and `launch` check the plan with what the machine has."""
    monkeypatch.setattr(running, "num_nvidia_devices", lambda: num_devices)
    with pytest.raises(UserError, match="no NVIDIA device") if is_refused else contextlib.nullcontext():
        running.check_fault_specs(["exception@0:3", "cuda_illegal_access@1:4"], 2)


def test_torch_knows_the_names() -> None:
    """The header that torch ships names each variable of its own that is set here; a release that renames one shows."""
    headers = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    text = "".join((headers / name).read_text() for name in ("ProcessGroupNCCL.hpp", "FlightRecorder.hpp"))
    known = set(re.findall(r"\w*NCCL_\w+|TORCH_FR_\w+", text))
    ours = {name for item in VARIABLES for name in (item.name, *item.older_names)}
    assert {name for name in ours if name.startswith(("TORCH_NCCL_", "TORCH_FR_"))} <= known
