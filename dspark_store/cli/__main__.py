"""``python -m dspark_store.cli``: the same as ``dspark-store``."""

import sys

from dspark_store.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
