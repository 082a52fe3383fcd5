"""Every kind of state of one process: captured overlapped, restored from both tiers, continued bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nvrx_sre.checkpoint import encoding, rng
from nvrx_sre.checkpoint.capture import FROZEN_BYTES_MIN, Capturer
from nvrx_sre.checkpoint.restore import DurableCandidate, HotCandidate
from nvrx_sre.checkpoint.save import Saver, Source
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.checkpoint.storage import WriteOptions
from nvrx_sre.checkpoint.supported import check
from nvrx_sre.checkpoint.write import SaveRequest
from nvrx_sre.core.errors import CheckpointCorrupt, UserError

STEP = 3
WIDTH = 16
Step = Callable[[], float]
Built = tuple[dict[str, Any], Step]


def _loss(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(4, WIDTH)).pow(2).mean()
    return loss


def two_of_each() -> Built:
    """Two models, an optimizer and a scheduler for each, taking turns."""
    models = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    optimizers: list[Any] = [
        torch.optim.AdamW(models[0].parameters()),
        torch.optim.SGD(models[1].parameters(), 0.1, 0.9),
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(item, 1, 0.5) for item in optimizers]

    def step() -> float:
        total = 0.0
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            loss = _loss(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            total += loss.item()
        return total

    names = ("generator", "critic")
    tracked = dict(zip(names, models, strict=True))
    tracked |= {f"{name}_optimizer": item for name, item in zip(names, optimizers, strict=True)}
    return tracked | {f"{name}_schedule": item for name, item in zip(names, schedulers, strict=True)}, step


def _simple(model: nn.Module, after: Callable[[], Any] = lambda: None, **more: Any) -> Built:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)

    def step() -> float:
        loss = _loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
        return loss.item()

    return {"model": model, "optimizer": optimizer, **more}, step


def ema() -> Built:
    """A moving average of the weights: parameters that no optimizer has, changed after the optimizer's step."""
    model = nn.Linear(WIDTH, WIDTH)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    built, step = _simple(model, lambda: average.update_parameters(model), average=average)
    return built, lambda: step() + sum(item.sum().item() for item in average.parameters())


def scaler() -> Built:
    """A GradScaler that grows its scale every second step."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scale = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def step() -> float:
        loss = _loss(model)
        scale.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        return loss.item() * float(scale.get_scale())

    return {"model": model, "optimizer": optimizer, "scaler": scale}, step


class Counting(nn.Linear):
    """A layer with state of its own beside tensors."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0
        self.history = torch.zeros(2 * encoding.BIG_BYTES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history = self.history.roll(1) + self.calls
        return super().forward(x) * (1 + self.history[0] * 1e-3)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "history": self.history}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.history = state["calls"], state["history"]


def extra_state() -> Built:
    """`get_extra_state` of a submodule, small and big parts."""
    return _simple(nn.Sequential(nn.Linear(WIDTH, WIDTH), Counting()))


class Tied(nn.Module):
    """Two names, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)))
        return result


def tied() -> Built:
    """Tied weights."""
    return _simple(Tied())


class Buffered(nn.Module):
    """Buffers that change in forward, one of them not persistent, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        result: torch.Tensor = self.drop(self.norm(x)) * self.seen
        return result


def buffers() -> Built:
    """Buffers."""
    return _simple(Buffered())


