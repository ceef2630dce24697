"""Whether a pass went as fake tensors foresaw it."""

from __future__ import annotations

from ps_core.engine._tracing.moments import MomentRecord, PassRecording


def matches_estimate(recording: PassRecording, beats: list[MomentRecord]) -> bool:
    """Whether a pass went as fake tensors said, and held no more besides."""
    ran, foreseen = map(_outline, recording.beats), map(_outline, beats)
    peak = max((beat.nonmodel_bytes for beat in recording.beats), default=0)
    return list(ran) == list(foreseen) and peak <= max((beat.nonmodel_bytes for beat in beats), default=0)


def begins_like_estimate(recording: PassRecording, beats: list[MomentRecord]) -> bool:
    """Whether a pass went so until it ended, before its time."""
    count = len(recording.beats)
    if not 0 < count < len(beats):
        return False
    ran, foreseen = recording.beats[-1], beats[count - 1]
    last = ran.backward is foreseen.backward and ran.touched.keys() <= {*foreseen.touched, *foreseen.held}
    return last and matches_estimate(PassRecording(recording.beats[:-1]), beats[: count - 1])


def _outline(beat: MomentRecord) -> tuple[bool, set[int], set[int], set[int]]:
    """What a moment does, however high the tide."""
    return beat.backward, {*beat.touched, *beat.held}, set(beat.held), set(beat.grads)
