"""Run ``python -m lm_profiler``: import the module of the verb, and nothing that this verb does not need."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from lm_profiler.cli.endings import handled, terminate
from lm_profiler.cli.surroundings import (
    all_printed,
    check_variables,
    mute,
    quiet_libraries,
    replace_unprintable,
)
from lm_profiler.cli.trainer_help import FIRST_OPTIONS, asks_for_first_options
from lm_profiler.measure.boundary import print_message
from lm_profiler.record.calls import FAILED, INTERRUPTED, OK, WRONG_CALL, MissingExtra
from lm_profiler.usage_error import NEEDS_POSIX, UsageError

# verb → its line of help. A verb is implemented in the module of its name in ``lm_profiler.cli.verbs``, or in that of
# ``_SHARED``. The module's ``VERBS`` has the verb's options, its examples, and the function that runs it.
VERBS = {
    "fit": "profile training steps",
    "validate": "profile only the forward pass, without gradients",
    "test": "profile test steps",
    "predict": "profile prediction steps",
    "run": "profile your own program unchanged: lm_profiler run -- python train.py",
    "sweep": "run every combination of some options: sizes, precisions, lengths, repeats",
    "improve": "try changes that may make the step faster, and prove which do",
    "plan": "predict the memory that a run needs, on any GPU, before it starts",
    "report": "print or write tables, plots and pages of runs",
    "why": "show where the time went in a trace of torch.profiler",
    "watch": "show where the time of a running training goes, and its events",
    "trace": "trace the next steps of a watched training",
    "compare": "compare runs: is B faster than A?",
    "ab": "run two versions of a repository alternately until it is clear which is faster",
    "numerics": "show how low precision changes a sum",
    "collectives": "measure how fast processes of this machine exchange data",
    "selftest": "measure how far equal runs differ on this machine",
}

# verbs → the module that implements them
_SHARED = {"numerics": "selftest", "trace": "watch"}

# the verbs of the module ``trainer``; their options are those of the Trainer, the module and the data
TRAINER_VERBS = ("fit", "validate", "test", "predict")

_HELP = """\
usage: lm_profiler <verb> [options]

{verbs}

  --version   print the version
  --help      print this help; `<verb> --help` lists the options of a verb

for example: lm_profiler fit --config demo"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0, 1 for a failed run, 2 for a wrong call, 130 for an interrupt."""
    if argv is None:
        argv = sys.argv[1:]
    arguments = list(argv)
    replace_unprintable()
    if sys.platform == "win32":
        print(NEEDS_POSIX, file=sys.stderr)
        return WRONG_CALL
    try:
        code = _exit_code(arguments)
    except (UsageError, MissingExtra) as error:
        print_message(str(error))
        code = WRONG_CALL
    except BrokenPipeError:
        # The reader of stdout, such as `head`, has closed the pipe.
        code = OK
    except OSError as error:  # for example a full disk, or a folder that was removed
        mute()
        message = error.strerror or str(error)
        if error.filename:
            message += f": {error.filename}"
        print_message(message)
        code = FAILED
    if not all_printed() and code == OK:
        return FAILED
    return code


def _exit_code(arguments: list[str]) -> int:
    """Run the verb that ``arguments`` begin with, or print the help or the version; return the exit code."""
    word = arguments[0] if arguments else ""
    if word in ("-h", "--help"):
        lines = [f"  {verb:<11} {summary}" for verb, summary in VERBS.items()]
        print(_HELP.format(verbs="\n".join(lines)))
        return OK
    if word == "--version":
        from lm_profiler import __version__

        print(f"lm_profiler {__version__}")
        return OK
    if word in VERBS:
        return _run_verb(word, arguments)
    shown_word = repr(word[:100]) if arguments else "none"
    raise UsageError(
        f"expected a verb ({', '.join(VERBS)}), given {shown_word}; see --help"
    )


def _run_verb(verb: str, arguments: list[str]) -> int:
    """Run ``verb`` and return the exit code; Ctrl-C and SIGTERM end it with one line."""
    is_run = verb in TRAINER_VERBS
    try:
        with handled({signal.SIGTERM: terminate}):
            if is_run:
                return _run_trainer(arguments)
            return _run_command(verb, arguments[1:])
    except KeyboardInterrupt:
        message = "interrupted before the run began" if is_run else "interrupted"
        print_message(message)
        return INTERRUPTED


def _run_command(verb: str, arguments: list[str]) -> int:
    """Run a verb that needs no Trainer, or print its help; return the exit code."""
    from lm_profiler.cli.options import OptionsReader

    module_name = _SHARED.get(verb, verb)
    module = _import_verb(module_name)
    options_class, examples, run = module.VERBS[verb]
    reader = OptionsReader(verb, options_class)
    if _asks_for_help(arguments):
        print(reader.help(examples))
        return OK
    return int(run(reader.read(arguments)))


def _asks_for_help(arguments: list[str]) -> bool:
    """Return whether ``--help`` is before ``--``; after it, it would be an option of the user's program."""
    for word in arguments:
        if word == "--":
            return False
        if word in ("-h", "--help"):
            return True
    return False


def _run_trainer(arguments: list[str]) -> int:
    """Run a verb that trains or evaluates, or print its most used options; return the exit code."""
    if asks_for_first_options(arguments):
        print(FIRST_OPTIONS.format(verb=arguments[0]), end="")
        return OK
    # Wrong config files and wrong variables are reported before torch is imported, because that takes seconds.
    from lm_profiler.cli.call import Call

    quiet_libraries()
    call = Call(arguments)
    check_variables()
    if sys.argv[1:] == arguments:
        # Lightning starts the other ranks with sys.argv; they cannot read this process's pipes again.
        sys.argv[1:] = call.arguments
    return int(_import_verb("trainer").run(call))


def _import_verb(module_name: str) -> ModuleType:
    """Import a module of verbs. Signals are delayed until then: an interrupted import fails in many ways."""
    former_mask = signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM)
    )
    try:
        return import_module(f"lm_profiler.cli.verbs.{module_name}")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)
