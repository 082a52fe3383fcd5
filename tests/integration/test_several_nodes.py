"""Runs over two and three hosts with a network of their own: the same numbers as on one, whatever happens to a node."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

import pytest

from nvrx_sre.cli.watched import read_followers
from nvrx_sre.events.schema import (
    Event,
    FaultClass,
    FaultDetected,
    GenerationFormed,
    IncidentClosed,
    Layer,
    NodeJoined,
    NodeLost,
    RankReplaced,
    Record,
    RestoredFrom,
    Role,
    RunStarted,
    SaveCommitted,
    SaveFailed,
    SaveFailure,
    SaveStarted,
    StateRestored,
    StepsCommitted,
    WorkerStarted,
)
from tests.integration.hosts import UNANSWERED, Hosts, hosts
from tests.integration.launched import Ended, finish, read, start, train, wait_for

DIGESTS = ("loss_digest", "samples_digest", "state_digest")
PORT = 29_555
TRAINER = ("--steps", "24", "--seq-len", "32", "--batch-size", "4")

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The same training with both ranks on one host, without faults."""
    ended = train(tmp_path_factory.mktemp("oracle") / "run", "--nproc", "2", "--standbys", "0")
    assert ended.exit_code == 0, ended.explain()
    return ended


class Launchers:
    """One launcher a host; the first host's leads."""

    def __init__(self, net: Hosts, run_dir: Path) -> None:
        self.net = net
        self.run_dir = run_dir
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *more: str, endpoint: str = "", trainer: Sequence[str] = TRAINER) -> None:
        """Start the launcher of a host."""
        rank, leader = self.net.names.index(name), self.net.names[0]
        nodes = ["--nnodes", str(len(self.net.names)), "--node-rank", str(rank)]
        nodes += ["--rdzv-endpoint", endpoint or f"{leader}:{PORT}"]
        run = ["--nproc-per-node", "1", "--run-dir", str(self.run_dir), "--save-every", "8", "--metrics-linger", "0"]
        arguments = ["launch", *nodes, *run, *more, "-m", "nvrx_sre.trainer", *trainer]
        self.running[name] = start(arguments, prefix=self.net.prefix(name))

    def start_all(self, *more: str, trainer: Sequence[str] = TRAINER) -> None:
        """Start all of them."""
        for name in self.net.names:
            self.start(name, *more, trainer=trainer)

    @property
    def leader(self) -> subprocess.Popen[str]:
        """The first host's launcher."""
        return self.running[self.net.names[0]]

    def wait_for(self, kind: type[Event], count: int = 1) -> Record:
        """Wait for the count-th event of a kind in the journal."""
        seen: list[Record] = []

        def wanted(record: Record) -> bool:
            if isinstance(record.event, kind):
                seen.append(record)
            return len(seen) >= count

        return wait_for(self.run_dir, self.leader, wanted)

    def end(self, name: str) -> Ended:
        """Wait for the end of a host's launcher."""
        return finish(self.running.pop(name), self.run_dir)

    def kill(self, name: str) -> None:
        """The launcher of a host is gone at once, and with it all that it started."""
        popen = self.running.pop(name)
        popen.kill()
        popen.communicate()

    def close(self) -> None:
        """End whatever still runs."""
        for name in list(self.running):
            self.kill(name)


@contextmanager
def launchers(run_dir: Path, *names: str) -> Iterator[Launchers]:
    """Hosts of these names, on which launchers can be started."""
    with hosts(*names) as net:
        made = Launchers(net, run_dir)
        try:
            yield made
        finally:
            made.close()


def assert_same_as(oracle: Ended, ended: Ended) -> None:
    """The run finished with the oracle's losses, samples and state."""
    assert ended.exit_code == 0, ended.explain()
    found = {name: ended.summary[name] for name in DIGESTS}
    assert found == {name: oracle.summary[name] for name in DIGESTS}, ended.explain()
    assert ended.summary["loss_mismatches"] == 0


