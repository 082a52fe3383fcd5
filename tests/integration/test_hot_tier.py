"""The hot tier in a real run, and slots whose owner was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from nvrx_sre.checkpoint.slots import PAGE_BYTES, SlotFile, SlotHeader
from nvrx_sre.events.schema import HotIntervalChosen, HotSlotsAllocated, SaveVerified
from nvrx_sre.launcher.machine_interval import EARLY_EVERY_MAX, PROBE_EVERY
from tests.integration.launched import Ended, train

pytestmark = pytest.mark.processes
STEPS = 90


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run that measures its interval, with two slots, in which no durable save is due."""
    run_dir = tmp_path_factory.mktemp("hot") / "run"
    options = ("--hot-every", "auto", "--hot-slots", "2", "--save-every", "1000", "--standbys", "0")
    return train(run_dir, "--nproc", "2", "--steps", str(STEPS), *options)


def test_the_interval_is_chosen_and_recorded(measured: Ended) -> None:
    """`--hot-every auto`: what a capture cost, what a step takes, and the interval that follows from them."""
    assert measured.exit_code == 0, measured.explain()
    chosen = measured.events(HotIntervalChosen)[0][1]
    assert "a careful choice" in chosen.reason
    assert chosen.step_s > 0 and PROBE_EVERY <= chosen.every_steps <= EARLY_EVERY_MAX
    assert chosen.every_steps == EARLY_EVERY_MAX or chosen.cost_s <= 0.01 * chosen.step_s * chosen.every_steps * 1.001
    is_dear = chosen.cost_s > 0.01 * chosen.step_s * (chosen.every_steps - 1) * 0.999
    assert is_dear or chosen.every_steps == PROBE_EVERY


def test_the_last_step_is_saved_durably_although_none_was_due(measured: Ended) -> None:
    """It is captured when the training function returns, then written and verified."""
    assert [event.step for _, event in measured.events(SaveVerified)] == [STEPS], measured.explain()


def test_the_memory_of_the_slots_is_recorded(measured: Ended) -> None:
    """Two slots a rank on two ranks, and 5 % of one slot for the headers."""
    (slots,) = [event for _, event in measured.events(HotSlotsAllocated)]
    assert slots.num_slots == 2
    assert 2 * 2 * slots.slot_bytes * 0.9 <= slots.total_bytes <= 2 * (2 + 0.05) * slots.slot_bytes + 2 * 3 * PAGE_BYTES


DIE_FILLING = """
import os, signal, sys
from nvrx_sre.checkpoint.slots import SlotFile
slots = SlotFile.map(int(sys.argv[1]), 8192, 4096)
slots.begin(slots.free_slot(2), 1, 2, False)
slots.data(1)[:4] = b"half"
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_c49_a_slot_whose_owner_was_killed_is_taken_over_at_once() -> None:
    """There is no lock to break: the half filled slot holds nothing, and the next process fills it again."""
    slots = SlotFile.create(8192, 4096, name="nvrx-test")
    seal(slots, 0, step=1)
    done = subprocess.run([sys.executable, "-c", DIE_FILLING, str(slots.fd)], pass_fds=(slots.fd,), check=False)
    assert done.returncode == -signal.SIGKILL
    assert [header.step if header else None for header in slots.headers()] == [1, None, None]
    successor = SlotFile.map(os.dup(slots.fd), 8192, 4096)
    assert successor.free_slot(2, generation=2, restored_step=1) == 1
    seal(successor, 1, step=2, generation=2)
    assert slots.header(1) is not None
    successor.close()
    slots.close()


def test_c49_what_a_live_writer_reads_is_not_taken_over() -> None:
    """A new process of the rank leaves the held slot alone, whatever else it may overwrite."""
    slots = SlotFile.create(8192, 4096, num_slots=2, name="nvrx-test")
    seal(slots, 0, step=1)
    seal(slots, 1, step=2)
    slots.held_slot, slots.sealed_step = 0, 2
    successor = SlotFile.map(os.dup(slots.fd), 8192, 4096)
    assert successor.num_slots == 2
    assert successor.free_slot(3, generation=2, restored_step=2) is None
    slots.held_slot = -1
    assert successor.free_slot(3, generation=2, restored_step=2) == 0
    successor.close()
    slots.close()


def seal(slots: SlotFile, slot: int, step: int, generation: int = 1) -> None:
    """Fill and seal a slot."""
    slots.begin(slot, generation, step, False)
    header = SlotHeader(
        generation=generation,
        step=step,
        durable=False,
        sealed_mono_ns=step,
        data_bytes=8,
        blob_bytes=0,
        layout_hash="ab" * 32,
        digest=slots.digest(slot, 8, 0),
    )
    slots.seal(slot, header)
