"""The writer process: stages, failures of storage and data, fencing, leftovers, its own end."""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nvrx_sre.checkpoint import discover, manifest
from nvrx_sre.checkpoint import writer as writer_module
from nvrx_sre.core.processes import start_ticks
from nvrx_sre.events import messages as wire
from nvrx_sre.events.channel import create_pair
from nvrx_sre.events.schema import SaveFailure
from tests.chaos.writer_ranks import Ranks
from tests.checkpoint_directories import commit
from tests.integration.writer_process import LIMIT_S, ROOT, WriterProcess

pytestmark = pytest.mark.processes


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Slots that are closed again."""
    made = Ranks()
    yield made
    made.close()


Start = Callable[..., WriterProcess]


@pytest.fixture
def start(tmp_path: Path, ranks: Ranks) -> Iterator[Start]:
    """Starts writers of `tmp_path` that know the ranks' slots; ends what a test left running."""
    started: list[WriterProcess] = []

    def make(*options: str, **more: Any) -> WriterProcess:
        writer = WriterProcess(tmp_path, *options, **more)
        started.append(writer)
        writer.map(*ranks.slots)
        return writer

    yield make
    for writer in started:
        if writer.process.returncode is None:
            writer.kill()


def steps(run_dir: Path) -> list[int]:
    """Steps that can be restored."""
    return [item.step for item in discover.discover(run_dir, discover.read_fences(run_dir)).restorable]


def leftovers(run_dir: Path) -> list[str]:
    """Names in checkpoints/ that begin with a dot."""
    return [name for name in os.listdir(discover.checkpoints_path(run_dir)) if name.startswith(".")]


def test_saves_verifies_and_retains(start: Start, ranks: Ranks, tmp_path: Path) -> None:
    """Stage by stage; old checkpoints go after the new one is verified; files are private; each rank's own buffer."""
    writer = start()
    assert writer.hello.pid == writer.process.pid
    assert writer.hello.start_ticks == start_ticks(writer.process.pid)
    for step in (1, 2, 3):
        ranks.capture(step, step % 3)
        said = writer.save(step, [step % 3] * 2)
        assert [answer.stage for answer in said] == ["written", "committed", "verified"]
        assert said[1].directory == manifest.directory_name(step, 1)
        assert said[1].size_bytes == discover.discover(tmp_path, []).restorable[0].size_bytes
    assert writer.wait_for(wire.Retired).step == 1
    assert writer.leave() == 0
    assert steps(tmp_path) == [3, 2]
    assert leftovers(tmp_path) == []
    newest = discover.discover(tmp_path, []).restorable[0].path
    assert {stat.S_IMODE(path.stat().st_mode) for path in newest.iterdir()} == {0o600}
    assert all(item.verified for item in discover.discover(tmp_path, []).restorable)
    keys = set(discover.discover(tmp_path, []).restorable[0].manifest.dcp["tensors"])
    assert "model.running_mean@rank-00001" in keys and "model.weight@rank-00001" not in keys


def test_c01_a_writer_killed_in_mid_save_leaves_the_older_commit_newest(
    start: Start, ranks: Ranks, tmp_path: Path
) -> None:
    """SIGKILL while the files are being written: nothing new is discoverable, the next writer clears and redoes it."""
    commit(tmp_path, 1)
    writer = start(faults=["slow_storage@0:1=60s"])
    ranks.capture(2, 0)
    writer.request(2, [0, 0])
    attempt = wait_for_attempt(tmp_path)
    assert steps(tmp_path) == [1]
    assert discover.discover(tmp_path, []).interrupted == [attempt]
    assert writer.kill() == -signal.SIGKILL
    assert steps(tmp_path) == [1]
    again = start()
    assert leftovers(tmp_path) == []
    assert again.save(2, [0, 0])[-1].stage == "verified"
    assert steps(tmp_path) == [2, 1]


def wait_for_attempt(run_dir: Path) -> str:
    """Name of the temporary directory, as soon as the kernel says that one was made."""
    root = discover.checkpoints_path(run_dir)
    code = (
        "import ctypes, os, sys; libc = ctypes.CDLL(None); fd = libc.inotify_init(); "
        "libc.inotify_add_watch(fd, sys.argv[1].encode(), 0x100); "
        "names = [n for n in os.listdir(sys.argv[1]) if n.startswith('.tmp-')]; "
        "names or os.read(fd, 4096)"
    )
    subprocess.run([sys.executable, "-c", code, str(root)], timeout=LIMIT_S, check=True)
    return next(name for name in os.listdir(root) if name.startswith(discover.TEMPORARY_PREFIX))


