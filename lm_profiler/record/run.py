"""``run.json``: the typed record of one run, validated when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

from lm_profiler.record.files import write_whole
from lm_profiler.record.quantities import TIMES
from lm_profiler.record.reading import read_json

SCHEMA_VERSION = 1
"""Of every file. What a later version may add without another number is said in ``docs/reference/files.md``."""

Status = Literal["ok", "oom", "failed", "interrupted", "refused", "unfinished"]
"""``unfinished`` is what a run is called while it runs, and what it stays where its process was killed."""

SHARED = 0.05
"""Of the wanted CPU time, or of the GPU's: less of it that something else had is not seen in the times."""

Verb = Literal["fit", "validate", "test", "predict"]


class RecordError(ValueError):
    """A file that cannot be read as what it ought to be; the message names it."""


def _known_or_newer(word: Any, known: ValidatorFunctionWrapHandler) -> Any:
    try:
        return known(word)
    except ValidationError:
        if isinstance(word, str):
            return word
        raise


Newer = WrapValidator(_known_or_newer)
"""Of a field that holds one of some words: a word that a later version may have added is kept as it is."""


class Part(BaseModel):
    """A part of a record, which is never changed. A field that a later version may have added is passed over."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)


P = TypeVar("P", bound=Part)


class OutOfMemory(Part):
    """What an out-of-memory error says, in bytes; None where it does not.

    torch prints sizes with two decimals, so 20.00 MiB is exact to 5 KiB and 79.15 GiB to 5 MiB. ``fragmented`` is
    reserved by the allocator and not in use; ``allowed`` a limit that somebody set below ``total``.
    """

    requested: int | None
    free: int | None
    total: int | None
    allocated: int | None
    fragmented: int | None
    allowed: int | None


class Failure(Part):
    """Where and why a run died. ``phase`` is a phase, ``other``, or ``setup`` before the first step.

    In ``instruments`` it is the profiler that failed: training itself went on. ``remedies`` of a refused run are
    options to add, each alternative enough by itself.
    """

    phase: str
    step: int | None
    type: str
    message: str
    out_of_memory: OutOfMemory | None = None
    remedies: tuple[str, ...] = ()


class Environment(Part):
    """What the figures were measured on."""

    versions: dict[str, str]
    platform: str
    cpu: str
    cpu_count: int
    threads: int
    device_type: str
    device_name: str
    device_bytes: int | None
    driver: str | None
    world_size: int
    flags: dict[str, str | bool]
    git_commit: str | None


class ModelFacts(Part):
    """Of the module that was profiled. ``bytes`` counts parameters and buffers; ``compiled``: any part of it is."""

    class_path: str
    parameters: int
    parameters_without_embedding: int | None
    trainable_parameters: int
    bytes: int
    precision: str
    optimizers: list[str]
    accumulate_grad_batches: int
    compiled: bool | None = None


class TimeSummary(Part):
    """Seconds a step over the measured steps. None where there are too few steps to say.

    ``ci_low`` and ``ci_high`` are the 95 % order-statistic interval of the median; ``outliers`` counts values outside
    Tukey's fences, which stay in.
    """

    n: int
    mean: float | None = None
    std: float | None = None
    cv: float | None = None
    median: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    p5: float | None = None
    p95: float | None = None
    min: float | None = None
    max: float | None = None
    outliers: int = 0


class MemoryReading(Part):
    """Most bytes at one time. None where this device or system cannot say."""

    allocated_peak: int | None = None
    reserved_peak: int | None = None
    resident_peak: int | None = None


class MemoryCauses(Part):
    """What a part's allocated peak consisted of, in bytes.

    ``activations_and_rest`` is what the others leave of the peak; None where the peak is unknown.
    """

    parameters: int
    gradients: int
    optimizer_states: int
    buffers: int
    activations_and_rest: int | None


class AllocatorReading(Part):
    """The device's caching allocator over the measured steps, in bytes and counts; None where it does not say.

    ``fragmentation`` is at most what was reserved and not in use when most was in use; ``driver_used`` counts other
    processes too; the last two count since the process began.
    """

    allocated_peak: int | None
    active_peak: int | None
    reserved_peak: int | None
    inactive_split_peak: int | None
    fragmentation: int | None
    driver_used: int | None
    alloc_retries: int | None
    ooms: int | None


class MemoryLevels(Part):
    """Bytes held (not peaks) at moments of a step of the ``memory`` stage; None where the step has no such phase.

    ``start``: forward begins: the module, optimizer states, and gradients that are not cleared before it.
    ``forward``: it has ended, the most of the step's batches. ``forward - start`` is what forward left for backward.
    ``backward``: backward has ended, likewise. ``backward - forward`` is what backward added: gradients, less what was
    saved for it.
    Where ``source`` is ``allocator`` these are all the device's tensors, batch and loss included. ``counted`` (the CPU)
    are parameters, gradients, optimizer states, buffers and the tensors that autograd saved.
    """

    start: int | None
    forward: int | None
    backward: int | None
    source: Annotated[Literal["allocator", "counted"], Newer]


class MemoryFacts(Part):
    """Peaks over the measured steps; per part of a step, their causes, and what is held, from the ``memory`` stage."""

    measured: MemoryReading
    parts: dict[str, MemoryReading]
    causes: dict[str, MemoryCauses] = {}
    held: MemoryLevels | None = None
    allocator: AllocatorReading | None = None


class Throughput(Part):
    """Over all ranks, at the median step. None where the module does not say how many tokens a batch has.

    ``samples`` are rows of a batch, as the first one had them.
    """

    tokens_per_step: int | None
    tokens_per_s: float | None
    samples_per_step: int | None = None
    samples_per_s: float | None = None


class Steadiness(Part):
    """Whether the measured steps were level, and from which one on: earlier ones are in no summary.

    ``word`` is ``noisy`` (the median is not known to 5 %), ``steady``, ``slowing`` (later steps slower), ``unsettled``
    (never level), or None where there are too few steps to tell; ``also`` is ``slowing`` or ``unsettled`` of a noisy
    run that certainly is. ``known_to`` is how far the median may be off, a share of it: half its 95 % interval, widened
    for autocorrelation; None where there is no interval. ``cut`` steps were left out; ``bias_of_mean`` is how far off,
    relative to the mean, they would have made it. ``drift`` is the second half's median over the first's, less 1;
    ``lag1`` the autocorrelation. ``recompilations`` of torch.compile happened while measuring.
    """

    word: Annotated[Literal["noisy", "steady", "slowing", "unsettled"] | None, Newer]
    cut: int
    drift: float | None
    lag1: float | None
    bias_of_mean: float | None
    evidence: str
    recompilations: int = 0
    also: Annotated[Literal["slowing", "unsettled"] | None, Newer] = None
    known_to: float | None = None

    @property
    def words(self) -> list[str]:
        """``word`` and ``also``, as far as there are any."""
        return [word for word in (self.word, self.also) if word is not None]


class OddStep(Part):
    """A measured step far from the others: in total ``step_s``, ``ratio`` times the median.

    ``part`` is what differed most from its own median, by ``excess_s``.
    """

    step: int
    step_s: float
    ratio: float
    part: str
    excess_s: float


class Flops(Part):
    """Floating-point operations of matrix products, convolutions and attention; in a record, a step's on all ranks.

    Causal attention counts in full, masked half included. ``recomputation`` is what activation checkpointing repeats.
    """

    forward: int
    backward: int
    recomputation: int
    causal_attention: Annotated[Literal["full"], Newer] = "full"

    @property
    def model(self) -> int:
        """The work that the model asks for: what MFU counts."""
        return self.forward + self.backward

    @property
    def all(self) -> int:
        """All the work that the devices are given: what HFU counts."""
        return self.model + self.recomputation


class Utilisation(Part):
    """How close the median step is to the hardware. Rates in FLOP/s; None is unknown.

    ``mfu`` is of model FLOPs (forward and backward), ``hfu`` of all that were executed, both over ``peak_flops_per_s``
    of all devices; ``ceiling_flops_per_s`` is one device's own rate in a large matrix product, measured after the run,
    and ``of_ceiling`` the share of it that the executed FLOPs reach.
    """

    flops: Flops
    dtype: str | None
    peak_flops_per_s: float | None
    peak_source: str | None
    mfu: float | None
    hfu: float | None
    ceiling_flops_per_s: float | None
    of_ceiling: float | None


class GpuSharing(Part):
    """Other processes on the run's GPU at the end of the measured steps, as its driver tells. None is unknown.

    ``utilisation`` is the share of time in which kernels of theirs ran, ``memory_bytes`` what they held.
    """

    processes: int
    utilisation: float | None
    memory_bytes: int | None


class Telemetry(Part):
    """The GPU over the measured steps, as its driver tells; None where it does not.

    Whole-GPU figures, whoever else uses it. ``max_sm_clock_hz`` is the card's highest boost clock: more than the base
    clock that a datasheet guarantees, and more than many cards hold in long matrix products, which run into the power
    limit; ``clock_share`` is the median SM clock over it. ``median_power_w`` is NVML's power: on Ampere (but GA100) and
    later, a mean over the last second. ``energy_j`` is of the GPU's own counter (Volta and later; it moves every 20 to
    100 ms) or the integral of the power samples; either spans ``duration_s``, and a step's share goes by its time.
    ``throttle_reasons`` held in at least 5 % of the samples. ``gpus`` are the cards' UUIDs: of several, energy and
    power are sums, clocks are the slowest card's, the temperature is the highest, ``throttle_reasons`` are any card's.
    """

    samples: int
    duration_s: float
    median_sm_clock_hz: float | None
    max_sm_clock_hz: float | None
    clock_share: float | None
    median_temperature_c: float | None
    median_power_w: float | None
    power_limit_w: float | None
    energy_j: float | None
    energy_source: Annotated[Literal["counter", "power samples"] | None, Newer]
    energy_per_step_j: float | None = None
    energy_per_token_j: float | None = None
    throttle_reasons: list[str] | None
    gpus: list[str] = []


class Contention(Part):
    """What else used the machine over the measured steps, on the CPUs that the run may use. None is unknown.

    Seconds of CPU time: ``had_s`` of the run's own processes, ``others_s`` of all others, ``stolen_s`` of the
    hypervisor, ``throttled_s`` of the control group's limit. ``waited_s`` is how long the run's threads were ready and
    had no CPU, also because of each other. ``pressure`` is the share of ``wall_s`` in which something waited for a CPU;
    ``involuntary_switches`` how often this process lost one. ``not_had`` is the answer: the share of the wanted CPU
    time that something else had.
    """

    wall_s: float
    cpus: int
    had_s: float
    waited_s: float | None
    others_s: float | None
    stolen_s: float
    throttled_s: float | None
    pressure: float | None
    involuntary_switches: int | None
    not_had: float | None
    gpu: GpuSharing | None = None

    @property
    def shared(self) -> bool:
        """Whether something else took enough to be seen in the times."""
        on_gpu = self.gpu is not None and (self.gpu.utilisation or 0.0) >= SHARED
        return on_gpu or (self.not_had or 0.0) >= SHARED


class Sync(Part):
    """A line that made the host wait for the device, ``count`` times in the ``memory`` stage."""

    file: str
    line: int
    function: str
    count: int
    call: str


class NumericsKind(Part):
    """All modules of one class: the dtypes of their own parameters, of their outputs, and of their gradients.

    ``gradient_error`` is None where there are no gradients, or they are not finite.
    """

    kind: str
    modules: int
    parameters: list[str]
    outputs: list[str]
    gradients: list[str]
    gradient_error: float | None


class NumericsFacts(Part):
    """The first batch's step in the run's precision beside one in float32, with the trained weights, in eval mode.

    Errors are the Euclidean norm of the difference over that of the float32 result; None where it is not finite, or
    there is nothing to compare. ``output_error`` is of the first floating-point tensor, of one dimension or more, that
    the last module to do so returned in the forward pass: the logits of a language model.
    """

    loss: float | None
    reference_loss: float | None
    output_error: float | None
    gradient_error: float | None
    kinds: list[NumericsKind]


Bound = Literal["input", "host", "compute", "memory bandwidth", "communication"]


class Verdict(Part):
    """What binds the run (None: nothing that the evidence shows), its share of the step, and what to try next.

    Not ``certain``: the steps are too few or differ too much, or something else used the machine; then ``advice`` says
    how to be sure.
    """

    bound_by: Annotated[Bound | None, Newer]
    share: float | None
    evidence: str
    advice: str
    certain: bool = True


class RunRecord(Part):
    """All that is known of one run. Times in seconds, memory in bytes."""

    schema_version: Literal[1] = 1
    name: str
    status: Annotated[Status, Newer]
    failure: Failure | None
    verb: Annotated[Verb, Newer]
    started: str
    duration_s: float
    command: str
    overrides: dict[str, str] = {}
    """Options that the command line gave beside the config file, by their name without the dashes."""
    config: dict[str, Any] | None
    environment: Environment | None = None
    model: ModelFacts | None = None
    steps: dict[str, int] = {}
    """How many steps each stage finished."""
    steps_planned: dict[str, int] = {}
    first_step_s: float | None = None
    """The run's first step, compilation and lazy initialisation included."""
    between_steps_s: float | None = None
    """Time of the measure stage that lies in no step: validation, epoch ends and the instruments' own work."""
    time: dict[str, TimeSummary] = {}
    """Per part, step and forward_backward, each or none: on the device's stream, or the host where there is none."""
    host_time: dict[str, TimeSummary] = {}
    shares: dict[str, float] = {}
    """Of each part (and forward_backward) in the typical step: the mean of those that are not odd. They add up to 1."""
    odd_steps: list[OddStep] = []
    rank_step_s: list[float] = []
    """Median step of each rank; the summaries are of each step's mean over the ranks."""
    memory: MemoryFacts | None = None
    throughput: Throughput | None = None
    steadiness: Steadiness | None = None
    utilisation: Utilisation | None = None
    telemetry: Telemetry | None = None
    contention: Contention | None = None
    syncs: list[Sync] | None = None
    """None where nothing waits for a device, or none was looked for."""
    numerics: NumericsFacts | None = None
    """None where the precision was not audited."""
    verdict: Verdict | None = None
    notes: list[str] = []
    """What a reader must know before using the figures; shown under the table."""

    @property
    def words(self) -> list[str]:
        """What may be said of the measured steps, the gravest first; none where they are too few."""
        shared = ["shared"] if self.contention is not None and self.contention.shared else []
        return ([] if self.steadiness is None else self.steadiness.words) + shared

    @field_validator("time", "host_time")
    @classmethod
    def _whole(cls, times: dict[str, TimeSummary]) -> dict[str, TimeSummary]:
        if times and (missing := [part for part in TIMES if part not in times]):
            raise ValueError(f"has no {', '.join(missing)}")
        return times


