"""What a run is bound by, how one can tell, and the next thing to try. Pure: evidence in, words out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lm_profiler.analysis.hardware import advice
from lm_profiler.analysis.hardware.advice import Settings
from lm_profiler.record.run import Bound, Ranks, Verdict

# Shares of the step from which a cause binds it: most of what follows from a remedy must follow from this one.
_INPUT, _COMMUNICATION, _MEMORY, _OTHER = 1 / 3, 0.20, 0.50, 0.30
_STRAGGLER = 0.10  # of the step that mending it saves: what is in it for everybody, whatever else binds
_NOTED = 0.10  # the batch's share from which it is spoken of, though it binds nothing
_HOST = 0.50  # of the marks at which the device had finished
_IDLE = 0.30  # of the traced steps in which the device had nothing to do
_BUSY = 0.40  # of the ceiling: a device that reaches this is doing arithmetic, not waiting
_WORKING = 0.10  # the same on the CPU, which also calls the operators: below it neither calls nor memory are ruled out
_KEEPS_UP = 0.98  # host time over device time from which launching may set the pace

_FEWER = "Train with fewer callbacks and less logging, and compare."
_COMPUTE_PHASES = ("forward", "zero_grad", "backward", "clip", "optimizer")


@dataclass(frozen=True)
class Evidence:
    """What was measured in the steady part of a run; None is unknown.

    Attributes:
        step_s: mean step, seconds, above 0 (on the device's clock where it has one).
        phases_s: mean seconds per phase on the same clock, so that shares add up; missing phases count as 0.
        host_phases_s: the same on the host's clock.
        has_device_stream: whether work is queued to a device that has its own clock (CUDA; not the CPU).
        host_bound_fraction: share of marks at which the device had already finished when the next phase was
            enqueued.
        utilisation: 0 to 1, of the machine's own ceiling, or of the datasheet.
        idle_share: share of the step in which the device had nothing to do (from a trace, which slows the host).
        memory_bound_share: share of the step in kernels that wait for memory (from a trace).
        communication_share: share of the step in communication that nothing overlaps (from a trace, or what
            several ranks say).
        traced: whether there is a trace to look at.
        ranks: who waits for whom, of several ranks.
        settings: what is switched on already, and what this machine has.
    """

    step_s: float
    phases_s: Mapping[str, float]
    host_phases_s: Mapping[str, float] = field(default_factory=dict)
    has_device_stream: bool = False
    host_bound_fraction: float | None = None
    utilisation: float | None = None
    idle_share: float | None = None
    memory_bound_share: float | None = None
    communication_share: float | None = None
    traced: bool = False
    ranks: Ranks | None = None
    settings: Settings = field(default_factory=Settings)


def what_binds(evidence: Evidence) -> Verdict:
    """The first cause that the evidence carries, asked in the order in which one hides the next.

    A device that waits for data or for the host says nothing about its arithmetic, and one that communicates
    or waits for memory is no better off with more FLOP/s. Ranks that wait for one of them say nothing about themselves.
    """
    for ask in (_straggler, _input, _communication, _host, _memory, _compute):
        verdict = ask(evidence)
        if verdict is not None:
            return verdict
    return _nothing(evidence)


def _answer(bound_by: Bound | None, share: float | None, evidence: str, advice: str) -> Verdict:
    return Verdict(bound_by=bound_by, share=share, evidence=evidence, advice=advice)


def _share(e: Evidence, *phases: str) -> float:
    return sum(e.phases_s.get(phase, 0.0) for phase in phases) / e.step_s


def _straggler(e: Evidence) -> Verdict | None:
    if e.ranks is None or not e.ranks.finding.saves_s or not e.ranks.step_s:
        return None
    finding = e.ranks.finding
    share = (finding.saves_s or 0.0) / e.ranks.step_s
    if share < _STRAGGLER:
        return None
    return _answer("straggler", share, finding.evidence, advice.for_straggler(finding))


def _input(e: Evidence) -> Verdict | None:
    share, text, remedy = _batch(e)
    return _answer("input", share, text, remedy) if share >= _INPUT else None


def _batch(e: Evidence) -> tuple[float, str, str]:
    """The batch's share of the step, said in words, and what would make it less."""
    waiting, copying = _share(e, "data"), _share(e, "transfer")
    share = waiting + copying
    text = f"{share:.0%} of the step goes to the batch (waiting for it {waiting:.0%}, copying it {copying:.0%})"
    return share, text, advice.for_input(e.settings, copying > waiting)


def _communication(e: Evidence) -> Verdict | None:
    share = e.communication_share
    if share is None or share < _COMMUNICATION:
        return None
    text = f"{share:.0%} of the step is communication without overlapping computation"
    return _answer("communication", share, text, advice.for_communication(e.settings))


def _host(e: Evidence) -> Verdict | None:
    """A device that has finished at a mark may have been busy all the way to it: it must be known to be idle, too."""
    if not e.has_device_stream:
        return None  # host and device are one: there is nobody to wait for
    if e.idle_share is None and e.utilisation is None:
        return None  # nothing tells waiting from working
    if (e.idle_share is not None and e.idle_share < _IDLE) or (e.utilisation is not None and e.utilisation >= _BUSY):
        return None
    text = _launching(e)
    if text is None:
        return None
    if e.idle_share is not None:
        text += f", and it was idle for {e.idle_share:.0%} of the traced steps"
    return _answer("host", e.idle_share, text, advice.for_host(e.settings))


def _launching(e: Evidence) -> str | None:
    """How one sees that the host sets the pace; None where it does not."""
    if e.host_bound_fraction is not None:
        text = f"at {e.host_bound_fraction:.0%} of the phase boundaries the device had already run out of work"
        return text if e.host_bound_fraction >= _HOST else None
    device, host = (sum(s.get(phase, 0.0) for phase in _COMPUTE_PHASES) for s in (e.phases_s, e.host_phases_s))
    if not device or host < _KEEPS_UP * device:
        return None
    return f"launching kernels takes as long ({host * 1e3:.1f} ms a step) as running them ({device * 1e3:.1f} ms)"


def _memory(e: Evidence) -> Verdict | None:
    share = e.memory_bound_share
    if share is None or share < _MEMORY:
        return None
    text = f"{share:.0%} of the step is spent in kernels that wait for memory"
    return _answer("memory bandwidth", share, text, advice.for_memory(e.settings, _share(e, "optimizer")))


def _compute(e: Evidence) -> Verdict | None:
    share = _share(e, *_COMPUTE_PHASES)
    if share < 1.0 - _OTHER:
        return None
    if e.utilisation is None or e.utilisation < (_BUSY if e.has_device_stream else _WORKING):
        return None  # busy, but with what? Low or unknown utilisation does not say
    text = f"{_working(e)}, at {e.utilisation:.0%} of what the machine can reach"
    remedy = advice.for_compute(e.settings, _share(e, "optimizer"), e.utilisation, e.has_device_stream)
    return _answer("compute", share, text, remedy)


def _working(e: Evidence) -> str:
    share, optimizer = _share(e, *_COMPUTE_PHASES), _share(e, "optimizer")
    if not _share(e, "backward", "optimizer"):  # an evaluation
        return f"{share:.0%} of the step is forward"
    return f"{share:.0%} of the step is forward, backward and optimizer (optimizer {optimizer:.0%})"


def _nothing(e: Evidence) -> Verdict:
    outside = 1.0 - _share(e, "data", "transfer", *_COMPUTE_PHASES)
    if outside >= _OTHER:
        text = f"{outside:.0%} of the step lies outside every phase (callbacks, logging, the loop itself)"
        return _answer(None, None, text, _FEWER)
    share, text, remedy = _batch(e)
    if share >= _NOTED:
        return _answer(None, None, f"no single cause stands out; {text}; {_working(e)}", remedy)
    optimizer = _share(e, "optimizer")
    if e.utilisation is None:
        text = f"{_working(e)}; utilisation is unknown, so the cause is too"
        return _answer(None, None, text, advice.for_unknown(e.settings, optimizer, e.traced))
    reached = "less than 1%" if e.utilisation < 0.01 else f"only {e.utilisation:.0%}"
    text = f"{reached} of what the machine can reach, so the time goes to small operators or memory, not to arithmetic"
    return _answer(None, None, text, advice.for_memory(e.settings, optimizer))
