"""What was compiled for one generation is not used by the next."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.fx import GraphModule

from nvrx_sre.restart import compiled


def test_code_is_traced_again_after_a_reset() -> None:
    """The recompile limit counts from zero in each generation, so a run never turns eager by restarting."""
    traced: list[GraphModule] = []

    def backend(graph: GraphModule, _: list[Any]) -> Callable[..., Any]:
        traced.append(graph)
        return graph.forward

    function = torch.compile(lambda batch: batch * 2 + 1, backend=backend)
    batch = torch.arange(3.0)
    for generation in range(1, 12):
        assert function(batch).tolist() == [1.0, 3.0, 5.0]
        assert function(batch).tolist() == [1.0, 3.0, 5.0]
        assert len(traced) == generation
        compiled.reset()


def test_nothing_is_reset_where_nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server has dynamo in every child; what its reset imports must not be paid in a first recovery."""
    compiled.reset()
    calls: list[str] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append("reset"))
    assert "torch._dynamo.convert_frame" in sys.modules
    compiled.reset()
    assert calls == []
    torch.compile(lambda batch: batch + 1, backend="eager")(torch.zeros(1))
    compiled.reset()
    assert calls == ["reset"]
