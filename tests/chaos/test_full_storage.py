"""A real file system that is full, read-only or limited, under a real writer; and a refusal in each of its stages.

The writer runs in a mount namespace of its own with a small tmpfs (or a read-only bind) over `checkpoints/`, which
goes away with it. The test looks in through /proc/PID/root.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nvrx_sre.checkpoint import discover
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import SaveFailure
from nvrx_sre.faults.plan import SAVE_STAGES
from tests.chaos.writer_ranks import Ranks
from tests.checkpoint_directories import commit
from tests.integration.launched import finish
from tests.integration.launched import start as start_run
from tests.integration.writer_process import WriterProcess

pytestmark = pytest.mark.processes


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Slots that are closed again."""
    made = Ranks()
    yield made
    made.close()


Start = Callable[..., WriterProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts writers of `tmp_path` with the slots they are given; ends what a test left running."""
    started: list[WriterProcess] = []

    def make(*slots: SlotFile, options: Sequence[str] = (), **more: Any) -> WriterProcess:
        writer = WriterProcess(tmp_path, *options, **more)
        started.append(writer)
        writer.map(*slots)
        return writer

    yield make
    for writer in started:
        if writer.process.returncode is None:
            writer.kill()


def mounted(mount: str) -> list[str]:
    """Command prefix: a mount namespace in which `mount`, a shell command, has been done."""
    return ["unshare", "--mount", "--map-root-user", "sh", "-c", f'{mount} && exec "$@"', "sh"]


def seen_by(writer: WriterProcess, path: Path) -> Path:
    """`path` as the writer's namespace has it."""
    return Path(f"/proc/{writer.process.pid}/root{path}")


def steps(run_dir: Path) -> list[int]:
    """Steps that can be restored."""
    return [item.step for item in discover.discover(run_dir, discover.read_fences(run_dir)).restorable]


@pytest.mark.parametrize("options", [(), ("--bandwidth-bytes-s", "1e9")], ids=["as usual", "bounded"])
def test_c09_a_full_disk_keeps_what_there_is_and_is_tried_again(
    start: Start, ranks: Ranks, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """ENOSPC of a small tmpfs: reason `no_space`, no attempt left, both older commits kept, whole again with room.

    The writer's own log is on a full disk as well. A bounded write goes past the page cache.
    """
    root = discover.checkpoints_path(tmp_path)
    root.mkdir()
    prefix = mounted(f"mount -t tmpfs -o size=200k none {root} && exec 2>/dev/full")
    writer = start(*ranks.slots, options=options, prefix=prefix)
    run_dir = seen_by(writer, tmp_path)
    for step in (1, 2):
        ranks.capture(step, step % 3)
        assert writer.save(step, [step % 3] * 2)[-1].stage == "verified"
    filler = discover.checkpoints_path(run_dir) / "filler"
    with pytest.raises(OSError, match="No space"), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    ranks.capture(3, 0)
    for _ in range(2):
        [failed] = writer.save(3, [0, 0])
        assert (failed.stage, failed.reason) == ("failed", SaveFailure.NO_SPACE)
        assert "No space left" in failed.message
        assert steps(run_dir) == [2, 1]
        assert not [name for name in os.listdir(filler.parent) if name.startswith(".tmp-")]
    filler.unlink()
    assert writer.save(3, [0, 0])[-1].stage == "verified"
    assert writer.wait_for(wire.Retired).step == 1
    assert steps(run_dir) == [3, 2]
    assert writer.leave() == 0


def test_a_read_only_directory_fails_saves_and_not_the_writer(start: Start, ranks: Ranks, tmp_path: Path) -> None:
    """EROFS is reason `storage`; what was committed before can still be read."""
    commit(tmp_path, 1)
    root = discover.checkpoints_path(tmp_path)
    writer = start(*ranks.slots, prefix=mounted(f"mount --bind {root} {root} && mount -o remount,bind,ro {root}"))
    ranks.capture(2, 0)
    for _ in range(2):
        [failed] = writer.save(2, [0, 0])
        assert (failed.stage, failed.reason) == ("failed", SaveFailure.STORAGE)
        assert "Read-only" in failed.message
    assert steps(seen_by(writer, tmp_path)) == [1]
    assert writer.leave() == 0


def test_c08_a_refusal_in_any_stage_leaves_a_commit_or_nothing(start: Start, ranks: Ranks, tmp_path: Path) -> None:
    """ENOSPC at each stage, the last tiny writes included; the same step saved again is whole, twice is harmless."""
    faults = [f"no_space@0:{10 + number}/{stage}" for number, stage in enumerate(SAVE_STAGES)]
    commit(tmp_path, 1)
    commit(tmp_path, 2)
    writer = start(*ranks.slots, faults=faults)
    for number, stage in enumerate(SAVE_STAGES):
        step = 10 + number
        ranks.capture(step, number % 3)
        said = writer.save(step, [number % 3] * 2)
        if stage != "retention":
            assert (said[-1].stage, said[-1].reason) == ("failed", SaveFailure.NO_SPACE), stage
            assert (step in steps(tmp_path)) == (stage == "verify"), stage
        assert not [name for name in os.listdir(tmp_path / "checkpoints") if name.startswith(".tmp-")], stage
        assert len(steps(tmp_path)) >= 2, stage
        for _ in range(2):
            assert writer.save(step, [number % 3] * 2)[-1].stage == "verified", stage
    assert writer.leave() == 0
    assert all(item.verified for item in discover.discover(tmp_path, []).restorable)


@pytest.mark.slow
def test_c09_a_run_whose_whole_directory_is_full_trains_on(tmp_path: Path) -> None:
    """Journal, logs and saves are refused from step 3 on, and the ranks go on printing: no fault.

    What could not be written is told at the end: the last step among it, so that the run is to be started again.
    """
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    options = ["--nproc-per-node", "2", "--run-dir", str(run_dir), "--metrics-linger", "0", "--standbys", "0"]
    script = [str(Path(__file__).with_name("shm_script.py")), "100", "12", str(run_dir / "filler")]
    arguments = ["launch", *options, "--save-every", "4", *script]
    ended = finish(start_run(arguments, prefix=mounted(f"mount -t tmpfs -o size=2m none {run_dir}")), run_dir)
    assert ended.exit_code == 75, ended.output
    last = ended.output.splitlines()[-1]
    assert last.startswith("nvrx-sre: exit 75: finished; the last step is not saved (no_space: "), ended.output
    assert ", nothing is durable; " in last, ended.output
    assert last.endswith("summary.json: No space left on device"), ended.output
    assert "fault:" not in ended.output


def test_c10_an_attempt_of_two_ranks_leaves_nothing_in_a_save_of_one(
    start: Start, ranks: Ranks, tmp_path: Path
) -> None:
    """A save cut short by SIGKILL, then the same step by a smaller world: only the files of the new world."""
    writer = start(*ranks.slots, faults=["writer_kill@0:10/manifest"])
    ranks.capture(10, 0)
    writer.request(10, [0, 0])
    assert writer.wait_for(wire.Injected).spec == "writer_kill@0:10/manifest"
    assert writer.ended() == -signal.SIGKILL
    again = start(ranks.slots[0])
    assert again.save(10, [0])[-1].stage == "verified"
    assert again.leave() == 0
    [found] = discover.discover(tmp_path, []).restorable
    assert set(os.listdir(found.path)) == {".metadata", "__0_0.distcp", "manifest.json", "rank-00000.json"}
    assert found.world_size == 1


def test_c18_a_slow_delete_holds_up_no_save(start: Start, ranks: Ranks, tmp_path: Path) -> None:
    """A delete that never ends: the next saves are committed and verified meanwhile; half deleted is no candidate."""
    for step in (1, 2, 3):
        commit(tmp_path, step)
    writer = start(*ranks.slots, faults=["slow_storage@0:4=600.0s/retention"])
    ranks.capture(4, 0)
    assert writer.save(4, [0, 0])[-1].stage == "verified"
    assert writer.wait_for(wire.Injected).spec == "slow_storage@0:4=600.0s/retention"
    for step in (5, 6):
        ranks.capture(step, step % 3)
        assert writer.save(step, [step % 3] * 2)[-1].stage == "verified"
    assert steps(tmp_path) == [6, 5, 4, 3, 2]
    assert (tmp_path / "checkpoints" / ".retired-step-00000001-g00001" / "manifest.json").exists()


def test_c36_a_state_that_is_not_finite_pushes_out_no_healthy_one(start: Start, ranks: Ranks, tmp_path: Path) -> None:
    """Every save of it is refused by name; nothing is deleted for it."""
    for step in (1, 2, 3):
        commit(tmp_path, step)
    ranks.poison()
    writer = start(*ranks.slots)
    for step in (4, 5, 6):
        ranks.capture(step, step % 3)
        assert writer.save(step, [step % 3] * 2)[-1].reason == SaveFailure.NONFINITE
    assert writer.leave() == 0
    assert steps(tmp_path) == [3, 2, 1]
