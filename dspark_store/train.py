"""``python -m dspark_store.train``: the command."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from dspark_store.cli.progress import Bar
from dspark_store.cli.train import parse_arguments
from dspark_store.precompute.ranks import one_line
from dspark_store.progress import progress_shown_by
from dspark_store.text import log_to_stderr, say, say_error
from dspark_store.training.checkpoint import DamagedCheckpointError
from dspark_store.training.loop import train
from dspark_store.training.ranks import ToldError, leads
from dspark_store.training.settings import TrainConfig

UNEXPECTED = 1
USER_ERROR = 2
INTERRUPTED = 130
_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 2 a mistake, 1 a damaged checkpoint or another surprise.

    Errors are told in one line, and once where several ranks have the same.
    """
    try:
        config = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        config.check()
    except (ValueError, OSError, ImportError) as error:
        if leads():  # all ranks were given the same
            _tell(error)
        return USER_ERROR
    quiet = config.log_level == "INFO" and not leads()
    level = "WARNING" if quiet else config.log_level
    log_to_stderr(level)
    return _run(config)


def _run(config: TrainConfig) -> int:
    try:
        with progress_shown_by(Bar):
            return train(config)
    except ToldError as error:  # another rank's, or its words
        return _code(error.__cause__)
    except Exception as error:  # noqa: BLE001 - whatever it is, checkpoints stay, and users get one line
        _log.debug("traceback:", exc_info=True)
        _tell(error)
        return _code(error)
    except KeyboardInterrupt:
        if leads():
            say("interrupted: go on from the last checkpoint with --resume", out=sys.stderr)
        return INTERRUPTED


def _tell(error: Exception) -> None:
    foreseen = isinstance(error, FloatingPointError)
    say_error(error if foreseen else one_line(error))


def _code(error: BaseException | None) -> int:
    mistake = isinstance(error, ValueError | OSError | ImportError) and not isinstance(error, DamagedCheckpointError)
    return USER_ERROR if mistake else UNEXPECTED


if __name__ == "__main__":
    sys.exit(main())
