"""``python -m dspark_store.precompute``: the command."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from dspark_store.precompute.config import parse_arguments
from dspark_store.precompute.run import run

USER_ERROR = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 done, 2 a mistake told in one line, 130 interrupted."""
    try:
        config = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        config.check()
        logging.basicConfig(level=config.log_level, format="%(levelname)s %(message)s", stream=sys.stderr)
        return run(config)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("interrupted: what is committed stays; go on with --resume", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
