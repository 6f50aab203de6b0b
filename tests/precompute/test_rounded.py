"""States that are rounded to few mantissa bits: by a precompute or by a copy, and told wherever a store is told of."""

import json

import numpy as np
import pytest
import zarr

from dspark_store import open_cache
from dspark_store.cli.main import main as cli
from dspark_store.format.damage import DamagedStoreError
from dspark_store.format.dtypes import rounded_states
from dspark_store.format.manifest import parse_record
from dspark_store.format.schema import LAST, LAYERS
from dspark_store.inspection.copy_plan import CopySettings
from dspark_store.inspection.rechunk import rechunk
from tests.precompute.jobs import arguments, precompute, refused
from tests.stores import same_bits

BF16, ROUNDED = ("--dtype", "bf16"), ("--dtype", "bf16", "--mantissa-bits", 3)


@pytest.fixture(scope="module")
def plain(llama, chats, tmp_path_factory):
    return precompute(llama, chats, tmp_path_factory.mktemp("plain") / "store", *BF16)


@pytest.fixture(scope="module")
def rounded(llama, chats, tmp_path_factory):
    return precompute(llama, chats, tmp_path_factory.mktemp("rounded") / "store", *ROUNDED)


def assert_rounded(plain, rounded):
    exact, lossy = open_cache(plain), open_cache(rounded)
    assert lossy.manifest["mantissa_bits"] == lossy.schema.mantissa_bits == 3
    for row in range(len(exact)):
        for column in (LAYERS, LAST):
            states = [cache.read([row], columns=(column,))[column] for cache in (exact, lossy)]
            assert same_bits(rounded_states(states[0], 3), states[1])
            assert not same_bits(*states)
    assert same_bits(exact.weights().embed, lossy.weights().embed)


def test_a_precompute_rounds_and_any_zarr_reader_sees_the_rounded_numbers(plain, rounded):
    assert_rounded(plain, rounded)
    bits = np.asarray(zarr.open_array(rounded, path=LAST, mode="r")[0, :2])
    assert not (bits & 0xF).any()


def test_a_store_that_is_not_rounded_has_no_word_of_it(plain):
    text = (plain / "zarr.json").read_text()
    assert "mantissa" not in text


def test_a_copy_is_rounded_as_a_precompute_rounds_and_says_so(plain, rounded, tmp_path, capsys):
    copy = tmp_path / "copy"
    assert cli(["rechunk", str(plain), str(copy), "--mantissa-bits", "3", "--shard-size", "2"]) == 0
    assert "(bf16 rounded to 3 of 7 mantissa bits (lossy), default" in capsys.readouterr().out
    assert_rounded(plain, copy)
    assert open_cache(copy).record.store_id != open_cache(rounded).record.store_id
    assert not rechunk(plain, copy, CopySettings(mantissa_bits=3, shard_size=2))
    with pytest.raises(ValueError, match=r"mantissa_bits \(there 3, asked for 2\)"):
        rechunk(plain, copy, CopySettings(mantissa_bits=2, shard_size=2))


def test_a_copy_of_rounded_states_stays_rounded_and_is_not_rounded_twice(rounded, tmp_path):
    with pytest.raises(ValueError, match="rounded to 3 already would round twice"):
        rechunk(rounded, tmp_path / "copy", CopySettings(mantissa_bits=2))
    assert rechunk(rounded, tmp_path / "copy", CopySettings(codec="fast"))
    copy = open_cache(tmp_path / "copy")
    assert copy.manifest["mantissa_bits"] == copy.schema.mantissa_bits == 3


def test_a_resume_with_another_rounding_is_refused(llama, chats, plain, rounded, capsys):
    told = refused(arguments(llama, chats, plain, *ROUNDED, "--resume"), capsys)
    assert "does not match this run in mantissa_bits: store None, this run 3" in told
    assert "mantissa_bits: store 3, this run None" in refused(
        arguments(llama, chats, rounded, *BF16, "--resume"), capsys
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--mantissa-bits", 3), "mantissa-bits 3 of dtype fp32: only bf16 states are rounded"),
        ((*BF16, "--mantissa-bits", 7), "mantissa-bits 7 of dtype bf16"),
        ((*BF16, "--mantissa-bits", 0), "mantissa-bits must be >= 1, got 0"),
    ],
)
def test_what_cannot_be_rounded_is_refused(llama, chats, tmp_path, capsys, flags, told):
    assert told in refused(arguments(llama, chats, tmp_path / "store", *flags), capsys)


def test_rounded_states_are_recomputed_bit_by_bit(llama, rounded, capsys):
    assert cli(["verify", str(rounded), "--recompute", "4", "--target-model", str(llama), "--device", "cpu"]) == 0
    assert "equal" in capsys.readouterr().out


def test_every_tool_tells_that_a_store_is_rounded(plain, rounded, capsys):
    for command in (["info"], ["diff", str(plain)], ["estimate", "--measure", "2", "--store"]):
        cli([*command, str(rounded)])
        told = " ".join(capsys.readouterr().out.split())
        assert "bf16 rounded to 3 of 7 mantissa bits (lossy)" in told, command
    cli(["diff", str(plain), str(rounded), "--json"])
    fields = json.loads(capsys.readouterr().out)["identity"]
    assert {"field": "mantissa_bits", "a": None, "b": 3} in fields


@pytest.mark.parametrize("measure", ["0", "3"])
def test_an_estimate_has_a_column_for_rounded_states(plain, capsys, measure):
    assert cli(["estimate", "--store", str(plain), "--mantissa-bits", "3", "--measure", measure, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sizes = {
        (one["codec"], one["mantissa_bits"]): one["store_bytes"]["expected"]
        for one in found["variants"]
        if one["dtype"] == "bf16"
    }
    assert found["mantissa_bits"] == 3
    assert sizes["default", 3] < sizes["default", None]
    assert sizes["none", 3] == sizes["none", None]


def test_metadata_whose_manifest_and_layout_disagree_is_damage(rounded):
    record = open_cache(rounded).record
    attributes, rounded_schema = record.attributes(), record.schema
    layout = {**rounded_schema.layout(), "mantissa_bits": 2}
    with pytest.raises(DamagedStoreError, match="mantissa_bits is 2, that of the manifest 3"):
        parse_record({**attributes, "layout": layout}, "somewhere")
