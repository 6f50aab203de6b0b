"""What every test relies on: no network, no deadline for hypothesis, one thread in each of many workers."""

import os
import shutil
import subprocess

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


def pytest_terminal_summary(terminalreporter):
    """Print what tests counted (see `record_property`), such as the bit flips that were noticed."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {name} = {value}")


@pytest.fixture
def mounted(tmp_path):
    """Mount a file system in memory with the given options, or others when it is mounted already."""
    place = tmp_path / "mount"
    place.mkdir()

    def mount(options):
        remount = "remount," if place.is_mount() else ""
        command = ["mount", "-t", "tmpfs", "-o", remount + options, "tmpfs", str(place)]
        finished = subprocess.run(command, capture_output=True, text=True)
        if finished.returncode:
            pytest.skip(f"mounting is not allowed here: {finished.stderr.strip()}")
        return place

    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting is not allowed here")
    yield mount
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)
