"""What was compiled for one generation is not used by the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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
