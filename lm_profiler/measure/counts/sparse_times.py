"""Finds products with a sparse matrix on a CPU that would be faster if the matrix was in the layout CSR."""

from __future__ import annotations

import warnings

from torch import Tensor

from lm_profiler.measure.counts.call_tensors import (
    has_sparse,
    leaves,
    sparse_matrices,
)
from lm_profiler.measure.counts.operator_trials import (
    SPARSE_PRODUCTS,
    OperatorTrials,
    TimedCall,
)


def is_sparse_product(call: TimedCall) -> bool:
    """Return whether ``call`` multiplies by a sparse matrix, of any layout."""
    return call.name in SPARSE_PRODUCTS and has_sparse(leaves(call.args))


def csr_share(call: TimedCall, trials: OperatorTrials) -> float | None:
    """Return the time of a product whose sparse matrix is in CSR as a share of its time with that matrix in COO.

    None for other calls, for other devices, for a matrix with a gradient of its own, and if the time is unknown. The
    conversion does not count: a matrix that is the same in each step needs only one.
    """
    matrices = sparse_matrices(leaves(call.args))
    if not matrices or call.name not in SPARSE_PRODUCTS:
        return None
    for matrix in matrices:
        if matrix.requires_grad or matrix.device.type != "cpu":
            return None
    trial = trials.repeat(call, _in_csr)
    return None if trial is None else trial.changed_share(call)


def _in_csr(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy of it in CSR if it is a matrix in COO."""
    if not sparse_matrices([tensor]):
        return tensor
    with warnings.catch_warnings():
        # torch warns at the first tensor in CSR that this layout is new.
        warnings.simplefilter("ignore")
        return tensor.to_sparse_csr()
