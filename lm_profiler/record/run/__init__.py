"""The record of one run: its parts by subject, and ``run.json``, which is validated when it is read.

May use pydantic. Never ``quantities``, which say how these are shown, and never a file that is not ours.
"""

# ruff: noqa: F403  # every class of a record is one of this package; a list of them would be kept by hand
from lm_profiler.record.files import *
from lm_profiler.record.run.findings import *
from lm_profiler.record.run.machine import *
from lm_profiler.record.run.rank_ends import *
from lm_profiler.record.run.ranks import *
from lm_profiler.record.run.record import *
