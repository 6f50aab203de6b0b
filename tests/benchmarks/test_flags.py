"""Help is quick, and shows the flags."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.flags import FLAGS, parser_of

PLACE = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = sorted(path.stem for path in PLACE.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_shows_the_flags_and_imports_nothing_heavy(name):
    command = [sys.executable, "-X", "importtime", "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert imported.isdisjoint({"torch", "zarr", "dask", "transformers"})
    flags = [flag[0] for flag in FLAGS.get(name, ()) if flag[0].startswith("--")]
    assert [flag for flag in flags if flag not in done.stdout] == []
    assert re.search(r"usage: .*benchmarks", done.stdout)


def test_every_program_reads_the_flags_that_its_help_shows():
    for name in FLAGS:
        assert re.search(rf'(parsed|parser_of)\("{name}"', (PLACE / f"{name}.py").read_text(encoding="utf-8"))
    given = parser_of("writers").parse_args(["--only", "idle", "--repeats", "2"])
    assert (given.only, given.repeats, given.width) == ("idle", 2, 4096)