def write_run(folder: Path, record: RunRecord) -> None:
    """Write ``record`` as ``folder/run.json``."""
    write_whole(folder / "run.json", record.model_dump_json(indent=1) + "\n")


def read_run(folder: Path) -> RunRecord:
    """Read ``folder/run.json``.

    Raises:
        RecordError: there is none, or it is damaged, foreign or of a later version of the format.
    """
    return read_as(folder / "run.json", RunRecord, "a run record")


def read_as(path: Path, form: type[P], what: str) -> P:
    """Read the JSON in ``path``, which ought to be ``what``.

    Raises:
        RecordError: there is none, or it is damaged, foreign or of a later version of the format.
    """
    try:
        content = read_json(path)
        version = content.get("schema_version") if isinstance(content, dict) else None
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise RecordError(
                f"{path}: expected {what} of version {SCHEMA_VERSION} of the format, given version {version}, "
                "which a later lm_profiler wrote; pip install --upgrade lm_profiler"
            )
        return form.model_validate(content)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RecordError(f"{path}: is not text") from None
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(f"{path}: not {what} of version {SCHEMA_VERSION}: {_why_not(error)}") from None


def _why_not(error: ValueError) -> str:
    """Where a file is no record, and why: of pydantic's complaints the first."""
    if not isinstance(error, ValidationError):  # no JSON, or figures that are none
        return f"file: {error}"
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'file'}: {first['msg'].removeprefix('Value error, ')}"
