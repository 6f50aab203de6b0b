"""``python -m dspark_store.train``: the command."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from dspark_store.training.config import parse_arguments
from dspark_store.training.loop import train

UNEXPECTED = 1
USER_ERROR = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 2 a mistake, told in one line, 1 a gradient that is not finite."""
    try:
        config = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        config.check()
        quiet = os.environ.get("RANK", "0") != "0" and config.log_level == "INFO"
        level = "WARNING" if quiet else config.log_level
        logging.basicConfig(level=level, format="%(levelname)s %(message)s", stream=sys.stderr)
        return train(config)
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNEXPECTED
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("interrupted: go on from the last checkpoint with --resume", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
