"""The training function against a context of one rank that can roll back: digests, initialisation, non-finite loss."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from nvrx_sre.session import Context
from nvrx_sre.session.context import NonFiniteLoss
from nvrx_sre.trainer import loop
from nvrx_sre.trainer.config import MODELS, ModelShape, TrainerConfig
from nvrx_sre.trainer.corpus import load_corpus
from nvrx_sre.trainer.data import sample_ids
from nvrx_sre.trainer.digests import Progress
from nvrx_sre.trainer.loop import train
from nvrx_sre.trainer.model import ByteModel, build_model, initialize, local_tensor

DIGESTS = ("loss_digest", "samples_digest", "state_digest")


class Stopped(Exception):
    """Ends a generation of the fake context."""


class FakeContext:
    """A world of one. Keeps the state of every commit in `saved`; raises `Stopped` in front of commit `stop_at`."""

    rank = 0
    world_size = 1
    device = torch.device("cpu")

    def __init__(self, saved: dict[int, Any] | None = None, *, start: int = 0, stop_at: int = 0) -> None:
        self.saved = {} if saved is None else saved
        self.step = 0
        self.start = start
        self.stop_at = stop_at
        self.poison_at = 0
        self.results: dict[str, Any] = {}
        self.calls: list[str] = []

    @property
    def poisoned(self) -> bool:
        return self.poison_at == self.step + 1

    def init_process_group(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def track(self, **objects: Any) -> None:
        self.objects = objects

    def restore(self) -> int:
        self.step = self.start
        for name, state in self.saved.get(self.start, {}).items():
            self.objects[name].load_state_dict(copy.deepcopy(state))
        return self.step

    def commit(self, loss: float, tokens: int) -> None:
        if self.stop_at == self.step + 1:
            raise Stopped
        self.step += 1
        self.saved[self.step] = {name: copy.deepcopy(item.state_dict()) for name, item in self.objects.items()}
        self.calls.append(f"commit {tokens}")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.calls.append(name)
        yield

    def mark(self, point: str) -> None:
        self.calls.append(point)

    def tick(self) -> None:
        self.calls.append("tick")

    def finish(self, **result: Any) -> None:
        self.results = result


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    """Each generation leaves a group behind, as a real one does for the teardown; end it, and the global settings."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    destroy()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def destroy() -> None:
    """End the generation's group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerConfig:
    """A model of a few thousand parameters on a small text."""
    monkeypatch.setitem(
        MODELS, "mini", ModelShape(dim=16, num_layers=2, num_heads=2, hidden_dim=32, learning_rate=0.01)
    )
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 60)
    return TrainerConfig(steps=9, data=text, model="mini", batch_size=4, seq_len=8, grad_accum=2, warmup_steps=2)


def generation(context: FakeContext, config: TrainerConfig) -> dict[str, Any]:
    """Run one generation and end its group; the results."""
    try:
        train(cast(Context, context), config, load_corpus(config.data))
    finally:
        destroy()
    return context.results


def test_a_rolled_back_run_equals_the_uninterrupted_one(config: TrainerConfig) -> None:
    """Stopped inside step 7, restored at 3: all three digests and the loss are those of a run without a fault."""
    expected = generation(FakeContext(), config)
    first = FakeContext(stop_at=7)
    with pytest.raises(Stopped):
        generation(first, config)
    again = generation(FakeContext(first.saved, start=3), config)
    assert {name: again[name] for name in DIGESTS} == {name: expected[name] for name in DIGESTS}
    assert again["final_loss"] == expected["final_loss"]


def test_without_the_rollback_of_its_progress_the_digest_differs(
    config: TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle has teeth: a step counted twice, or a loss of other bits, changes the digests."""
    expected = generation(FakeContext(), config)
    first = FakeContext(stop_at=7)
    with pytest.raises(Stopped):
        generation(first, config)
    first.saved[3]["progress"] = first.saved[6]["progress"]
    again = generation(FakeContext(first.saved, start=3), config)
    assert again["state_digest"] == expected["state_digest"]
    assert again["loss_digest"] != expected["loss_digest"]
    assert again["samples_digest"] != expected["samples_digest"]


def test_a_run_extended_equals_a_long_one(config: TrainerConfig) -> None:
    """The learning rate does not hang on the number of steps."""
    expected = generation(FakeContext(), config)
    short = FakeContext()
    generation(short, TrainerConfig(**{**vars(config), "steps": 5}))
    extended = generation(FakeContext(short.saved, start=5), config)
    assert {name: extended[name] for name in DIGESTS} == {name: expected[name] for name in DIGESTS}


def test_a_finished_run_can_be_asked_again(config: TrainerConfig) -> None:
    """Restored at its last step, with nothing left to train, the results are the same."""
    context = FakeContext()
    expected = generation(context, config)
    assert generation(FakeContext(context.saved, start=config.steps), config) == expected


def test_samples_digest_is_the_data_order(config: TrainerConfig) -> None:
    """Computed from the order alone it is what the run reports."""
    results = generation(FakeContext(), config)
    progress = Progress()
    corpus = load_corpus(config.data)
    num_samples = loop.DataOrder(config, corpus, rank=0, world_size=1).num_samples
    positions = torch.arange(config.steps * config.samples_per_step).numpy()
    progress.add_samples(positions, sample_ids(positions, num_samples, config.seed))
    assert f"{progress.samples_sum:016x}" == results["samples_digest"]