def test_two_hosts_give_the_numbers_of_one(oracle: Ended, tmp_path: Path) -> None:
    """One rank a host; the remote one is killed, and restored from the memory of its own host.

    Losses, samples and state are those of two ranks on one host; saves have a part of each host.
    """
    with launchers(tmp_path / "run", "a", "b") as run:
        run.start_all("--standbys", "1", "--fault", "sigkill@1:10")
        follower, ended = run.end("b"), run.end("a")
    assert_same_as(oracle, ended)
    assert follower.exit_code == 0, follower.output
    assert "joined leader a:29555 as node 1 of 2" in follower.output
    assert [(event.node, event.node_rank) for _, event in ended.events(NodeJoined)] == [("b", 1)]
    formed = [event.devices for _, event in ended.events(GenerationFormed)]
    assert formed == [["a/0", "b/0"]] * 2, ended.explain()
    assert [record.rank for record, _ in ended.events(RankReplaced)] == [1]
    assert [event.source for _, event in ended.events(StateRestored)] == [RestoredFrom.FRESH, RestoredFrom.HOT]
    assert [event.verdict for _, event in ended.events(IncidentClosed)] == ["recovered"]
    assert ended.events(RunStarted)[0][1].num_nodes == 2
    assert ended.events(SaveCommitted)[-1][1].step == 24, ended.explain()
    newest = tmp_path / "run" / "checkpoints" / ended.events(SaveCommitted)[-1][1].directory
    assert sorted(path.name for path in newest.glob("rank-*.json")) == ["rank-00000.json", "rank-00001.json"]
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))
    stacks = sorted(path.name for path in (tmp_path / "run" / "incidents" / "00001").glob("*.stacks.txt"))
    assert stacks == [f"g00001-rank-{rank:05d}.stacks.txt" for rank in (0, 1)], "each host keeps those of its ranks"
    assert [(each.node, each.epoch) for each in read_followers(tmp_path / "run")] == [("b", 1)], "to be scraped there"


@pytest.fixture
def quick(tmp_path: Path) -> list[str]:
    """Limits in which a node is lost within seconds."""
    path = tmp_path / "limits.toml"
    path.write_text("[nodes]\nlease_s = 6\njoin_s = 120\ngrace_s = 3\nleader_lost_s = 25\n")
    return ["--config", str(path), "--standbys", "0"]


def is_writer(event: Event) -> TypeGuard[WorkerStarted]:
    """A writer was started."""
    return isinstance(event, WorkerStarted) and event.role is Role.WRITER


LONG = ("--steps", "400", "--seq-len", "32", "--batch-size", "4")
"""Training that is still under way when a test has done what it does."""


@pytest.mark.slow
def test_a_cut_is_waited_for_and_healed(oracle: Ended, quick: list[str], tmp_path: Path) -> None:
    """The world needs both hosts: the cut one is lost, comes back by itself, and the numbers are the same."""
    with launchers(tmp_path / "run", "a", "b") as run:
        run.start_all(*quick, "--fault", "slow@0:9=15")
        run.wait_for(SaveCommitted)
        run.net.cut("b")
        lost = run.wait_for(NodeLost).event
        assert isinstance(lost, NodeLost)
        assert (lost.node, lost.ranks, lost.reason) == ("b", 1, "silent for 6 s")
        run.net.heal("b")
        follower, ended = run.end("b"), run.end("a")
    assert_same_as(oracle, ended)
    assert follower.exit_code == 0, follower.output
    assert follower.output.count("joined leader") == 2, follower.output
    assert [event.world_size for _, event in ended.events(GenerationFormed)] == [2, 2], ended.explain()
    assert ended.events(StateRestored)[-1][1].source is RestoredFrom.DURABLE
    faults = [event.fault for _, event in ended.events(FaultDetected)]
    assert FaultClass.NODE_LOST in faults, ended.explain()


@pytest.mark.slow
def test_the_world_shrinks_around_a_host_that_is_gone(quick: list[str], tmp_path: Path) -> None:
    """One rank is enough: on without the other host, from the durable tier, to the end."""
    with launchers(tmp_path / "run", "a", "b") as run:
        run.start_all(*quick, "--min-world-size", "1", "--fault", "slow@0:9=15")
        run.wait_for(SaveCommitted)
        run.kill("b")
        ended = run.end("a")
    assert ended.exit_code == 0, ended.explain()
    assert [event.reason for _, event in ended.events(NodeLost)] == ["the connection was closed"]
    assert [event.devices for _, event in ended.events(GenerationFormed)] == [["a/0", "b/0"], ["a/0"]]
    assert ended.summary["steps"] == 24


