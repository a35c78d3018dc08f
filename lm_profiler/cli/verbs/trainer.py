"""The verbs ``fit``, ``validate``, ``test`` and ``predict``: one run of a Trainer, and its exit code."""

from __future__ import annotations

import sys
from pathlib import Path

from lm_profiler.cli.call import Call
from lm_profiler.cli.option_errors import wrong_call
from lm_profiler.cli.preflight import plan_ahead
from lm_profiler.cli.run_context import end_ranks, interrupt_in, leave_group, local_rank
from lm_profiler.cli.surroundings import quiet
from lm_profiler.cli.trainer_cli import ProfilerCLI
from lm_profiler.record.calls import FAILED, OK, WRONG_CALL
from lm_profiler.record.run_record import RunRecord
from lm_profiler.torch_names import NameMissing


def _code_of_record(record: RunRecord | None) -> int:
    """Return the exit code of a run that ended by itself; its record may have a failure of the instruments."""
    if record is None or record.failure is None:
        return OK
    is_name_missing = record.failure.type == NameMissing.__name__
    return WRONG_CALL if is_name_missing else FAILED


def run(call: Call) -> int:
    """Run a Trainer verb and return the exit code."""
    # A console script does not have the current folder in sys.path, but a user's module may be there.
    sys.path.append(str(Path.cwd()))
    with quiet():
        try:
            cli = ProfilerCLI(call)
        except SystemExit as done:  # raised by --help and --print_config
            return done.code if isinstance(done.code, int) else OK
        except Exception as error:
            # No code of the user has run yet, so the error is in the call.
            raise wrong_call(error) from error
        try:
            cli.begin()
            plan_ahead(cli)
            cli.run_verb()
            leave_group()
            return _code_of_record(cli.context.read_record())
        except (KeyboardInterrupt, SystemExit) as error:
            was_interrupted = interrupt_in(error) is not None
            end_ranks(getattr(cli, "trainer", None), terminate_first=was_interrupted)
            return cli.context.on_exit(error)
        except Exception as error:
            if not cli.context.is_refusal(error):
                return cli.context.on_failure(error)
            cli.context.discard()
            if local_rank() > 0:
                # The process that started this rank prints the message.
                return WRONG_CALL
            raise wrong_call(error) from error
        finally:
            end_ranks(getattr(cli, "trainer", None))
