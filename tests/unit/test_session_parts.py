"""Parts of the rank-side API that need no launcher: settings, intervals, unmanaged context."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import nvrx_sre
from nvrx_sre.checkpoint.slots import SlotFile, SlotHeader
from nvrx_sre.core.errors import InternalError, UserError
from nvrx_sre.events import messages as wire
from nvrx_sre.events.settings import SETTINGS_VARIABLE, ChildSettings
from nvrx_sre.session.injecting import Injector
from nvrx_sre.session.process import HotSchedule, RankProcess
from nvrx_sre.session.slots_ahead import SlotsAhead


def settings() -> ChildSettings:
    """Settings of some child."""
    return ChildSettings(
        run="r",
        run_dir="/runs/r",
        launcher_pid=1,
        role="worker",
        attempt=2,
        waits_for_writer=False,
        save_every=50,
        interrupt_signal=39,
        fault_specs=("exception@1:40",),
        group_timeout_s=600.0,
    )


def test_settings_survive_the_environment() -> None:
    """What the launcher writes is what the child reads."""
    assert ChildSettings.from_environment(settings().to_environment()) == settings()
    assert ChildSettings.from_environment({}) is None


def test_broken_settings_are_an_internal_error() -> None:
    """Settings of another version are not guessed at."""
    with pytest.raises(InternalError, match=SETTINGS_VARIABLE):
        ChildSettings.from_environment({SETTINGS_VARIABLE: "{}"})


def test_a_new_interval_holds_from_its_step_on() -> None:
    """Every fourth step until 100, every third from there; 0 captures none."""
    schedule = HotSchedule(4)
    schedule.change(3, 100)
    assert [step for step in (96, 99, 100, 102, 104) if schedule.is_due(step)] == [96, 102]
    schedule.change(0, 0)
    assert not schedule.is_due(105)


def test_without_a_launcher_the_function_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decorated function called in a plain process gets an unmanaged context and its result comes back."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    @nvrx_sre.resilient
    def train(ctx: nvrx_sre.Context, steps: int) -> int:
        ctx.track(position={"a": 1})
        for _ in range(ctx.restore(), steps):
            with ctx.phase("data"):
                ctx.tick()
            ctx.commit(loss=1.0, tokens=2)
        with pytest.raises(UserError, match="data, evaluate, save"), ctx.phase("lunch"):
            pass
        assert not ctx.managed
        return ctx.step

    assert train(3) == 3


def test_without_a_launcher_the_group_ends_with_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is left to the interpreter's exit can abort the process (`terminate called`)."""
    import torch.distributed as dist

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)

    @nvrx_sre.resilient
    def train(ctx: nvrx_sre.Context) -> bool:
        ctx.init_process_group("gloo")
        return dist.is_initialized()

    assert train()
    assert not dist.is_initialized()


class Control:
    """What a rank's process needs of its control."""


def test_another_rank_begins_without_the_slots_of_the_last_one() -> None:
    """A rank of another world has no slots yet: what was mapped for the old one must not be written again."""
    process = RankProcess(settings(), Control())  # type: ignore[arg-type]  # nothing is sent here
    granted = SlotFile.create(4096, 4096, num_slots=2, num_alike=1, name="nvrx-test")
    process.take_slots(assigned(0), os.dup(granted.fd))
    mapped = process.slots
    assert mapped is not None
    process.take_slots(assigned(1), None)
    assert process.slots is None
    process.take_slots(assigned(1), None)
    granted.close()


def assigned(rank: int) -> wire.Assign:
    """A rank of two, with slots of a page each."""
    return wire.Assign(
        rank=rank,
        local_rank=rank,
        world_size=2,
        generation=2,
        slot_data_bytes=4096,
        slot_blob_bytes=4096,
        local_world_size=2,
        node_rank=0,
    )


def memory_of(name: str) -> list[str]:
    """Slots of this name that this process has mapped, by address."""
    return [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if f"memfd:{name} " in line]


