"""How a durable save ended that was not verified, as its event.

Model: a save that did not commit has failed. One that is on record as committed and then lost its reader, node or line
is unverified (docs/adr/0040). Whoever ends a save, the machine of the writer's saves, that of the ranks' or the fold of
a launcher that died, asks here, so that all say the same. Pure.
"""

from __future__ import annotations

from nvrx_sre.events.schema import SaveFailed, SaveFailure, SaveUnverified, Tier, Unverified

_LOSSES = {SaveFailure(reason.value): reason for reason in Unverified}


def given_up(step: int, reason: SaveFailure, text: str, *, is_committed: bool) -> SaveFailed | SaveUnverified:
    """How a durable save ended that went no further.

    What broke off the reading of a commit says nothing about it; storage that refused to give it back does.
    """
    if is_committed and reason in _LOSSES:
        return SaveUnverified(step=step, reason=_LOSSES[reason], message=text)
    return SaveFailed(step=step, tier=Tier.DURABLE, reason=reason, message=text)


def failure(reason: str) -> SaveFailure:
    """The reason that a writer or a rank gave, as one of ours."""
    try:
        return SaveFailure(reason)
    except ValueError:
        return SaveFailure.STORAGE