def test_points_of_a_step_come_in_order(config: TrainerConfig) -> None:
    """What the context sees of a step with two micro-batches and an evaluation."""
    context = FakeContext()
    generation(context, TrainerConfig(**{**vars(config), "steps": 1, "evaluate_every": 1}))
    micro_batch = ["data", "forward", "backward", "tick"]
    assert context.calls == [*micro_batch, *micro_batch, "optimizer", "collective", "evaluate", "commit 64"]
    assert context.results["evaluation_loss"] > 0


def test_evaluation_changes_nothing_of_the_training(config: TrainerConfig) -> None:
    """Evaluated or not, the same losses and the same state."""
    expected = generation(FakeContext(), config)
    for every in (2, config.steps):
        evaluated = generation(FakeContext(), TrainerConfig(**{**vars(config), "evaluate_every": every}))
        assert {name: evaluated[name] for name in DIGESTS} == {name: expected[name] for name in DIGESTS}


def test_a_poisoned_loss_raises_before_anything_changes(config: TrainerConfig) -> None:
    """The step is not committed, and the parameters are still those of the step before."""
    context = FakeContext()
    context.poison_at = 4
    with pytest.raises(NonFiniteLoss, match="step 4 is nan on rank 0"):
        generation(context, config)
    assert context.step == 3
    saved = context.saved[3]["model"]
    for name, tensor in context.objects["model"].state_dict().items():
        assert torch.equal(local_tensor(tensor), local_tensor(saved[name])), name


def test_gradient_accumulation_is_the_mean_over_micro_batches(config: TrainerConfig) -> None:
    """One micro-batch of 8 and two of 4 are the same step up to rounding."""
    two = generation(FakeContext(), config)
    one = generation(FakeContext(), TrainerConfig(**{**vars(config), "grad_accum": 1, "batch_size": 8}))
    assert one["final_loss"] == pytest.approx(two["final_loss"], abs=1e-4)
    assert one["samples_digest"] == two["samples_digest"]


def test_the_mini_model_learns(config: TrainerConfig) -> None:
    """A repeating sentence is soon far below the entropy of its bytes."""
    results = generation(FakeContext(), TrainerConfig(**{**vars(config), "steps": 60}))
    assert results["final_loss"] < results["unigram_entropy"] - 0.3


def test_weights_depend_on_seed_and_name_alone(config: TrainerConfig) -> None:
    """Initialised twice they are equal, whatever torch's own generator did meanwhile; another seed differs."""
    FakeContext().init_process_group()
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed + 17 * len(weights))
        model = build_model(config.shape, torch.device("cpu"))
        initialize(model, config.shape, seed)
        weights.append({name: local_tensor(item).clone() for name, item in model.named_parameters()})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["head.weight"], weights[2]["head.weight"])
    assert not torch.equal(weights[0]["head.weight"], weights[0]["embedding.weight"])
    assert torch.equal(weights[0]["norm.weight"], torch.ones(config.shape.dim))
    assert weights[0]["embedding.weight"].std().item() == pytest.approx(0.02, rel=0.1)


def test_parameters_and_optimizer_are_the_whole_state(config: TrainerConfig) -> None:
    """No buffer could be left out of a capture or left unfilled by the meta device."""
    assert list(ByteModel(config.shape).buffers()) == []


@pytest.mark.parametrize(("name", "low", "high"), [("tiny", 5e5, 1e6), ("small", 5e6, 2e7), ("base", 1.5e8, 3e8)])
def test_sizes_of_the_models(name: str, low: float, high: float) -> None:
    """Counted on the meta device."""
    with torch.device("meta"):
        model = ByteModel(MODELS[name])
    assert low < sum(parameter.numel() for parameter in model.parameters()) < high


def test_the_model_is_causal(config: TrainerConfig) -> None:
    """A later byte changes no earlier prediction, and an earlier one does change later ones."""
    torch.manual_seed(0)
    model = ByteModel(config.shape)
    tokens = torch.randint(0, 256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] += 1
    with torch.no_grad():
        before, after = model(tokens), model(changed % 256)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_progress_survives_its_state() -> None:
    """Saved and loaded it goes on as if nothing had been."""
    one, two = Progress(), Progress()
    one.add_loss(1, 2.5)
    one.samples_sum = 2**64 - 1
    one.evaluation_loss = 3.0
    two.load_state_dict(one.state_dict())
    one.add_loss(2, 2.25)
    two.add_loss(2, 2.25)
    assert one.state_dict() == two.state_dict()
    assert two.last_loss == 2.25


def test_loss_digest_sees_one_bit() -> None:
    """Neighbouring floats and exchanged steps give other digests."""
    digests = set()
    for step, loss in ((1, 2.5), (2, 2.5), (1, 2.5000000000000004), (1, -2.5)):
        progress = Progress()
        progress.add_loss(step, loss)
        digests.add(progress.loss_digest)
    assert len(digests) == 4
