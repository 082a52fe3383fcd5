"""What a node's children find in their environment beside the launcher's own."""

from __future__ import annotations

import pytest

from nvrx_sre.launcher.node import RECORDED_COLLECTIVES, RECORDER_VARIABLES, child_environment


def test_the_flight_recorder_is_short_unless_somebody_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a long one takes time out of a recovery; a choice under either of its names is respected."""
    for name in RECORDER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert child_environment(2)["TORCH_FR_BUFFER_SIZE"] == RECORDED_COLLECTIVES
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "5000")
    assert "TORCH_FR_BUFFER_SIZE" not in child_environment(2)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    assert child_environment(2)["TORCH_FR_BUFFER_SIZE"] == "7"