def test_a_full_disk_fails_the_save_and_not_the_writer(start: Start, ranks: Ranks, tmp_path: Path) -> None:
    """A write beyond a limit is reason `no_space`, leaves no attempt, and the next save succeeds."""
    writer = start()
    ranks.capture(1, 0)
    resource.prlimit(writer.process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    said = writer.save(1, [0, 0])
    assert [(answer.stage, answer.reason) for answer in said] == [("failed", SaveFailure.NO_SPACE)]
    assert "File too large" in said[0].message
    assert leftovers(tmp_path) == [] and steps(tmp_path) == []
    resource.prlimit(writer.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert writer.save(1, [0, 0])[-1].stage == "verified"


def test_a_blocked_run_directory_fails_the_save(start: Start, ranks: Ranks, tmp_path: Path) -> None:
    """`checkpoints` that cannot be made is reason `storage` as well."""
    (tmp_path / "checkpoints").write_text("in the way")
    writer = start()
    ranks.capture(1, 0)
    assert writer.save(1, [0, 0])[-1].reason == SaveFailure.STORAGE
    (tmp_path / "checkpoints").unlink()
    assert writer.save(1, [0, 0])[-1].stage == "verified"


def test_a_state_that_is_not_finite_is_refused(start: Start, ranks: Ranks, tmp_path: Path) -> None:
    """Reason `nonfinite`, tensor and rank named, nothing written."""
    ranks.poison()
    ranks.capture(1, 0)
    writer = start()
    said = writer.save(1, [0, 0])
    assert [(answer.stage, answer.reason) for answer in said] == [("failed", SaveFailure.NONFINITE)]
    assert "model.weight on rank 1" in said[0].message
    assert steps(tmp_path) == []


def test_slots_that_are_not_what_was_asked_for_are_refused(start: Start, ranks: Ranks, tmp_path: Path) -> None:
    """Another step, another generation, a damaged slot, an unknown rank: failed, and nothing is committed."""
    writer = start()
    ranks.capture(1, 0)
    assert writer.save(2, [0, 0])[-1].reason == SaveFailure.INTERRUPTED
    assert writer.save(1, [0, 0], generation=2)[-1].reason == SaveFailure.INTERRUPTED
    assert writer.save(1, [0, 0, 0])[-1].reason == SaveFailure.INTERRUPTED
    ranks.slots[1].data(0)[:1] = bytes([ranks.slots[1].data(0)[0] ^ 1])
    assert writer.save(1, [0, 0])[-1].reason == SaveFailure.VERIFY
    assert steps(tmp_path) == []


def test_an_abandoned_line_and_a_superseded_epoch_never_commit(start: Start, ranks: Ranks, tmp_path: Path) -> None:
    """Fences and epochs are looked at before the rename; a save at or below the fence is still good."""
    writer = start()
    ranks.capture(5, 0)
    discover.add_fence(tmp_path, 2, 4)
    assert writer.save(5, [0, 0])[-1].reason == SaveFailure.ABANDONED_LINE
    ranks.capture(4, 0)
    assert writer.save(4, [0, 0])[-1].stage == "verified"
    (tmp_path / "epochs").mkdir()
    (tmp_path / "epochs" / "00000002.json").write_text("{}")
    ranks.capture(3, 0)
    assert writer.save(3, [0, 0])[-1].reason == SaveFailure.ABANDONED_LINE
    assert steps(tmp_path) == [4] and leftovers(tmp_path) == []


def test_saving_a_committed_step_again_is_harmless(start: Start, ranks: Ranks, tmp_path: Path) -> None:
    """A good commit is kept; a damaged one of the same name is moved aside and replaced."""
    writer = start()
    ranks.capture(1, 0)
    writer.save(1, [0, 0])
    inode = (discover.checkpoints_path(tmp_path) / "step-00000001-g00001").stat().st_ino
    assert writer.save(1, [0, 0])[-1].stage == "verified"
    path = discover.checkpoints_path(tmp_path) / "step-00000001-g00001"
    assert path.stat().st_ino == inode
    os.truncate(path / "__0_0.distcp", 10)
    assert writer.save(1, [0, 0])[-1].stage == "verified"
    assert steps(tmp_path) == [1]
    assert os.listdir(discover.checkpoints_path(tmp_path) / "rejected") == ["step-00000001-g00001.replaced"]


def test_signals_to_the_whole_job_do_not_end_a_save(start: Start, ranks: Ranks, tmp_path: Path) -> None:
    """SIGTERM and SIGINT reach every process of a job at a preemption; the last save is still written."""
    writer = start(faults=["slow_storage@0:1=0.1s"])
    ranks.capture(1, 0)
    writer.request(1, [0, 0])
    writer.process.send_signal(signal.SIGTERM)
    writer.process.send_signal(signal.SIGINT)
    assert writer.answers()[-1].stage == "verified"
    assert writer.leave() == 0


def test_bandwidth_is_bounded(start: Start, ranks: Ranks, tmp_path: Path) -> None:
    """The writer's own measure of a throttled save is at least size over rate."""
    writer = start("--bandwidth-bytes-s", "20000")
    ranks.capture(1, 0)
    written = writer.save(1, [0, 0])[0]
    tensors = sum(
        entry.size_bytes
        for name, entry in discover.discover(tmp_path, []).restorable[0].manifest.files.items()
        if name.endswith(".distcp")
    )
    assert written.seconds >= tensors / 20_000


def test_c01_a_writer_killed_in_a_bounded_write_leaves_the_older_commit(
    start: Start, ranks: Ranks, tmp_path: Path
) -> None:
    """SIGKILL between two pieces that go past the page cache; the next writer redoes the save."""
    commit(tmp_path, 1)
    writer = start("--bandwidth-bytes-s", "1")
    ranks.capture(2, 0)
    writer.request(2, [0, 0])
    wait_for_attempt(tmp_path)
    assert writer.kill() == -signal.SIGKILL
    assert steps(tmp_path) == [1]
    assert start("--bandwidth-bytes-s", "1e9").save(2, [0, 0])[-1].stage == "verified"
    assert (steps(tmp_path), leftovers(tmp_path)) == ([2, 1], [])


@pytest.mark.parametrize("end", ["hurry", "end of the channel"])
def test_a_bounded_write_hears_that_the_run_ends(start: Start, ranks: Ranks, tmp_path: Path, end: str) -> None:
    """A save that would take hours is done at once when nobody trains beside it; what came meanwhile is not lost."""
    commit(tmp_path, 1)
    writer = start("--bandwidth-bytes-s", "1")
    ranks.capture(2, 0)
    writer.request(2, [0, 0])
    wait_for_attempt(tmp_path)
    if end == "hurry":
        writer.request(3, [1, 1])
        ranks.capture(3, 1)
        assert writer.channel.send(wire.Hurry())
        assert [writer.answers()[-1].stage for _ in range(2)] == ["verified", "verified"]
        assert writer.leave() == 0
        assert steps(tmp_path)[:2] == [3, 2]
    else:
        writer.channel.close()
        assert writer.ended() == 0
        assert steps(tmp_path) == [2, 1]


def test_a_bounded_write_says_that_it_goes_on(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its pieces, so that nobody takes it for hung."""
    monkeypatch.setattr(writer_module, "TELL_EVERY_S", 0.0)
    discover.checkpoints_path(tmp_path).mkdir(parents=True)
    ours, theirs = create_pair()
    config = writer_module.WriterConfig(run_dir=tmp_path, run="demo", bandwidth_bytes_s=1e6)
    writer = writer_module.Writer(config, theirs)
    ranks.capture(1, 0)
    for rank, slots in enumerate(ranks.slots):
        message = wire.MapSlots(rank=rank, data_bytes=slots.data_bytes, blob_bytes=slots.blob_bytes)
        assert ours.send(message, (slots.fd,))
    values = {"epoch": 1, "generation": 1, "world_size": 2, "captured_ns": 1}
    assert ours.send(wire.WriteSave(step=1, slots=[0, 0], **values)) and ours.send(wire.Leave())
    writer.serve()
    theirs.close()
    said = []
    while (received := ours.receive()) is not None:
        assert isinstance(received[0], wire.WriterProgress)
        said.append(received[0].stage)
    ours.close()
    assert said[0] == "writing" and said[-3:] == ["written", "committed", "verified"]


def of_node(part: int, attempt: str, **more: Any) -> dict[str, Any]:
    """`WriteSave` for the writer of one of two nodes with a rank each."""
    return {"world_size": 2, "first_rank": part, "part": part, "num_parts": 2, "attempt": attempt, **more}


@pytest.fixture
def nodes(tmp_path: Path, ranks: Ranks) -> Iterator[list[WriterProcess]]:
    """Two writers, of node 0 with rank 0 and of node 1 with rank 1."""
    writers = [WriterProcess(tmp_path) for _ in range(2)]
    for rank, (writer, slots) in enumerate(zip(writers, ranks.slots, strict=True)):
        message = wire.MapSlots(rank=rank, data_bytes=slots.data_bytes, blob_bytes=slots.blob_bytes)
        assert writer.channel.send(message, (slots.fd,))
    yield writers
    for writer in writers:
        writer.kill()


def test_two_writers_make_one_commit(nodes: list[WriterProcess], start: Start, ranks: Ranks, tmp_path: Path) -> None:
    """Disjoint ranks, one attempt: the same files, keys and pieces as one writer makes; no record stays."""
    ranks.capture(1, 0)
    for part, writer in enumerate(nodes):
        writer.request(1, [0], **of_node(part, "together"))
    assert [answer.stage for answer in nodes[0].answers()] == ["written", "committed", "verified"]
    assert nodes[1].expect(wire.WriterProgress).stage == "written"
    ranks.capture(2, 1)
    alone = start()
    assert alone.save(2, [1, 1])[-1].stage == "verified"
    two, one = discover.discover(tmp_path, []).restorable
    assert (one.step, one.world_size, leftovers(tmp_path)) == (1, 2, [])
    assert set(one.manifest.files) == set(two.manifest.files)
    assert one.manifest.dcp == two.manifest.dcp
    assert "model.running_mean@rank-00001" in one.manifest.dcp["tensors"]
    state = {"model.weight": torch.zeros(64), "model.running_mean@rank-00001": torch.zeros(64)}
    dcp.load(state, checkpoint_id=one.path, no_dist=True)
    assert torch.equal(state["model.weight"], torch.ones(64))
    assert torch.equal(state["model.running_mean@rank-00001"], torch.ones(64))


def test_a_part_that_does_not_come_ends_the_save(nodes: list[WriterProcess], ranks: Ranks, tmp_path: Path) -> None:
    """The leader abandons at its deadline; a node that cannot save ends it for all at once; the next save is whole."""
    ranks.capture(1, 0)
    nodes[0].request(1, [0], **of_node(0, "alone", deadline_s=0.5))
    [failed] = nodes[0].answers()
    assert failed.reason == SaveFailure.INTERRUPTED and "plan 1 did not come" in failed.message
    nodes[1].request(1, [2], **of_node(1, "refused"))
    nodes[0].request(1, [0], **of_node(0, "refused"))
    assert [node.answers()[-1].reason for node in nodes] == [SaveFailure.INTERRUPTED] * 2
    assert (steps(tmp_path), leftovers(tmp_path)) == ([], [])
    nodes[0].request(1, [0], **of_node(0, "again"))
    nodes[1].request(1, [0], **of_node(1, "again"))
    assert nodes[0].answers()[-1].stage == "verified"
    assert (steps(tmp_path), leftovers(tmp_path)) == ([1], [])


def test_the_end_of_the_channel_ends_the_writer(start: Start) -> None:
    """A launcher that is gone is the end, without a signal and in order."""
    writer = start()
    writer.channel.socket.shutdown(socket.SHUT_RDWR)
    writer.process.communicate(timeout=LIMIT_S)
    assert writer.process.returncode == 0
    writer.channel.close()


def test_listing_does_not_load_torch(tmp_path: Path) -> None:
    """Commands that only read start fast."""
    commit(tmp_path, 10)
    code = (
        "import sys; from nvrx_sre.cli.checkpoint import command; "
        f"command(['list', {str(tmp_path)!r}], standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "step-00000010-g00001" in ended.stdout
