"""What every test relies on: no network, no deadline for hypothesis, one thread in each of many workers."""

import os

from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
