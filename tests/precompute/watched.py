"""What the processes do that the tests of the watch start: ranks that wait, hang, fail or are told to end."""

import ctypes
import datetime as dt
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # in C, not in __all__

from dspark_store.precompute.peers import Patience
from dspark_store.precompute.rendezvous import Keys
from dspark_store.precompute.watch import StoppedError, Watch

SHORT = Patience(period=0.05, preemption=0.6, failure=0.6)
FOR_LONG = 30

type Act = Callable[[Path, Watch], None]


def shared_keys(port: int, *, keep: bool = False) -> Keys:
    """Connect to the store at a port; ``keep`` it there."""
    timeout = dt.timedelta(seconds=60)
    return Keys(TCPStore("127.0.0.1", port, is_master=keep, wait_for_workers=False, timeout=timeout))


def block_in_c() -> None:
    """Call C code that no signal handler of Python and no other thread can end."""
    libc = ctypes.CDLL(None)
    left = ctypes.c_uint(FOR_LONG)
    while left.value:  # sleep() ends at a signal
        left = ctypes.c_uint(libc.sleep(left))


def hang(place: Path, watch: Watch) -> None:
    """Sit in C code, with something to do at the end."""
    watch.before_leaving((place / "act").touch)
    (place / "ready").touch()
    block_in_c()


def fail() -> None:
    """Be an act with a fault."""
    raise ValueError("a fault")


def hang_with_bad_acts(place: Path, watch: Watch) -> None:
    """Sit in C code; of what is to be done at the end, one thing fails and one hangs."""
    watch.before_leaving(fail)
    watch.before_leaving((place / "act").touch)
    watch.before_leaving(block_in_c)
    (place / "ready").touch()
    block_in_c()


def cooperate(place: Path, watch: Watch) -> None:
    """Ask between two short sleeps."""
    (place / "ready").touch()
    while True:
        watch.pause(0.01)


def fail_and_hang(place: Path, watch: Watch) -> NoReturn:
    """Leave the block with an error; what comes after it hangs."""
    (place / "ready").touch()
    raise OSError("the disk\nis gone")


def interrupt_and_hang(place: Path, watch: Watch) -> NoReturn:
    """Leave the block for Ctrl-C; what comes after it hangs."""
    (place / "ready").touch()
    raise KeyboardInterrupt


def run_rank(act: Act, place: Path, port: int | None, rank: int = 1) -> None:
    """Be one of two ranks, or alone without a port; end as the command does."""
    error_file = os.open(place / "stderr", os.O_WRONLY | os.O_CREAT)
    os.dup2(error_file, 2)
    keys = None if port is None else shared_keys(port)
    try:
        with Watch(rank, 1 if keys is None else 2, keys, SHORT) as watch:
            act(place, watch)
    except StoppedError as error:
        (place / "stopped").write_text(str(error))
        os._exit(error.exit_code)
    except (OSError, KeyboardInterrupt):
        time.sleep(FOR_LONG)
