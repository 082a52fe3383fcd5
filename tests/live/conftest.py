"""Fixtures of the live tests."""

from __future__ import annotations

import pytest

from nvrx_sre.core.clock import NS_PER_S
from tests import stories
from tests.live.told import CLOCK, STORY_S


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """The stories' time now: they begin `STORY_S` ago."""
    monkeypatch.setattr(stories, "START_S", CLOCK.wall_ns() / NS_PER_S - STORY_S)
    return STORY_S
