"""The options of a run that is watched until it ends."""

from __future__ import annotations

from dataclasses import dataclass

from lm_profiler.usage_error import expect


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """The instruments stay until training ends, and say when and why it gets slower.

    Args:
        traces: Whether steps are traced: on demand, after a change of level, and where a slow step's cause repeats.
        traces_per_day: Most traces a day that nobody asked for.
        trace_mib: Most MiB of all those traces together.
        cooldown_s: Least seconds between two of them.
        signal: Trace two steps when SIGUSR1 comes; SLURM and Lightning may use it otherwise.
    """

    traces: bool = True
    traces_per_day: int = 8
    trace_mib: float = 20.0
    cooldown_s: float = 600.0
    signal: bool = False

    def checked(self) -> WatchOptions:
        """Return these options.

        Raises:
            UsageError: a budget is none. A parser that tries several types for an option would swallow it earlier.
        """
        off = "; watch.traces=false leaves traces out"
        expect(self.traces_per_day > 0, "watch.traces_per_day", f"1 or more{off}", self.traces_per_day)
        expect(self.trace_mib > 0, "watch.trace_mib", f"a positive number{off}", self.trace_mib)
        expect(self.cooldown_s > 0, "watch.cooldown_s", f"a positive number{off}", self.cooldown_s)
        return self
