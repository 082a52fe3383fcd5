"""Planned faults: text form, validation, when they fire, plan files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_sre.core.errors import ExitCode, UserError
from nvrx_sre.faults.plan import (
    DEFAULT_PARAMETERS,
    DEVICE_KINDS,
    EVERY_PASS,
    RARE_PHASES,
    SAVE_STAGES,
    STEP_PHASES,
    STORAGE_KINDS,
    FaultKind,
    FaultPlan,
    FaultSpec,
    load_plan,
)


@st.composite
def specs(draw: st.DrawFn) -> FaultSpec:
    """Any valid fault."""
    kind = draw(st.sampled_from(list(FaultKind)))
    parameter = None
    if kind in DEFAULT_PARAMETERS:
        parameter = draw(st.none() | st.integers(1001, 10**6).map(lambda thousandths: thousandths / 1000))
    return FaultSpec(
        kind=kind,
        rank=draw(st.integers(0, 4096)),
        step=draw(st.integers(1, 10**9)),
        parameter=parameter,
        phase=draw(st.none() | st.sampled_from(SAVE_STAGES if kind in STORAGE_KINDS else STEP_PHASES + RARE_PHASES)),
        passes=draw(st.integers(0, 50)),
    )


@given(specs())
def test_text_and_fault_are_inverse(spec: FaultSpec) -> None:
    """Reading the text of a fault gives the same fault; the text is canonical, so it can count passes."""
    assert FaultSpec.parse(str(spec)) == spec
    assert str(FaultSpec.parse(str(spec))) == str(spec)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exception@1:40", FaultSpec(kind=FaultKind.EXCEPTION, rank=1, step=40)),
        ("sigkill@1:200/save", FaultSpec(kind=FaultKind.SIGKILL, rank=1, step=200, phase="save")),
        ("slow@1:40=2.0x", FaultSpec(kind=FaultKind.SLOW, rank=1, step=40, parameter=2.0)),
        ("slow@1:40=2.5xx3", FaultSpec(kind=FaultKind.SLOW, rank=1, step=40, parameter=2.5, passes=3)),
        ("slow_storage@0:5=0.25s", FaultSpec(kind=FaultKind.SLOW_STORAGE, rank=0, step=5, parameter=0.25)),
        ("exception@1:15x*", FaultSpec(kind=FaultKind.EXCEPTION, rank=1, step=15, passes=EVERY_PASS)),
        ("hang@0:7/collectivex2", FaultSpec(kind=FaultKind.HANG, rank=0, step=7, phase="collective", passes=2)),
        (" sigterm@0:3 ", FaultSpec(kind=FaultKind.SIGTERM, rank=0, step=3)),
    ],
)
def test_documented_forms_are_read(text: str, expected: FaultSpec) -> None:
    """Each form of the documentation means what it says."""
    assert FaultSpec.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("exeption@1:40", ["unknown kind 'exeption'", "did you mean 'exception'?", "node_kill"]),
        ("zzz@1:40", ["unknown kind 'zzz'", "known are exception"]),
        ("exception", ["cannot be read", "KIND@RANK:STEP"]),
        ("exception@1", ["cannot be read"]),
        ("exception@one:2", ["cannot be read"]),
        ("", ["cannot be read"]),
        ("exception@1:0", ["step is 0", "count from 1"]),
        ("exception@-1:4", ["rank is -1"]),
        ("exception@1:4/bakward", ["unknown phase 'bakward'", "did you mean 'backward'?"]),
        ("exception@1:4x0", ["never fire"]),
        ("exception@1:4=2.0x", ["takes no parameter"]),
        ("slow@1:4=1.0x", ["more than 1"]),
        ("slow@1:4=2.0s", ["in 'x', not 's'"]),
        ("slow_storage@1:4=0", ["more than 0"]),
        ("slow@1:4=1.2.3x", ["is not a number"]),
    ],
)
def test_bad_text_says_what_is_wrong(text: str, words: list[str]) -> None:
    """A fault that cannot be is one clear line of a configuration error."""
    with pytest.raises(UserError) as raised:
        FaultSpec.parse(text)
    assert raised.value.exit_code == ExitCode.CONFIG
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


def test_check_refuses_what_can_never_fire() -> None:
    """A rank or a step outside the run is refused by name; the last of each is accepted."""
    FaultPlan.parse(["exception@1:300"]).check(2, 300)
    with pytest.raises(UserError, match=r"there is no rank 2, the ranks are 0 to 1"):
        FaultPlan.parse(["exception@2:4"]).check(2)
    with pytest.raises(UserError, match=r"there is no step 301, the run has 300"):
        FaultPlan.parse(["exception@1:301"]).check(2, 300)


def test_faults_of_a_device_are_refused_where_there_is_none() -> None:
    """One line that names the fault, the lack and the way out; with a device they are accepted."""
    for kind in DEVICE_KINDS:
        FaultPlan.parse([f"{kind}@1:4"]).check(2, has_device=True)
        with pytest.raises(UserError, match=f"fault {kind}@1:4: this machine has no NVIDIA device .* cuda_error"):
            FaultPlan.parse([f"{kind}@1:4"]).check(2, has_device=False)
    FaultPlan.parse(["cuda_error@1:4"]).check(2, has_device=False)


def test_a_fault_stands_once_in_a_plan() -> None:
    """Two equal faults share their count of passes, so the second would never fire: refused with the cure."""
    with pytest.raises(UserError, match=r"twice in the plan: write exception@1:40x2"):
        FaultPlan.parse(["exception@1:40", "exception@1:40"])
    with pytest.raises(UserError, match="twice"):
        FaultPlan.parse(["exception@1:40", "exception@1:40x3"])


def test_fires_once_for_the_run() -> None:
    """With the pass on record the fault stays silent, in a new plan object as after a restart."""
    assert FaultPlan.parse(["sigkill@0:9"]).due(0, 9, "forward", {}) == [FaultSpec.parse("sigkill@0:9")]
    assert FaultPlan.parse(["sigkill@0:9"]).due(0, 9, "forward", {"sigkill@0:9": 1}) == []


@pytest.mark.parametrize(("suffix", "limit"), [("", 1), ("x1", 1), ("x3", 3), ("x*", 20)])
def test_number_of_passes(suffix: str, limit: int) -> None:
    """`xN` fires on the first N executions of the step, `x*` on all; each generation counts on from the last."""
    passes: dict[str, int] = {}
    fired = 0
    for _ in range(20):
        for spec in FaultPlan.parse([f"exception@1:15{suffix}"]).due(1, 15, "commit", passes):
            passes[str(spec)] = passes.get(str(spec), 0) + 1
            fired += 1
    assert fired == limit


def test_one_pass_fires_at_one_point_only() -> None:
    """A fault that lets the step go on does not fire again at the next mark of the same step."""
    plan = FaultPlan.parse(["nonfinite@0:4x3"])
    passes: dict[str, int] = {}
    fired_at = []
    for point in ("data", "forward", "backward", "optimizer", "commit"):
        for spec in plan.due(0, 4, point, passes):
            passes[str(spec)] = passes.get(str(spec), 0) + 1
            fired_at.append(point)
    assert fired_at == ["forward"]


def test_without_a_phase_it_waits_for_a_mark_or_commit() -> None:
    """Neither data nor a rare phase is the first mark; a mark of the user's own name is."""
    spec = FaultSpec.parse("exception@0:4")
    for point in ("data", *RARE_PHASES):
        assert not spec.matches(0, 4, point)
    for point in ("forward", "commit", "my own mark"):
        assert spec.matches(0, 4, point)


