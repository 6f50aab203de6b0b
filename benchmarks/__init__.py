"""What is measured: ``python -m benchmarks.NAME``. Help is given here: what is measured takes seconds to import."""

import sys

if sys.argv[0] == "-m" and not {"-h", "--help"}.isdisjoint(sys.argv):
    from benchmarks.flags import print_help

    print_help(next(name for name in sys.orig_argv if name.startswith("benchmarks.")).removeprefix("benchmarks."))
