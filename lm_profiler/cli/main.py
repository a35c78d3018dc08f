"""Run ``python -m lm_profiler``: import the module of the verb, and nothing that this verb does not need."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from lm_profiler.cli.endings import handled, terminate
from lm_profiler.cli.surroundings import all_printed, check_variables, mute, quiet_libraries, replace_unprintable
from lm_profiler.cli.trainer_help import FIRST_OPTIONS, asks_for_first_options
from lm_profiler.measure.boundary import say
from lm_profiler.record.calls import FAILED, INTERRUPTED, OK, WRONG_CALL, MissingExtra
from lm_profiler.usage_error import NEEDS_POSIX, UsageError

# The verbs with their help. Each is in the ``VERBS`` of its module in ``lm_profiler.cli.verbs``, which has its name, or
# that it shares with another verb: its options, its examples, and the function that runs it.
VERBS = {
    "fit": "profile training steps",
    "validate": "profile the forward pass alone, under no_grad",
    "test": "profile test steps",
    "predict": "profile prediction steps",
    "run": "profile your own program unchanged: lm_profiler run -- python train.py",
    "sweep": "run every combination of some options: sizes, precisions, lengths, repeats",
    "improve": "try changes that may be faster, and prove which are",
    "plan": "what memory a run would need, on any GPU, before it runs",
    "report": "tables, plots and pages of any runs",
    "watch": "show a running training: where its time goes, and what happened to it",
    "trace": "ask a watched training for a trace of its next steps",
    "compare": "is B faster than A?",
    "ab": "run two trees of a repository in turns, until it is clear which is faster",
    "numerics": "what low precision does to a sum",
    "collectives": "how fast this machine's processes exchange data",
    "selftest": "how far this machine's figures can be trusted",
}

_SHARED = {"numerics": "selftest", "trace": "watch"}

# the verbs of the module ``trainer``; their options are those of the Trainer, the module and the data
TRAINER_VERBS = ("fit", "validate", "test", "predict")

_HELP = """\
usage: lm_profiler <verb> [options]

{verbs}

  --version   print the version
  --help      print this; `<verb> --help` lists a verb's options

for example: lm_profiler fit --config demo"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0, 1 for a failed run, 2 for a wrong call, 130 for an interrupt."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    replace_unprintable()
    if sys.platform == "win32":
        print(NEEDS_POSIX, file=sys.stderr)
        return WRONG_CALL
    try:
        code = _run(arguments)
    except (UsageError, MissingExtra) as error:
        say(str(error))
        code = WRONG_CALL
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        code = OK
    except OSError as error:  # a full disk, a removed folder
        mute()
        say(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        code = FAILED
    return code if all_printed() else code or FAILED


def _run(arguments: list[str]) -> int:
    first = arguments[0] if arguments else None
    if first in ("-h", "--help"):
        verbs = "\n".join(f"  {verb:<11} {does}" for verb, does in VERBS.items())
        print(_HELP.format(verbs=verbs))
        return OK
    if first == "--version":
        from lm_profiler import __version__

        print(f"lm_profiler {__version__}")
        return OK
    if first in VERBS:
        try:
            with handled({signal.SIGTERM: terminate}):
                return _run_trainer(arguments) if first in TRAINER_VERBS else _run_command(first, arguments[1:])
        except KeyboardInterrupt:
            say("interrupted before the run began" if first in TRAINER_VERBS else "interrupted")
            return INTERRUPTED
    given = "none" if first is None else repr(first[:100])
    raise UsageError(f"expected a verb ({', '.join(VERBS)}), given {given}; see --help")


def _run_command(verb: str, arguments: list[str]) -> int:
    from lm_profiler.cli.options import OptionsReader

    kind, examples, run = _module_of(_SHARED.get(verb, verb)).VERBS[verb]
    reader = OptionsReader(verb, kind)
    if {"-h", "--help"} & {*arguments[: [*arguments, "--"].index("--")]}:
        print(reader.help(examples))
        return OK
    return int(run(reader.read(arguments)))


def _run_trainer(arguments: list[str]) -> int:
    if asks_for_first_options(arguments):
        print(FIRST_OPTIONS.format(verb=arguments[0]), end="")
        return OK
    # A wrong config file and a wrong variable are reported before torch is imported, which takes seconds.
    from lm_profiler.cli.call import Call

    quiet_libraries()
    call = Call(arguments)
    check_variables()
    if sys.argv[1:] == arguments:
        # Lightning starts the other ranks with sys.argv; they cannot read this process's pipes again.
        sys.argv[1:] = call.arguments
    return int(_module_of("trainer").run(call))


def _module_of(verb: str) -> ModuleType:
    """Import the module of ``verb``; Ctrl-C waits, because a package whose import is cut short fails in many ways."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        return import_module(f"lm_profiler.cli.verbs.{verb}")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
