"""``python -m dspark_store.precompute``: the command."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from dspark_store.precompute.config import parse_arguments
from dspark_store.precompute.run import run

UNEXPECTED = 1
USER_ERROR = 2
INTERRUPTED = 130
_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 2 a mistake and 1 a surprise, each told in one line, 130
    interrupted."""
    try:
        config = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        config.check()
        logging.basicConfig(level=config.log_level, format="%(levelname)s %(message)s", stream=sys.stderr)
        return run(config)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except Exception as error:  # noqa: BLE001 - whatever it is, what is committed stays, and users get one line
        _log.debug("traceback:", exc_info=True)
        reason = " ".join(str(error).split()) or "no reason given"
        print(f"error: {type(error).__name__}: {reason} (--log-level DEBUG shows where)", file=sys.stderr)
        return UNEXPECTED
    except KeyboardInterrupt:
        print("interrupted: what is committed stays; go on with --resume", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