@pytest.mark.slow
def test_the_leaders_death_ends_its_followers_and_all_start_again(
    oracle: Ended, quick: list[str], tmp_path: Path
) -> None:
    """SIGKILL of the leader: 75 on the other host once it was looked for in vain; a new start of both resumes."""
    with launchers(tmp_path / "run", "a", "b") as run:
        run.start_all(*quick, "--fault", "slow@0:9=15")
        run.wait_for(SaveCommitted)
        run.kill("a")
        follower = run.end("b")
        assert follower.exit_code == 75, follower.output
        assert "the ranks of this node have ended" in follower.output
        assert "no leader at a:29555 within" in follower.output
        assert "refused: nothing listens at 10.77.0.1" in follower.output
        run.start_all(*quick, "--fault", "slow@0:9=15")
        follower, ended = run.end("b"), run.end("a")
    assert follower.exit_code == 0, follower.output
    assert_same_as(oracle, ended)
    assert ended.events(RunStarted)[-1][1].resumed


@pytest.mark.slow
def test_a_follower_that_was_started_again_within_the_grace_takes_its_place(
    oracle: Ended, quick: list[str], tmp_path: Path
) -> None:
    """Three hosts are too many for the oracle: two, and the launcher of one is killed and started again."""
    with launchers(tmp_path / "run", "a", "b") as run:
        run.start_all(*quick, "--fault", "slow@0:9=15")
        run.wait_for(SaveCommitted)
        run.kill("b")
        run.wait_for(NodeLost)
        run.start("b", *quick, "--fault", "slow@0:9=15")
        follower, ended = run.end("b"), run.end("a")
    assert follower.exit_code == 0, follower.output
    assert_same_as(oracle, ended)
    assert len(ended.events(NodeJoined)) == 2


@pytest.mark.slow
def test_three_hosts_lose_one_and_take_it_back(quick: list[str], tmp_path: Path) -> None:
    """On with two after the grace; the third comes back, and takes part from the next fault on."""
    with launchers(tmp_path / "run", "a", "b", "c") as run:
        more = [*quick, "--min-world-size", "2"]
        run.start_all(*more, trainer=LONG)
        run.wait_for(SaveCommitted)
        run.kill("b")
        run.wait_for(GenerationFormed, 2)
        run.start("b", *more, trainer=LONG)
        run.wait_for(NodeJoined, 3)
        pid = run.wait_for(GenerationFormed, 2).event
        assert isinstance(pid, GenerationFormed)
        assert pid.devices == ["a/0", "c/0"]
        run.wait_for(SaveCommitted, 3)
        subprocess.run(["kill", "-KILL", str(pid.pids[0])], check=True, timeout=10)
        grown = run.wait_for(GenerationFormed, 3).event
        assert isinstance(grown, GenerationFormed)
        assert grown.devices == ["a/0", "b/0", "c/0"]
        run.wait_for(StepsCommitted, 3)
        run.leader.send_signal(signal.SIGTERM)
        codes = {name: run.end(name).exit_code for name in ("a", "b", "c")}
    assert codes == {"a": 143, "b": 143, "c": 143}


@pytest.mark.slow
@pytest.mark.parametrize("told", ["a", "b"])
def test_a_preemption_of_any_host_ends_all_with_what_was_sealed_saved(
    told: str, quick: list[str], tmp_path: Path
) -> None:
    """SIGTERM of one launcher: every host exits 143, and what both ranks held in memory is durable."""
    with launchers(tmp_path / "run", "a", "b") as run:
        run.start_all(*quick, trainer=LONG)
        run.wait_for(SaveCommitted)
        run.running[told].send_signal(signal.SIGTERM)
        ended = {name: run.end(name) for name in ("b", "a")}
    assert [ended["a"].exit_code, ended["b"].exit_code] == [143, 143], ended["a"].explain() + ended["b"].output
    assert "preempted; durable up to step" in ended["b"].output
    saved = ended["a"].events(SaveCommitted)[-1][1].step
    assert saved == max(event.hot_sealed_step for _, event in ended["a"].events(StepsCommitted))