def test_rank_step_and_phase_must_fit() -> None:
    """A fault of a phase fires there, on its rank, in its step, and nowhere else."""
    spec = FaultSpec.parse("exception@1:4/backward")
    assert spec.matches(1, 4, "backward")
    assert not spec.matches(0, 4, "backward")
    assert not spec.matches(1, 5, "backward")
    assert not spec.matches(1, 4, "forward")


@pytest.mark.parametrize("phase", RARE_PHASES)
def test_rare_phases_fire_at_the_next_occasion(phase: str) -> None:
    """Not every step saves or forms a generation: the fault waits for the first that does."""
    spec = FaultSpec.parse(f"sigkill@0:200/{phase}")
    assert not spec.matches(0, 199, phase)
    assert spec.matches(0, 200, phase)
    assert spec.matches(0, 250, phase)
    assert not spec.matches(0, 200, "forward")


def test_a_collective_hang_needs_no_mark_of_that_name() -> None:
    """`hang/collective` makes its own collective, so any mark will do; other kinds wait for the place."""
    assert FaultSpec.parse("hang@0:4/collective").matches(0, 4, "commit")
    assert not FaultSpec.parse("sigkill@0:4/collective").matches(0, 4, "commit")
    assert FaultSpec.parse("sigkill@0:4/collective").matches(0, 4, "collective")


