"""What rank 0 finds before anything is built, told to ranks that were started beside it: no process group is there yet.

They meet in the store that the group will be set up in, at the address that the launcher gave. Rank 0 opens it a
little early, and torch joins what is open there already (``multi_tenant``); torchrun has one of its own.
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

_PATIENCE_S = 20.0
"""Rank 0, which is about to end, waits so long for the others to hear why."""

_GROUPS_S = 1800.0
"""Torch waits so long where it sets up a process group (``default_pg_timeout``), if the strategy does not say."""

_REFUSED, _GRANTED = b"refused", b"granted"


class Unheard(RuntimeError):
    """Rank 0 has ended, or did not come, before it said whether the run fits."""


@dataclass(eq=False)
class Rendezvous:
    """Where the ranks of one run that run the command line meet.

    Args:
        host: where rank 0 is.
        port: there.
        rank: of this process.
        others: ranks that are there before the first says something, and have to hear it.
        limit_s: how long they wait.
        is_first_only: the first leaves before training, which opens a store at this address in another process.
    """

    host: str
    port: int
    rank: int
    others: int
    limit_s: float = _GROUPS_S
    is_first_only: bool = False
    _store: Any = None

    @staticmethod
    def of(trainer: Trainer) -> Rendezvous | None:
        """The rendezvous of ``trainer``'s ranks; None where this process is alone, or starts all others by itself."""
        strategy = trainer.strategy
        # Forked or spawned ranks run no command line: then there is one rank to tell on each further machine.
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
        """Open the store, on rank 0. Where the address cannot be had, training will not begin either, and tells why."""
        with suppress(RuntimeError, OSError):
            self._join(_PATIENCE_S, opens=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")

    def tell(self, is_refused: bool) -> None:
        """Tell the others, on rank 0. They hear a refusal before this returns, if they come in time."""
        if self._store is None:
            return
        if is_refused:
            _outlive_the_others()
        with suppress(RuntimeError):
            self._store.set("word", _REFUSED if is_refused else _GRANTED)
            # The store is gone with this process, so nobody may be left who has not read it.
            if self.others and (is_refused or self.is_first_only):
                self._store.wait(["heard"], timedelta(seconds=_PATIENCE_S))
        if self.is_first_only:
            self._store = None

    def is_refused(self) -> bool:
        """What rank 0 has said, once it has. A signal meanwhile is the watchdog's: torch's waits hear none.

        Raises:
            Unheard: it said nothing.
        """
        limit = timedelta(seconds=self.limit_s)
        try:
            self._join(self.limit_s, opens=False)
            self._store.wait(["word"], limit)
            is_refused = bool(self._store.get("word") == _REFUSED)
            if is_refused:
                _outlive_the_others()
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
        # What torchrun has opened stays open when it starts all ranks anew.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = torch.distributed.PrefixStore(f"lm_profiler/preflight/{attempt}", store)  # type: ignore[attr-defined]


def _outlive_the_others() -> None:
    """Whoever started the ranks ends all once one has ended: each is about to, and says how."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
