"""The first line of `spesd status`: state and reason, in words."""

from __future__ import annotations

from spesd.api.schema import Reason, RoundStatus, State, Status, UnitResult, Waiting

SEPARATOR = " · "


def headline(status: Status) -> str:
    """`training · round 12 committed 11 of 12 units (expert 5: waiting for QmXabcde…, 3 s left)`."""
    parts = [status.state.value]
    if status.reason is not Reason.NONE:
        words = status.reason.value.replace("-", " ")
        parts.append(f"{words} ({status.detail})" if status.detail else words)
    if status.state in (State.TRAINING, State.DRAINING):
        parts.append(round_line(status.round))
    return SEPARATOR.join(parts)


def ready_line(status: Status) -> str:
    """What a daemon prints once it takes part: run, peer, and the line that others paste."""
    parts = [f"ready · run {status.run_name} {status.run[:8]}", f"peer {short(status.peer)}", f"pid {status.pid}"]
    if status.join:
        parts.append(f"others join with: {status.join}")
    return SEPARATOR.join(parts)


def round_line(current: RoundStatus) -> str:
    """What the current round has brought, and what it waits for or lacks."""
    if current.number == 0:
        return "no round yet"
    line = f"round {current.number} committed {current.committed} of {current.total} units"
    lacking = _waiting(current.waiting_for) or _left_out(current)
    return f"{line} ({lacking})" if lacking else line


def short(peer: str) -> str:
    """The first eight characters of a peer id, which are enough to find it in `spesd peers`."""
    return peer if len(peer) <= 8 else f"{peer[:8]}…"


def unit_name(unit: str) -> str:
    """`expert-5` -> `expert 5`."""
    return unit.replace("-", " ")


def _waiting(waiting: tuple[Waiting, ...]) -> str:
    """The wait that ends last, and how many more there are."""
    if not waiting:
        return ""
    longest = max(waiting, key=lambda wait: wait.seconds_left)
    subject = f"{unit_name(longest.unit)}: " if longest.unit else ""
    text = f"{subject}waiting for {short(longest.peer) or 'peers'}, {max(0.0, longest.seconds_left):.0f} s left"
    return f"{text}; {len(waiting) - 1} more" if len(waiting) > 1 else text


def _left_out(current: RoundStatus) -> str:
    """The first unit that was not fully committed, and how many more there are."""
    texts = []
    for unit, outcome in current.results.items():
        if outcome.result is UnitResult.PARTIAL:
            texts.append(f"{unit_name(unit)}: without {', '.join(short(peer) for peer in outcome.missing)}")
        elif outcome.result is UnitResult.UNCHANGED:
            texts.append(f"{unit_name(unit)}: unchanged{', ' * bool(outcome.detail)}{outcome.detail}")
    if len(texts) > 1:
        return f"{texts[0]}; {len(texts) - 1} more"
    return texts[0] if texts else ""