def test_due_keeps_the_order_of_the_plan() -> None:
    """Faults of one point fire as they were written: corrupting a checkpoint comes before losing the node."""
    plan = FaultPlan.parse(["corrupt_checkpoint@0:9", "node_kill@0:9"])
    assert [spec.kind for spec in plan.due(0, 9, "forward", {})] == [FaultKind.CORRUPT_CHECKPOINT, FaultKind.NODE_KILL]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plan.json", '["exception@1:40", "sigkill@0:90/save"]'),
        ("plan.json", '{"faults": ["exception@1:40", "sigkill@0:90/save"]}'),
        ("plan.yaml", "- exception@1:40\n- sigkill@0:90/save  # the leader\n"),
        ("plan.yaml", "faults:\n  - exception@1:40\n  - 'sigkill@0:90/save'\n"),
        ("plan.txt", "# first\nexception@1:40\n\nsigkill@0:90/save\n"),
    ],
)
def test_plan_files(tmp_path: Path, name: str, content: str) -> None:
    """JSON, YAML and plain lines hold the same plan."""
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    assert [str(spec) for spec in load_plan(path)] == ["exception@1:40", "sigkill@0:90/save"]


@pytest.mark.parametrize("name", ["plan.yaml", "plan.txt"])
def test_an_empty_plan_file_plans_nothing(tmp_path: Path, name: str) -> None:
    """Comments alone are no fault."""
    (tmp_path / name).write_text("# nothing yet\n", encoding="utf-8")
    assert load_plan(tmp_path / name) == ()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("plan.json", b'["exception@1:40"', "line 1 is not JSON"),
        ("plan.yaml", b"faults: [a\n", "is not YAML"),
        ("plan.yaml", b"- exeption@1:40\n", "did you mean 'exception'"),
        ("plan.yaml", b"- 4\n", "write a list of fault texts"),
        ("plan.yaml", b"fault: []\n", "unknown key 'fault'"),
        ("plan.txt", b"\xff\xfe\n", "not UTF-8"),
        ("plan.txt", b"exception@1:4 " * 100_000, "larger than"),
    ],
)
def test_broken_plan_files(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    """A broken plan is a configuration error that names the file and the trouble in one line."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as raised:
        load_plan(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_plan_file(tmp_path: Path) -> None:
    """A plan that is not there is named."""
    with pytest.raises(UserError, match="No such file"):
        load_plan(tmp_path / "none.yaml")


def test_the_plan_loads_no_torch() -> None:
    """The launcher and the command line read plans; they must stay light."""
    code = "import sys, nvrx_sre.faults.plan, nvrx_sre.trainer.config; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
