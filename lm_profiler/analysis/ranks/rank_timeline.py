"""The data that a rank sends about its measured steps: its marks, and its arrival at each collective call.

For calls on a device's stream, the functions at the end compute when the stream arrives, and how long it waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm_profiler.record.parts import PARTS
from lm_profiler.record.steps import Codes, Counts

Instants = Counts
Seconds = NDArray[np.float64]


class Collective(NamedTuple):
    """One collective call. ``group`` and ``number`` (its sequence number) identify it on all ranks of the group.

    ``name`` is the one in torch's flight recorder: ``gloo:all_reduce``, ``nccl:broadcast``, …
    """

    group: str
    number: int
    name: str


@dataclass(frozen=True)
class RankTimeline:
    """The measured steps of one rank. Instants are read from its own monotonic clock, in nanoseconds."""

    rank: int  # the number of the rank in the whole group
    host: str  # the name of the rank's machine
    steps: Instants  # int64[n], numbers of the measured steps, in order
    # int64[n + 1], the index in ``codes`` and ``host_ns`` of each step's first mark; last, the number of marks
    first: Instants
    # uint8[m], the part that begins at each mark: an index of ``record.parts.PARTS``, or ``OUTSIDE``; the last mark of
    # a step ends it
    codes: Codes
    host_ns: Instants  # int64[m], the instant of each mark
    # int64[k], arrival at each collective, in the order of arrival
    arrivals_ns: Instants
    collectives: list[Collective]  # [k], the collective of each arrival
    clock: str  # name of the clock, the same for all ranks that share it
    # int64[k], how long it waited for the others in each call, or -1 if unknown. None: not measured, so that the
    # arrivals must show it. With NCCL, this is first the duration of the call on its stream: see ``with_waits``.
    waited_ns: Instants | None = None


OUTSIDE = len(PARTS)  # the code of the time outside of steps

BACKWARD = PARTS.index("backward")


@dataclass(frozen=True)
class Track:
    """The M marks of one rank in the S steps that all ranks have. The last mark of a step has the code ``OUTSIDE``."""

    marks_ns: Instants  # [M] the instant of each mark
    codes: NDArray[np.uint8]  # [M] the part that begins with it
    step_of_mark: NDArray[np.int64]  # [M] the index of its step
    # [S + 1] the index of each step's first mark; last, M
    step_begins: NDArray[np.int64]

    @staticmethod
    def from_timeline(timeline: RankTimeline, steps: Instants) -> Track:
        """Return the marks of ``steps``, all of which ``timeline`` must have."""
        all_mark_counts = np.diff(timeline.first)
        is_common_step = np.isin(timeline.steps, steps)
        is_common_mark = np.repeat(is_common_step, all_mark_counts)
        codes = timeline.codes.copy()
        codes[timeline.first[1:] - 1] = OUTSIDE  # a step's last mark ends it
        mark_counts = all_mark_counts[is_common_step]
        return Track(
            marks_ns=timeline.host_ns[is_common_mark],
            codes=codes[is_common_mark],
            step_of_mark=np.repeat(np.arange(len(steps)), mark_counts),
            step_begins=np.concatenate([[0], np.cumsum(mark_counts)]),
        )

    @property
    def begin_ns(self) -> Instants:
        """[S] when each step began."""
        return self.marks_ns[self.step_begins[:-1]]

    @property
    def end_ns(self) -> Instants:
        """[S] when each step ended."""
        return self.marks_ns[self.step_begins[1:] - 1]

    def last_mark(self, instants: Instants) -> NDArray[np.int64]:
        """Return the index of the last mark at or before each instant; the first mark for earlier instants."""
        return np.maximum(np.searchsorted(self.marks_ns, instants, "right") - 1, 0)

    def spent_ns(self, steps: Instants) -> Seconds:
        """Return [step, part] how long the rank spent in each part; the last part is the time outside of steps.

        That is the time since the previous step (if it is not missing), and interruptions of this step, such as a
        validation.
        """
        parts = OUTSIDE + 1
        # one number for a step and a part, so that bincount sums over both
        step_and_part = self.step_of_mark[:-1] * parts + self.codes[:-1]
        durations_ns = np.diff(self.marks_ns)
        spent_ns = np.bincount(step_and_part, durations_ns, len(steps) * parts)
        spent_ns = spent_ns.reshape(len(steps), parts)
        # The gap after a step has been counted for this step, by its last mark. It is moved to the next step.
        gaps_ns = self.begin_ns[1:] - self.end_ns[:-1]
        is_next_step = np.diff(steps) == 1
        spent_ns[:-1, OUTSIDE] -= gaps_ns
        spent_ns[1:, OUTSIDE] += np.where(is_next_step, gaps_ns, 0)
        return np.asarray(spent_ns)

    def in_part_until_ns(self, code: int, instants: Instants) -> NDArray[np.float64]:
        """Return how long the rank had been in a part by each instant, since its first mark."""
        is_in_part = self.codes[:-1] == code
        in_part_ns = np.diff(self.marks_ns) * is_in_part
        until_mark_ns = np.concatenate([[0.0], np.cumsum(in_part_ns)])
        # Instants are made relative to the first mark, because a float cannot hold nanoseconds since boot exactly.
        begin_ns = self.marks_ns[0]
        return np.asarray(
            np.interp(instants - begin_ns, self.marks_ns - begin_ns, until_mark_ns)
        )


def with_waits(timelines: Sequence[RankTimeline]) -> list[RankTimeline]:
    """Replace the durations of calls in ``waited_ns`` by waits: the duration minus the shortest one of all ranks.

    The rank that arrives last does not wait, and has the shortest duration. Waits are unknown (-1) unless all ranks of
    the call timed it.
    """
    # the shortest duration of each call, by group and number; -1 if a rank did not time it
    least_ns: dict[tuple[str, int], int] = {}
    for timeline in timelines:
        for key, duration_ns in _durations_ns(timeline):
            least_ns[key] = min(least_ns.get(key, duration_ns), duration_ns)

    new_timelines = []
    for timeline in timelines:
        if timeline.waited_ns is None:
            new_timelines.append(timeline)
            continue
        waits_ns = []
        for key, duration_ns in _durations_ns(timeline):
            is_timed_by_all = least_ns[key] >= 0
            wait_ns = duration_ns - least_ns[key] if is_timed_by_all else -1
            waits_ns.append(wait_ns)
        waited_ns = np.array(waits_ns, dtype=np.int64)
        new_timelines.append(replace(timeline, waited_ns=waited_ns))
    return new_timelines


def _durations_ns(timeline: RankTimeline) -> Iterator[tuple[tuple[str, int], int]]:
    """Yield the group and number of each call, and its duration on the stream; nothing if the rank timed no calls.

    ``waited_ns`` of the timeline must have durations still, not waits.
    """
    if timeline.waited_ns is None:
        return
    for call, duration_ns in zip(
        timeline.collectives, timeline.waited_ns.tolist(), strict=True
    ):
        yield (call.group, call.number), duration_ns


def stream_instants_ns(
    called_ns: Instants,
    took_ns: Instants,
    host_ns: Instants,
    stream_ns: Instants,
    overlaps: NDArray[np.bool_],
) -> Instants:
    """Return the instant at which the stream reaches each call.

    The host makes a call long before the stream reaches it. On the stream, a part of a step consists of the rank's own
    work and of the calls that it waits in. A call that the host made after a quarter of its time in the part is taken
    to follow a quarter of that own work.

    Example: the host spends 10 ms in a part and makes calls after 5 and 10 ms. On the stream the part takes 100 ms,
    each call 20 ms, which leaves 60 ms of own work. The stream reaches the calls after 30 ms (half of the own work)
    and after 80 ms (all of it, and the first call).

    Args:
        called_ns: when the host made each call, in order.
        took_ns: how long each call takes on its stream; 0 if that is not known.
        host_ns: the marks between parts, as the host made them.
        stream_ns: the same marks, as the stream reached them.
        overlaps: for each mark, whether the rank's own work continues beside the calls of that part (DDP's backward).
    """
    reached_ns = np.interp(called_ns, host_ns, stream_ns)
    mark_of_call = np.searchsorted(host_ns, called_ns, "right") - 1
    is_within_marks = (mark_of_call >= 0) & (mark_of_call < len(host_ns) - 1)
    for mark in np.unique(mark_of_call[is_within_marks]).tolist():
        calls = np.flatnonzero(mark_of_call == mark)
        host_duration_ns = max(host_ns[mark + 1] - host_ns[mark], 1)
        shares_of_host = (called_ns[calls] - host_ns[mark]) / host_duration_ns
        duration_ns = float(stream_ns[mark + 1] - stream_ns[mark])
        if overlaps[mark]:
            # the calls queue on a second stream while own work continues
            since_mark_ns = _instants_beside_work_ns(
                shares_of_host, took_ns[calls], duration_ns
            )
        else:
            # each call stops the own work
            since_mark_ns = _instants_between_work_ns(
                shares_of_host, took_ns[calls], duration_ns
            )
        reached_ns[calls] = stream_ns[mark] + np.clip(since_mark_ns, 0, duration_ns)
    return np.asarray(np.rint(reached_ns), dtype=np.int64)


def _instants_between_work_ns(
    shares_of_host: NDArray[np.float64], took_ns: Instants, duration_ns: float
) -> NDArray[np.float64]:
    """Return when the stream reached each call, from the part's begin, if the rank's own work stops during a call.

    ``shares_of_host`` is, for each call, the share of the host's time in the part after which it was made. ``took_ns``
    is how long each call took, and ``duration_ns`` how long the part took on the stream.
    """
    earlier_calls_ns = np.cumsum(took_ns) - took_ns
    own_work_ns = max(duration_ns - took_ns.sum(), 0)
    return np.asarray(shares_of_host * own_work_ns + earlier_calls_ns)


def _instants_beside_work_ns(
    shares_of_host: NDArray[np.float64], took_ns: Instants, duration_ns: float
) -> NDArray[np.float64]:
    """Return when the stream reached each call, from the part's start, if the rank's own work continues beside calls.

    ``shares_of_host`` is, for each call, the share of the host's time in the part after which it was made. ``took_ns``
    is how long each call took, and ``duration_ns`` how long the part took on the stream. The calls run one after
    another on a second stream. The rank's own work ends with the last call, and the part when that call is done.

    How long the own work took is not measured, but it has a limit: a call and all later ones must run between the
    instant of the call and the end of the part. The own work is the longest for which all calls have that time.
    """
    shares_of_own_work = np.ones_like(shares_of_host)
    if shares_of_host[-1] > 0:
        # not 0, by which the next lines divide
        shares_of_own_work = np.maximum(shares_of_host / shares_of_host[-1], 1e-6)
    # [call] when each call must begin at the latest
    this_and_later_ns = np.cumsum(took_ns[::-1])[::-1]
    latest_ns = duration_ns - this_and_later_ns
    # [call] the longest own work with which the call begins in time; all calls must
    longest_own_work_ns = latest_ns / shares_of_own_work
    own_work_ns = max(float(longest_own_work_ns.min()), 0.0)
    return np.asarray(shares_of_own_work * own_work_ns)
