"""What a generation is offered, and what that says of the slots."""

from __future__ import annotations

from pathlib import Path

from nvrx_sre.checkpoint.slots import NONE, SlotHeader
from nvrx_sre.launcher.restorable import Restorables


def header(step: int) -> SlotHeader:
    """A sealed slot."""
    return SlotHeader(
        generation=1,
        step=step,
        durable=False,
        sealed_mono_ns=0,
        data_bytes=0,
        blob_bytes=0,
        layout_hash="ab" * 32,
        digest=bytes(16),
    )


def test_the_best_step_is_what_slots_are_opened_with(tmp_path: Path) -> None:
    """The newest step that all ranks hold, and nothing where the hot tier is not to be used."""
    restorables = Restorables("run", tmp_path, lambda event: None)
    headers = [[header(8), header(9), None], [header(10), header(9), header(8)]]
    hot = restorables.find(headers, checkpoints_back=0, hot_allowed=True, commits_ever=False)
    assert [entry["step"] for entry in hot.entries] == [9, 8] and hot.best_step == 9
    none = restorables.find(headers, checkpoints_back=0, hot_allowed=False, commits_ever=False)
    assert none.entries == [] and none.best_step == NONE
