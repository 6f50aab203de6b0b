"""Reading without checksums gives the same values, whatever way they take into the batch."""

from itertools import product

import pytest
import torch

from dspark_store import open_cache
from tests.stores import build_store, same_bits

SPANS = (None, slice(0, 8), slice(3, 17), slice(8, 20), slice(19, 20), slice(9, 9))


@pytest.fixture(scope="module", params=["none", "fast", "default"])
def store(request, tmp_path_factory):
    return build_store(tmp_path_factory.mktemp("unverified") / "store", codec=request.param).path


@pytest.mark.parametrize(("layout", "positions"), list(product(("flat", "stacked"), SPANS)))
def test_unverified_batches_equal_verified_ones(store, layout, positions):
    rows = [6, 0, 3, 3, 1]
    checked = open_cache(store).read(rows, layout=layout, positions=positions)
    dirty = {name: torch.full_like(values, 7) for name, values in checked.items()}
    unchecked = open_cache(store, verify=False).read(rows, layout=layout, positions=positions, out=dirty)
    for name, values in checked.items():
        assert same_bits(unchecked[name], values), name
