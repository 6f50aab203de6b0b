"""``python -m dspark_store.precompute``: the command."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from dspark_store.cli.precompute import parse_arguments
from dspark_store.cli.progress import Bar
from dspark_store.precompute.ranks import one_line
from dspark_store.precompute.run import run
from dspark_store.precompute.settings import PrecomputeConfig
from dspark_store.precompute.watch import TERMINATED, StoppedError
from dspark_store.progress import progress_shown_by
from dspark_store.text import log_to_stderr, say

UNEXPECTED = 1
USER_ERROR = 2
INTERRUPTED = 130
_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 2 a mistake and 1 a surprise, each told in one line, 130
    interrupted, 143 terminated."""
    try:
        config = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        config.check()
        log_to_stderr(_level(config))
        for note in config.notes:
            _log.info("%s", note)
        with progress_shown_by(Bar):
            if config.estimate:
                from dspark_store.cli.estimate import estimate_precompute

                return estimate_precompute(config)
            return run(config)
    except StoppedError as error:
        _tell(f"stopped: {error}")
        return error.exit_code
    except (ValueError, OSError, ImportError) as error:
        _tell(f"error: {one_line(error)}")
        return USER_ERROR
    except Exception as error:  # noqa: BLE001 - whatever it is, what is committed stays, and users get one line
        _log.debug("traceback:", exc_info=True)
        _tell(f"error: {one_line(error)} (--log-level DEBUG shows where)")
        return UNEXPECTED
    except KeyboardInterrupt:
        _tell("interrupted: what is committed stays; go on with --resume")
        return INTERRUPTED


def _level(config: PrecomputeConfig) -> str:
    """Return the level of this rank's log: what all ranks would say alike is said by rank 0."""
    quiet = os.environ.get("RANK", "0") != "0" and config.log_level == "INFO"
    return "WARNING" if quiet else config.log_level


def _tell(line: str) -> None:
    alone = os.environ.get("WORLD_SIZE", "1") == "1"  # as text: what is no number is told here too
    rank = "" if alone or "RANK" not in os.environ else f"rank {os.environ['RANK']}: "
    kind, _, text = line.partition(": ")
    say(f"{kind}: {rank}{text}", out=sys.stderr)


def _leave(code: int) -> NoReturn:
    """End the process, at once where its threads may wait long: for ranks that are gone, or for worker processes."""
    if code == TERMINATED or (code and "RANK" in os.environ):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _leave(main())