def test_a_standby_becomes_a_rank_with_the_slots_that_it_has_mapped_ahead() -> None:
    """The mapping stays, those of other ranks go; slots that are others than were mapped ahead are mapped anew."""
    mine, other, newer = (SlotFile.create(4096, 4096, num_slots=2, name=f"nvrx-{name}") for name in ("a", "b", "c"))
    ahead = SlotsAhead()
    for rank, slots in enumerate((mine, other)):
        ahead.map(wire.MapSlots(rank=rank, data_bytes=4096, blob_bytes=4096), os.dup(slots.fd))
    [_, mapped_ahead] = memory_of("nvrx-a")
    assert len(memory_of("nvrx-b")) == 2
    taken = ahead.take(0, os.dup(mine.fd), 4096, 4096)
    assert memory_of("nvrx-a")[1:] == [mapped_ahead] and len(memory_of("nvrx-b")) == 1
    taken.sealed_step = 7
    assert mine.sealed_step == 7, "it is the same memory"
    ahead.map(wire.MapSlots(rank=0, data_bytes=4096, blob_bytes=4096), os.dup(other.fd))
    anew = ahead.take(0, os.dup(newer.fd), 4096, 4096)
    anew.sealed_step = 9
    assert newer.sealed_step == 9 and len(memory_of("nvrx-b")) == 1
    ahead.map(wire.MapSlots(rank=1, data_bytes=8192, blob_bytes=4096), os.dup(other.fd))
    ahead.map(wire.MapSlots(rank=1, data_bytes=4096, blob_bytes=4096), os.dup(other.fd))
    ahead.drop()
    assert len(memory_of("nvrx-b")) == 1, "sizes that are not theirs map nothing, and what is dropped is free"
    for slots in (mine, other, newer, taken, anew):
        slots.close()


def test_the_newest_state_that_can_be_read_is_found_among_slots_mapped_ahead() -> None:
    """Newest first, and of the lowest rank that has one; what is being overwritten makes no sense and is passed by."""
    empty, full = (SlotFile.create(4096, 4096, num_slots=3) for _ in range(2))
    for slot, step in ((0, 4), (1, 6), (2, 5)):
        full.begin(slot, 1, step, durable=False)
        full.seal(slot, header(step))
    ahead = SlotsAhead()
    for rank, slots in ((3, empty), (5, full)):
        ahead.map(wire.MapSlots(rank=rank, data_bytes=4096, blob_bytes=4096), os.dup(slots.fd))
    seen: list[int] = []

    def read(_: SlotFile, slot: int, found: SlotHeader) -> int:
        seen.append(found.step)
        if found.step == 6:
            raise ValueError("torn")
        return slot

    assert ahead.newest(read) == (5, 2)
    assert seen == [6, 5]
    ahead.drop()
    assert ahead.newest(read) is None
    for slots in (empty, full):
        slots.close()


def header(step: int) -> SlotHeader:
    """Of a sealed slot."""
    return SlotHeader(
        generation=1,
        step=step,
        durable=False,
        sealed_mono_ns=1,
        data_bytes=64,
        blob_bytes=64,
        layout_hash="0" * 64,
        digest=bytes(16),
    )


def test_the_usual_step_is_not_one_that_was_held() -> None:
    """A step that a fault has stretched does not stretch the next `slow` any further."""
    go = wire.Go(
        generation=1,
        world_size=1,
        store_host="",
        store_port=0,
        candidates=[],
        require_restore=False,
        passes={},
        hot_every=1,
    )
    injector = Injector(RankProcess(settings(), Control()), go, rank=0)  # type: ignore[arg-type]  # nothing is sent here
    total_s = 0.0
    for step_s in (0.4, 0.1, 6.0, 0.1, 0.1):
        total_s += step_s
        injector.step_committed(total_s)
    assert injector.usual_step_s == pytest.approx(0.1)
