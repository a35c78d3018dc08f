"""What many tests need of a record and none looks at: the run, the machine, who shared it, and steps."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lm_profiler.record.quantities import PARTS
from lm_profiler.record.run_record import Contention, Environment, RunRecord, Telemetry, Utilisation
from lm_profiler.record.steps import StepRow


def made_environment(**changes: Any) -> Environment:
    """A machine of two cores; ``changes`` are fields that the test looks at."""
    fields: dict[str, Any] = {
        "versions": {}, "platform": "Linux", "cpu": "a CPU", "cpu_count": 2, "threads": 2, "device_type": "cpu",
        "device_name": "a CPU", "device_bytes": None, "driver": None, "world_size": 1, "flags": {}, "git_commit": None,
    }  # fmt: skip
    return Environment(**{**fields, **changes})


def made_run(**facts: Any) -> RunRecord:
    """A fit that ended well, of which nothing is known but ``facts``."""
    fields: dict[str, Any] = {
        "name": "run", "status": "ok", "failure": None, "verb": "fit", "started": "2026-01-01T00:00:00+00:00",
        "duration_s": 1.0, "command": "", "config": None,
    }  # fmt: skip
    return RunRecord(**{**fields, **facts})


def made_step(
    step: int, parts_s: Mapping[str, float], stage: str = "measure", host: float = 1.0, **changes: Any
) -> StepRow:
    """A step that consists of ``parts_s``; on the host it takes ``host`` times as long."""
    parts = tuple(parts_s.get(part, 0.0) for part in PARTS)
    seconds = (*parts, sum(parts))
    return replace(StepRow(step, stage, seconds, tuple(host * s for s in seconds)), **changes)


def made_telemetry(**facts: Any) -> Telemetry:
    """What was read of a GPU: ``facts``, and nothing else."""
    fields = {**dict.fromkeys(Telemetry.model_fields), "samples": 9, "duration_s": 1.0, "gpus": []}
    return Telemetry(**{**fields, **facts})


def made_utilisation(**facts: Any) -> Utilisation:
    """The use of a device of which nothing is known but ``facts``."""
    return Utilisation.model_validate({**dict.fromkeys(Utilisation.model_fields), "by_dtype": [], **facts})


def made_contention(not_had: float | None, **changes: Any) -> Contention:
    """Two cores, of whose time the run did not get the share ``not_had``; the rest is unknown."""
    fields = {**dict.fromkeys(Contention.model_fields), "wall_s": 1.0, "cpus": 2, "had_s": 1.0, "stolen_s": 0.0}
    return Contention(**{**fields, "not_had": not_had, **changes})
