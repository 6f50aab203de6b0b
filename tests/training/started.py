"""What a rank does that a test of training starts: it joins the others, counts them, and ends with an error."""

import os
from pathlib import Path

import torch

from dspark_store.training.ranks import ToldError, joined_ranks

LAST_WORDS = "the data\nis gone"


def end_with_the_same_error(rank: int, port: int, place: Path) -> None:
    """Be one of two ranks; leave what is left to print, and the sum over ranks, in a file."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    total = -1
    try:
        with joined_ranks(torch.device("cpu")) as ranks:
            total = int(ranks.total(torch.tensor([rank + 1])))
            raise ValueError(LAST_WORDS)
    except ToldError as error:
        (place / f"told-{rank}").write_text(f"{total} {type(error.__cause__).__name__}")
    except ValueError:
        (place / f"tells-{rank}").write_text(f"{total} ValueError")
