"""Parts of a run's files that are made up: a table of kernels, what is known of the model."""

from typing import Any

from lm_profiler.record.kernels import KernelRow, KernelTable, KindTime, PhaseKernels, Rest
from lm_profiler.record.run_record import ModelFacts


def made_kernel(name: str, count: int, total_s: float, **facts: Any) -> KernelRow:
    """Return a kernel of the forward pass's matmuls, of no known operator and module unless ``facts`` name them."""
    known = {"phase": "forward", "kind": "matmul", **dict.fromkeys(("operator", "module", "module_type"))}
    return KernelRow(name=name, count=count, total_s=total_s, **{**known, **facts})


def made_phase(busy_s: float, idle_s: float, overlap_s: float = 0.0, **kinds: tuple[int, float]) -> PhaseKernels:
    """``kinds``: by kind, how often, and for how long."""
    times = {kind: KindTime(count=count, total_s=total_s) for kind, (count, total_s) in kinds.items()}
    return PhaseKernels(busy_s=busy_s, idle_s=idle_s, overlap_s=overlap_s, kinds=times)


def made_kernels(rows: list[KernelRow], phases: dict[str, PhaseKernels], window_s: float, **facts: Any) -> KernelTable:
    """Return the table of two steps, all of whose kernels are in ``rows``, unless ``facts`` replace that."""
    known = {"source": "kernels", "steps": 2, "rest": Rest(rows=0, count=0, total_s=0.0)}
    shares = dict.fromkeys(("memory_bound_share", "communication_share"))
    return KernelTable(rows=rows, phases=phases, window_s=window_s, **{**known, **shares, **facts})


def made_model(**facts: Any) -> ModelFacts:
    """A module of one parameter, which is trained in float32."""
    known = {"class_path": "mine.Module", "parameters": 1, "parameters_without_embedding": None, "bytes": 4}
    known |= {"trainable_parameters": 1, "precision": "32-true", "optimizers": [], "accumulate_grad_batches": 1}
    return ModelFacts(**{**known, **facts})
