"""What every test relies on: no network, no deadline for hypothesis, one thread in each of many workers."""

import os

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