def frozen() -> Built:
    """A big frozen layer below a trained one."""
    model = nn.Sequential(nn.Linear(WIDTH, FROZEN_BYTES_MIN // WIDTH), nn.Linear(FROZEN_BYTES_MIN // WIDTH, WIDTH))
    model[0].requires_grad_(False)
    return _simple(model)


def in_backward() -> Built:
    """Each parameter has an optimizer of its own, which steps inside `backward`."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizers = {item: torch.optim.Adam([item], lr=0.05) for item in model.parameters()}

    def apply(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(apply)

    def step() -> float:
        loss = _loss(model)
        loss.backward()
        return loss.item()

    return {"model": model} | {f"optimizer{index}": item for index, item in enumerate(optimizers.values())}, step


class Replacing(nn.Module):
    """A buffer that `forward` puts another tensor in the place of, as running averages often are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        result: torch.Tensor = self.layer(x - self.mean)
        return result


def replaced_buffer() -> Built:
    """A buffer that is another tensor after each step."""
    return _simple(Replacing())


def replaced_parameter() -> Built:
    """A plain parameter that is exchanged for another in the second step, in the optimizer as well."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    done = {"steps": 0}

    def step() -> float:
        done["steps"] += 1
        if done["steps"] == 2:
            model.weight = nn.Parameter(model.weight.detach() * 0.5)
            optimizer.param_groups[0]["params"][0] = model.weight
        loss = _loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return {"model": model, "optimizer": optimizer, "done": done}, step


class Shared(torch.optim.SGD):
    """Counts its steps in state that is of no parameter, and keeps a moment under a key with a dot."""

    def step(self, closure: Any = None) -> Any:
        shared = self.state["global"]
        shared["steps"] = shared.get("steps", 0) + 1
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                moment = self.state[parameter].setdefault("moment.m", torch.zeros_like(parameter))
                moment.mul_(0.9).add_(parameter.grad)
                parameter.sub_(0.1 * moment / shared["steps"])


def shared_state() -> Built:
    """An optimizer with state of its own beside that of parameters."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = Shared(model.parameters(), 0.1)

    def step() -> float:
        loss = _loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return {"model": model, "optimizer": optimizer}, step


KINDS = (
    two_of_each,
    ema,
    scaler,
    extra_state,
    tied,
    buffers,
    frozen,
    in_backward,
    replaced_buffer,
    replaced_parameter,
    shared_state,
)


def capture(tracked: dict[str, Any], run: Callable[[], Any], capturer: Capturer | None = None) -> tuple[SlotFile, str]:
    """A capture whose copy ends before the next step does anything, and whose seal comes behind that step."""
    capturer = capturer or Capturer(tracked)
    capturer.refresh()
    slots = SlotFile.create(*capturer.required_bytes(), name="nvrx-test")
    filling = capturer.begin(slots, 0, generation=1, step=STEP, durable=True, now_mono_ns=1)
    filling.copy()
    run()
    filling.seal()
    return slots, capturer.layout_hash


def commit(run_dir: Path, *slots: SlotFile) -> Path:
    """Slot 0 of each rank as a durable checkpoint."""
    request = SaveRequest(run="demo", step=STEP, epoch=1, generation=1, captured_ns=1, world_size=len(slots))
    saved = Saver(run_dir, WriteOptions()).save(request, Source(slot_files=slots, slots=[0] * len(slots)))
    assert saved.directory is not None
    return saved.directory


@pytest.mark.parametrize("tier", ["hot", "durable"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_restored_state_continues_bit_for_bit(kind: Callable[[], Built], tier: str, tmp_path: Path) -> None:
    """Losses behind the restore, into objects with other values, are those of the undisturbed run."""
    torch.manual_seed(1)
    tracked, step = kind()
    capturer = Capturer(tracked)
    for _ in range(STEP):
        step()
        capturer.refresh()
    expected: list[float] = []
    slots, layout_hash = capture(tracked, lambda: expected.append(step()), capturer)
    expected += [step(), step()]
    torch.manual_seed(2)
    other, other_step = kind()
    other_step()
    candidate: HotCandidate | DurableCandidate = HotCandidate(slots, 0, STEP, layout_hash, other)
    if tier == "durable":
        candidate = DurableCandidate(commit(tmp_path, slots), "demo", 0, 1, other)
    candidate.check()
    candidate.load()
    assert [other_step() for _ in range(3)] == expected
    slots.close()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what a plain load in one process says
def test_plain_dcp_load_finds_tied_weights_under_both_names(tmp_path: Path) -> None:
    """The slot and the files hold them once; `model.state_dict()` asks for each name."""
    tracked, step = tied()
    step()
    slots, _ = capture(tracked, lambda: None)
    header = slots.header(0)
    assert header is not None and header.data_bytes < 4 * (5 * WIDTH * WIDTH)
    fresh = nn.Module()
    fresh.up, fresh.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
    state = {"model": fresh.state_dict()}
    dcp.load(state, checkpoint_id=commit(tmp_path, slots), no_dist=True)
    assert torch.equal(state["model"]["up.weight"], tracked["model"].up.weight)
    assert torch.equal(state["model"]["down.weight"], tracked["model"].up.weight)
    slots.close()


def draw() -> list[float]:
    """A number of each generator."""
    return [torch.rand(1).item(), float(np.random.rand()), random.random()]


@pytest.mark.parametrize("tier", ["hot", "durable"])
def test_c23_each_rank_gets_its_own_random_streams_back(tier: str, tmp_path: Path) -> None:
    """torch, numpy and Python; rank 1 drew more than rank 0. Without rank 1's part nothing is restored."""
    python, numpy = random.getstate(), np.random.get_state()
    files, hashes, expected = [], [], []
    for rank in range(2):
        rng.seed_from(f"rank {rank}")
        for _ in range(rank):
            draw()
        slots, layout_hash = capture({"model": nn.Linear(2, 2)}, lambda: None)
        expected.append(draw())
        files.append(slots)
        hashes.append(layout_hash)
    assert expected[0] != expected[1]
    directory = commit(tmp_path, *files)
    for rank in range(2):
        tracked = {"model": nn.Linear(2, 2)}
        candidate: HotCandidate | DurableCandidate = HotCandidate(files[rank], 0, STEP, hashes[rank], tracked)
        if tier == "durable":
            candidate = DurableCandidate(directory, "demo", rank, 2, tracked)
        candidate.check()
        candidate.load()
        assert draw() == expected[rank]
        files[rank].close()
    (directory / "rank-00001.json").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"rank-00001\.json"):
        DurableCandidate(directory, "demo", 1, 2, {"model": nn.Linear(2, 2)}).check()
    random.setstate(python)
    np.random.set_state(numpy)


class Slots:
    """A model captured again and again into one slot."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.capturer = Capturer({"model": model})
        self.capturer.refresh()
        self.slots = SlotFile.create(*self.capturer.required_bytes(), name="nvrx-test")

    def capture(self, step: int, slot: int = 0) -> None:
        self.capturer.capture(self.slots, slot, generation=1, step=step, durable=False, now_mono_ns=1)

    def first_bytes(self, slot: int = 0) -> bytes:
        """The beginning of the slot's data: that of the first parameter."""
        return bytes(self.slots.data(slot)[:16])


def test_a_frozen_tensor_is_copied_once_a_slot() -> None:
    """What lies in the slot already is left alone there, and copied into each other slot once."""
    held = Slots(nn.Linear(256, 256).requires_grad_(False))
    held.capture(1)
    original = held.first_bytes()
    held.slots.data(0)[:4] = b"mark"
    held.capture(2)
    assert held.first_bytes()[:4] == b"mark"
    held.capture(3, slot=1)
    assert held.first_bytes(1) == original
    held.slots.close()


def test_a_tensor_without_gradient_that_changes_is_copied_each_time() -> None:
    """An EMA copy asks for no gradient either: only equal bytes prove that it is frozen."""
    held = Slots(nn.Linear(256, 256).requires_grad_(False))
    for step in range(1, 5):
        held.capture(step)
        assert held.first_bytes() == held.model.weight.reshape(-1)[:4].numpy().tobytes()  # type: ignore[operator]  # a Linear
        held.model.weight.data.mul_(0.5)  # type: ignore[operator,union-attr]  # moves no version counter
    held.slots.close()


def test_a_tensor_that_was_trained_in_between_is_copied_again() -> None:
    """Frozen, trained, put back to the same bytes, frozen: the slot holds what was trained, not what was before."""
    held = Slots(nn.Linear(256, 256).requires_grad_(False))
    held.capture(1)
    original = held.first_bytes()
    held.model.requires_grad_(True)
    held.model.weight.data.mul_(0.5)  # type: ignore[operator,union-attr]  # a Linear
    held.capture(2)
    assert held.first_bytes() != original
    held.model.weight.data.mul_(2.0)  # type: ignore[operator,union-attr]  # exact in binary: the same bytes again
    held.model.requires_grad_(False)
    held.capture(3)
    assert held.first_bytes() == original
    held.slots.close()


class Subclass(torch.Tensor):
    """Somebody's own tensor type."""


def test_what_cannot_be_saved_is_named_at_once() -> None:
    """One message with every name, before training."""
    model = nn.Module()
    model.good = nn.Parameter(torch.ones(2))
    model.lazy = nn.LazyLinear(3, bias=False)
    model.far = nn.Linear(2, 2, device="meta")
    with torch.inference_mode():
        model.fixed = nn.Linear(2, 2, bias=False)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("more", torch.eye(3).to_sparse())
    with pytest.raises(UserError) as caught:
        check({"model": model})
    text = str(caught.value)
    for part in ("lazy.weight (not initialised", "far.weight (on", "fixed.weight (made in", "sparse (layout sparse"):
        assert f"model.{part}" in text
    assert "and 1 more" in text and "model.good" not in text


def test_what_no_slot_can_hold_is_named_and_left_to_the_ranks() -> None:
    """Somebody's own tensor type: not refused, and never captured into a slot."""
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Subclass))
    assert check({"model": model, "bare": torch.ones(2).as_subclass(Subclass)}) == [
        "model.weight (tensor subclass Subclass)",
        "bare (tensor subclass Subclass)",
    ]
    with pytest.raises(UserError, match=r"model\.weight \(tensor subclass"):
        Capturer({"model": model}).refresh()


def test_state_of_a_kind_that_cannot_be_saved_is_named_at_the_first_capture() -> None:
    """An optimizer may keep its moments in a type of its own, which exists from its first step on."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.weight]["momentum_buffer"] = torch.ones(2, 2).as_subclass(Subclass)
    with pytest.raises(UserError, match=r"optimizer\.state\.weight\.momentum_buffer \(tensor subclass"):
        Capturer({"model": model, "optimizer": optimizer}).refresh()


class OwnOptimizer(torch.optim.SGD):
    """Adds to its state dict."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"more": 1}


class Outer(torch.optim.SGD):
    """Steps another optimizer over the same groups, as sharpness-aware ones do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.base = torch.optim.AdamW(self.param_groups, 0.1)


@pytest.mark.parametrize("form", [lambda base: base, lambda base: [base], lambda base: {"only": base}])
def test_an_optimizer_inside_another_one_is_tracked_as_well(form: Any) -> None:
    """Its moments are no state of the outer one."""
    model = nn.Linear(2, 2)
    optimizer = Outer(model.parameters())
    base = optimizer.base
    optimizer.base = form(base)
    with pytest.raises(UserError, match="'o' steps another one, `base`, whose state would be lost"):
        check({"model": model, "o": optimizer})
    assert check({"model": model, "o": optimizer, "base": base}) == []


class OwnModule(nn.Linear):
    """Adds to its state dict, after the module's own fashion or torch's."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs) | {"weight_again": self.weight, "calls": torch.ones(())}


class OwnEntries(nn.Linear):
    """Adds a number to what torch collects from all modules."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = 2.0


def test_what_only_a_state_dict_of_its_own_knows_is_refused() -> None:
    """Captures do not call it, so that what it adds would be lost without a word."""
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match="'o' cannot be saved: OwnOptimizer has a state_dict"):
        check({"model": model, "o": OwnOptimizer(model.parameters(), 0.1)})
    with pytest.raises(UserError, match=r"'model\.1' cannot be saved: state_dict\(\) of OwnModule adds calls:"):
        check({"model": nn.Sequential(model, OwnModule(2, 2))})
    with pytest.raises(UserError, match=r"'model' cannot be saved: state_dict\(\) of OwnEntries adds scale:"):
        check({"model": OwnEntries(2, 2)})


def test_packed_weights_that_are_not_trained_may_add_their_format() -> None:
    """4 and 8 bit layers do: it comes with the weights when the script loads them, and never changes."""
    packed = OwnEntries(2, 2).requires_grad_(False)
    assert check({"model": nn.Sequential(packed, nn.Linear(2, 2))}) == []


class Handing(torch.optim.Optimizer):
    """Hands out what another one has, as `AcceleratedOptimizer` does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


def test_a_wrapper_that_hands_out_the_state_of_its_optimizer_is_saved() -> None:
    """Its state dict is its own and adds nothing."""
    model = nn.Linear(2, 2)
    optimizer = Handing(torch.optim.AdamW(model.parameters(), 0.1))
    assert check({"model": model, "o": optimizer}) == []
    model(torch.ones(1, 2)).sum().backward()
    optimizer.optimizer.step()
    capturer = Capturer({"model": model, "o": optimizer})
    capturer.refresh()
    assert "o.state.weight.exp_avg" in capturer.layout.by_fqn


def test_no_state_dict_around_or_inside_fsdp1_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would gather the whole model, and FSDP1 has its own way to save."""

    class Wrapper(nn.Sequential):
        """In the place of FSDP1, which wants a process group."""

    class Root(nn.Sequential):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("asked for its state dict")

    monkeypatch.setattr("nvrx_sre.checkpoint.supported.FullyShardedDataParallel", Wrapper)
    assert check({"model": Root(Wrapper(OwnModule(2, 2)))}) == ["model.0 (FSDP1 wrapper)"]


def test_a_recovery_asks_no_state_dict() -> None:
    """It may copy or gather all there is; as training began it was asked."""
    assert check({"model": OwnModule(2, 2)}, is_recovery=True) == []


def test_state_under_a_key_that_is_no_text_is_refused() -> None:
    """It would come back under another key."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.weight][0] = torch.ones(2, 2)
    with pytest.raises(UserError, match="'optimizer' keeps state of weight under 0"):
        Capturer({"model": model, "optimizer": optimizer}).refresh()


def test_a_model_that_is_cast_is_saved_as_it_is() -> None:
    """The tensors stay and their type changes: into memory of the old type their values would be rounded."""
    held = Slots(nn.Linear(256, 256).to(torch.bfloat16))
    held.capture(1)
    held.model.to(torch.float32)
    with torch.no_grad():
        held.model.get_parameter("weight").add_(1e-6)
    held.capturer.refresh()
    assert {item.dtype for item in held.capturer.layout.items} == {"float32"}
    held.slots.close()


def test_a_step_that_was_kept_has_the_buffers_of_its_boundary() -> None:
    """Also where the next step has put others in their place, for the second time, and one of them is large."""
    model = Replacing()
    model.register_buffer("large", torch.zeros(FROZEN_BYTES_MIN))
    capturer = Capturer({"model": model})
    for _ in range(2):
        model(torch.randn(4, WIDTH))
        model.large = model.large + 1
        expected = {"model.mean": model.mean.clone(), "model.large": model.large.clone()}
        capturer.keep()
        model(torch.randn(4, WIDTH))
        model.large = model.large + 1
        taken = {source.fqn: source.tensor for source in capturer.kept.put_in()}
        assert all(torch.equal(taken[name], tensor) for name, tensor in expected.items())


def test_groups_that_exchange_their_parameters_are_saved_so() -> None:
    """Under the old names each would get the options of the other."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(
        [{"params": layer.parameters(), "lr": 0.1 / (1 + at)} for at, layer in enumerate(model)]
    )
    capturer = Capturer({"model": model, "optimizer": optimizer})
    capturer.refresh()
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]
    slots, layout_hash = capture({}, lambda: None, capturer)
    with pytest.raises(CheckpointCorrupt, match="other parameter groups"):
        layers = [{"params": layer.parameters(), "lr": 0.1} for layer in model]
        fresh = torch.optim.SGD(layers)
        HotCandidate(slots, 0, STEP, layout_hash, {"model": model, "optimizer": fresh}).check()
    slots.close()


def test_extra_state_must_fit_as_well(tmp_path: Path) -> None:
    """A layer that keeps extra state now and kept none when it was saved is a mismatch, not a half restore."""
    tracked, step = _simple(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    step()
    slots, _ = capture(tracked, lambda: None)
    other = copy.copy(_simple(nn.Sequential(nn.Linear(WIDTH, WIDTH), Counting()))[0])
    with pytest.raises(UserError, match=r"extra state of model\.1"):
        DurableCandidate(commit(tmp_path, slots), "demo", 0, 1, other).check()
    slots.close()
