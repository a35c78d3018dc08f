"""Tell the other ranks, before there is a process group, whether rank 0 refuses the run.

The ranks meet in the store of the later process group, at the launcher's address. Rank 0 opens that store early, and
torch joins an open one (``multi_tenant``); torchrun has opened its own.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed
from lightning.pytorch import Trainer

from lm_profiler.lightning_names import LAUNCHER, TIMEOUT

_PATIENCE_S = 20.0  # seconds that rank 0, before it ends, waits for the others to read why

# seconds that torch waits for a process group (``default_pg_timeout``) where the strategy sets no other time
_GROUPS_S = 1800.0

_REFUSED, _GRANTED = b"refused", b"granted"


class Unheard(RuntimeError):
    """Rank 0 has ended, or has not come, and did not say whether the run fits."""


@dataclass(eq=False)
class Rendezvous:
    """The meeting point of those ranks of a run that each run the command line."""

    host: str  # the host of rank 0
    port: int  # the port of the store on it
    rank: int  # the rank of this process
    others: int  # the number of ranks that wait for rank 0's answer
    limit_s: float = _GROUPS_S  # how long they wait, in seconds
    # whether rank 0 closes its store before training, where a spawned process opens one there
    is_first_only: bool = False
    _store: Any = None

    @staticmethod
    def of(trainer: Trainer) -> Rendezvous | None:
        """Return the rendezvous of ``trainer``'s ranks; None where this process is alone or starts all others."""
        strategy = trainer.strategy
        # Forked and spawned ranks run no command line: then one rank on each further machine waits for the answer.
        cluster, launcher = getattr(strategy, "cluster_environment", None), strategy.launcher
        forks = isinstance(launcher, LAUNCHER.find_or(()))
        outside = cluster is not None and cluster.creates_processes_externally and not forks
        others = (trainer.world_size if outside else trainer.num_nodes) - 1
        if cluster is None or trainer.world_size == 1 or (forks and not others) or not torch.distributed.is_available():
            return None
        limit: timedelta = TIMEOUT.of_or(strategy) or timedelta(seconds=_GROUPS_S)
        seconds = limit.total_seconds()
        return Rendezvous(cluster.main_address, cluster.main_port, trainer.global_rank, others, seconds, forks)

    def open(self) -> None:
        """Open the store, on rank 0. Where the address is taken, training fails as well, with torch's message."""
        with suppress(RuntimeError, OSError):
            self._join(_PATIENCE_S, opens=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")

    def tell(self, is_refused: bool) -> None:
        """Tell the others, on rank 0, and wait until they have read a refusal."""
        if self._store is None:
            return
        if is_refused:
            _ignore_termination()
        with suppress(RuntimeError):
            self._store.set("word", _REFUSED if is_refused else _GRANTED)
            # The store ends with this process, so rank 0 waits until every other rank has read the answer.
            if self.others and (is_refused or self.is_first_only):
                self._store.wait(["heard"], timedelta(seconds=_PATIENCE_S))
        if self.is_first_only:
            self._store = None

    def is_refused(self) -> bool:
        """Wait for rank 0's answer. The watchdog handles signals meanwhile: torch's waits cannot be interrupted.

        Raises:
            Unheard: rank 0 did not answer.
        """
        limit = timedelta(seconds=self.limit_s)
        try:
            self._join(self.limit_s, opens=False)
            self._store.wait(["word"], limit)
            is_refused = bool(self._store.get("word") == _REFUSED)
            if is_refused:
                _ignore_termination()
            if self._store.add("hearing", 1) == self.others:
                self._store.set("heard", b"")
        except RuntimeError as error:
            where = f"{self.host}:{self.port}"
            raise Unheard(f"rank 0 at {where} did not say in {limit} whether the run fits, or is gone") from error
        return is_refused

    def _join(self, limit_s: float, opens: bool) -> None:
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]  # the stubs lack it, and the next
            *(self.host, self.port),
            is_master=opens,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
        # torchrun's store outlives a restart of the ranks: each attempt needs keys of its own.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = torch.distributed.PrefixStore(f"lm_profiler/preflight/{attempt}", store)  # type: ignore[attr-defined]


def _ignore_termination() -> None:
    """Ignore SIGTERM, which the launcher sends to all ranks once one has ended: this rank ends by itself."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