@pytest.mark.slow
def test_a_writer_that_dies_on_another_host_costs_the_attempt_alone(
    oracle: Ended, quick: list[str], tmp_path: Path
) -> None:
    """The leader's writer does not wait for the missing part; both write the same step again."""
    with launchers(tmp_path / "run", "a", "b") as run:
        run.start_all(*quick, "--write-bandwidth", "0.3")
        run.wait_for(SaveStarted)
        writers = [record.event.pid for record in read(run.run_dir) if is_writer(record.event)]
        subprocess.run(["kill", "-KILL", str(writers[1])], check=True, timeout=10)
        follower, ended = run.end("b"), run.end("a")
    assert follower.exit_code == 0, follower.output
    assert_same_as(oracle, ended)
    failed = [(event.step, event.reason) for _, event in ended.events(SaveFailed)]
    assert failed == [(8, SaveFailure.WRITER_DIED)], ended.explain()
    assert 8 in [event.step for _, event in ended.events(SaveCommitted)], ended.explain()
    assert ended.events(SaveCommitted)[-1][1].step == 24
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))


@pytest.mark.slow
def test_a_slow_link_changes_nothing_but_the_time(oracle: Ended, quick: list[str], tmp_path: Path) -> None:
    """What leaves one host queues behind 40 Mbit/s: beats wait for it, nobody is lost, the numbers are the same."""
    with launchers(tmp_path / "run", "a", "b") as run:
        run.net.slow_down("b", "40mbit")
        run.start_all(*quick)
        follower, ended = run.end("b"), run.end("a")
    assert follower.exit_code == 0, follower.output
    assert_same_as(oracle, ended)
    assert not ended.events(NodeLost), ended.explain()


@pytest.mark.slow
def test_hangs_on_another_host_are_told_from_those_of_its_process(oracle: Ended, tmp_path: Path) -> None:
    """A rank that says how far it is, and is behind, is interrupted; one that is stopped is replaced."""
    faults = ("--fault", "hang@1:8", "--fault", "sigstop@1:16")
    with launchers(tmp_path / "run", "a", "b") as run:
        run.start_all("--standbys", "1", "--step-deadline", "3", *faults)
        follower, ended = run.end("b"), run.end("a")
    assert follower.exit_code == 0, follower.output
    assert_same_as(oracle, ended)
    found = [(record.rank, event.fault, event.detector) for record, event in ended.events(FaultDetected)]
    assert found == [(1, "hang", "deadline")] * 2, ended.explain()
    closed = [event.layer for _, event in ended.events(IncidentClosed)]
    assert closed == [Layer.IN_PROCESS, Layer.WORKER], ended.explain()


@pytest.mark.slow
def test_a_leader_that_comes_late_and_elsewhere_is_found(oracle: Ended, quick: list[str], tmp_path: Path) -> None:
    """The name means an address that does not answer at first; later it is the leader's."""
    with launchers(tmp_path / "run", "a", "b") as run:
        run.net.resolve("b", {"leader": UNANSWERED})
        (tmp_path / "run").mkdir(mode=0o700)
        token = tmp_path / "token"
        token.write_text("0123456789abcdef0123456789abcdef")
        token.chmod(0o600)
        run.start("b", *quick, "--token-file", str(token), endpoint=f"leader:{PORT}")
        said = [run.running["b"].stderr or run.running["b"].stdout]
        assert said[0] is not None
        assert f"timed out: {UNANSWERED} does not answer" in said[0].readline()
        run.net.resolve("b", {"leader": run.net.address("a")})
        run.start("a", *quick, "--token-file", str(token), endpoint=f"a:{PORT}")
        follower, ended = run.end("b"), run.end("a")
    assert follower.exit_code == 0, follower.output
    assert_same_as(oracle, ended)


@pytest.mark.slow
def test_a_node_that_does_not_fit_is_refused(quick: list[str], tmp_path: Path) -> None:
    """Another configuration, another token, a rank that is taken: exit 78 with one line; the leader goes on waiting."""
    with launchers(tmp_path / "run", "a", "b") as run:
        run.start("a", *quick)
        run.start("b", *quick, "--keep", "5")
        ended = run.end("b")
        assert ended.exit_code == 78, ended.output
        assert "refuses this node: --keep is 3 on the leader and 5 here" in ended.output
        token = tmp_path / "token"
        token.write_text("0123456789abcdef0123456789abcdef")
        token.chmod(0o600)
        run.start("b", *quick, "--token-file", str(token))
        ended = run.end("b")
        assert ended.exit_code == 78, ended.output
        assert "cannot be joined: its token is another one" in ended.output
        run.leader.send_signal(signal.SIGTERM)
        ended = run.end("a")
        assert ended.exit_code == 143
        assert "node 1 was refused: --keep is 3 here and 5 there" in ended.output
