"""Parts of the rank-side API that need no launcher: settings, time split, unmanaged context."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

import nvrx_sre
from nvrx_sre.core.errors import InternalError, UserError
from nvrx_sre.events.schema import Phase
from nvrx_sre.events.settings import SETTINGS_VARIABLE, ChildSettings
from nvrx_sre.session.saving import Captured, HotSaver
from nvrx_sre.session.times import StepTimes


def settings() -> ChildSettings:
    """Settings of some child."""
    return ChildSettings(
        run="r",
        run_dir="/runs/r",
        launcher_pid=1,
        role="worker",
        attempt=2,
        hot_every=1,
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


class Ticks:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return self.now_ns

    def to_wall_ns(self, monotonic_ns: int) -> int:
        return monotonic_ns


def test_time_is_booked_to_the_phase_that_ends() -> None:
    """1 s of step, 2 s of data, 3 s of save: each lands where it belongs, nothing is lost."""
    clock = Ticks()
    times = StepTimes(clock)
    for phase, spent_s in ((Phase.DATA, 1), (Phase.SAVE, 2), (Phase.STEP, 3)):
        clock.now_ns += spent_s * 1_000_000_000
        times.switch(phase)
    assert [times.total_s(item) for item in (Phase.STEP, Phase.DATA, Phase.SAVE, Phase.EVALUATE)] == [1, 2, 3, 0]


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


class FullSlots:
    """Slots of which none is free until told otherwise."""

    def __init__(self) -> None:
        self.free: int | None = None

    def free_slot(self, step: int, *, generation: int, restored_step: int) -> int | None:
        return self.free


class OneTensor:
    """Stands for a capturer; remembers the durable steps it captured."""

    layout_hash = ""

    def __init__(self) -> None:
        self.durable: list[int] = []

    def refresh(self) -> None:
        """Nothing to look at."""

    def required_bytes(self) -> tuple[int, int]:
        return 0, 0

    def capture(self, slots: object, slot: int, *, step: int, durable: bool, **_: object) -> None:
        if durable:
            self.durable.append(step)


def test_a_due_save_without_a_free_slot_is_made_up_for() -> None:
    """Step 50 finds no slot; the next boundary that finds one is saved durably, and only that one."""
    slots, capturer = FullSlots(), OneTensor()
    process: Any = SimpleNamespace(
        settings=settings(), control=SimpleNamespace(clock=Ticks()), slots_for=lambda *_: slots
    )
    saver = HotSaver(process, cast(Any, capturer), generation=1, restored_step=0)
    assert saver.at_boundary(50) == Captured(slot=-1, durable=True)
    assert saver.at_boundary(51) == Captured(slot=-1, durable=True)
    slots.free = 2
    assert saver.at_boundary(52) == Captured(slot=2, durable=True)
    assert saver.at_boundary(53) == Captured(slot=2, durable=False)
    assert (capturer.durable, saver.num_skipped, saver.num_captured) == ([52], 2, 2)
