"""A precompute of int8 states: calibrated once, gone on with, copied, and recomputed."""

import json

import pytest
import torch

from dspark_store import open_cache, verify_store
from dspark_store.format.int8 import AIMS, calibrate, quantise
from dspark_store.format.metadata import read_record
from dspark_store.format.schema import LAST, LAYERS
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.copy_plan import CopySettings
from dspark_store.inspection.rechunk import rechunk
from dspark_store.precompute import capture as capture_module
from dspark_store.precompute.__main__ import main
from dspark_store.precompute.recompute import recompute
from dspark_store.target.capture import TargetCapture
from dspark_store.target.load import load_target
from dspark_store.target.source import TargetSource
from tests.precompute.jobs import BATCH_SIZE, arguments, contents, interrupted, precompute, refused

INT8 = ("--dtype", "int8")


@pytest.fixture(scope="module")
def coded(llama, chats, tmp_path_factory):
    return precompute(llama, chats, tmp_path_factory.mktemp("coded") / "store", *INT8)


def root(store):
    return json.loads((store / "zarr.json").read_text())["attributes"]["dspark_store"]


def test_its_states_are_those_of_a_lossless_store_within_the_calibrated_error(coded, store):
    cache, lossless = open_cache(coded), open_cache(store)
    assert verify_store(cache) == []
    assert (root(coded)["format_version"], root(coded)["features"]) == (2, ["int8"])
    assert (cache.manifest["dtype"], cache.manifest["state_dtype"], cache.dtype) == ("bf16", "int8", torch.bfloat16)
    batch, exact = (each.read(range(len(each)), dtype=torch.float32, layout="stacked") for each in (cache, lossless))
    for place, layer in enumerate(cache.layer_ids):
        apart = (batch[LAYERS][:, place] - exact[LAYERS][:, place]).norm(dim=-1)
        error = float((apart / exact[LAYERS][:, place].norm(dim=-1).clamp(min=1e-9)).sum() / cache.lengths.sum())
        assert error == pytest.approx(AIMS["int8"], rel=0.25), layer
    assert root(store)["format_version"] == 1
    assert "features" not in root(store)


def test_the_copy_of_a_lossless_store_has_the_codes_of_its_own_calibration(store, tmp_path):
    rechunk(store, tmp_path / "copy", CopySettings(state_dtype="int8-small", shard_size=3))
    copy, lossless = open_cache(tmp_path / "copy"), open_cache(store)
    assert verify_store(copy) == []
    assert copy.manifest["state_dtype"] == "int8-small"
    for sample in range(len(copy)):
        valid = slice(0, int(copy.lengths[sample]))
        states = lossless.read([sample], positions=valid, layout="stacked")
        codes = copy.read([sample], positions=valid, layout="stacked", dequantise=False)
        for slot in range(copy.schema.num_layers):
            wanted, _ = quantise(states[LAYERS][0, slot], copy.schema.scale(LAYERS, slot))
            assert torch.equal(codes[LAYERS][0, slot], wanted)
        assert torch.equal(codes[LAST][0], quantise(states[LAST][0], copy.schema.scale(LAST, 0))[0])


def test_a_copy_of_codes_keeps_every_code_and_the_calibration_of_its_layers(coded, tmp_path):
    source = open_cache(coded)
    kept = source.layer_ids[-2:]
    rechunk(coded, tmp_path / "copy", CopySettings(codec="none", chunk_tokens=16, shard_size=3, layers=kept))
    copy = open_cache(tmp_path / "copy")
    one, other = (each.read(range(len(each)), layers=kept, dequantise=False) for each in (source, copy))
    assert all(torch.equal(one[name], values) for name, values in other.items())
    assert copy.schema.scales == source.schema.scales[-3:]
    assert copy.record.capture_shard_size == source.schema.shard_size


@pytest.mark.parametrize(("lossy", "asked"), [("int8", "int8-small"), ("int8-small", "int8")])
def test_codes_are_made_of_lossless_states_only(store, tmp_path, lossy, asked):
    rechunk(store, tmp_path / lossy, CopySettings(state_dtype=lossy))
    with pytest.raises(ValueError, match=f"dtype {asked} cannot be made of the source's bf16 from {lossy}"):
        rechunk(tmp_path / lossy, tmp_path / "again", CopySettings(state_dtype=asked))


def test_a_job_that_stops_before_its_first_code_is_gone_on_with_by_its_calibration(coded, llama, chats, tmp_path):
    job = arguments(llama, chats, tmp_path / "store", *INT8)
    place = interrupted(job, capture_module, "ShardCapture")
    begun = read_record(LocalStorage(place)).schema.scales
    assert [scale.offset for scale in begun] == [scale.offset for scale in open_cache(coded).schema.scales]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture_module.CaptureContext, "calibrate", None)  # it must not be asked for again
        assert main([*job, "--resume"]) == 0
    assert contents(place) == contents(coded)


def test_a_job_that_stops_before_it_is_calibrated_is_gone_on_with(coded, llama, chats, tmp_path):
    job = arguments(llama, chats, tmp_path / "store", *INT8)
    assert read_record(LocalStorage(interrupted(job, capture_module, "calibrate"))).schema.scales == ()
    assert main([*job, "--resume"]) == 0
    assert contents(tmp_path / "store") == contents(coded)


@pytest.mark.parametrize("dtype", ["int8-small", "bf16"])
def test_another_dtype_is_another_store(coded, llama, chats, capsys, dtype):
    told = refused(arguments(llama, chats, coded, "--dtype", dtype, "--resume"), capsys)
    assert "does not match this run in state_dtype: store 'int8'" in told


def test_recomputed_codes_are_equal_and_other_states_differ_by_more_than_a_step(coded, llama):
    cache = open_cache(coded)
    model = load_target(TargetSource(str(llama)), dtype=torch.float32, device=torch.device("cpu"))
    again = TargetCapture(model, cache.layer_ids), torch.device("cpu"), BATCH_SIZE
    assert set(dict(recompute(cache, *again, range(11))).values()) == {0.0}
    with torch.no_grad():
        model.model.norm.weight *= 1.0001
    assert 0 < dict(recompute(cache, *again, [3]))[3] < 1e-3  # other codes, within one step
    with torch.no_grad():
        model.model.norm.weight *= 1.5
    assert dict(recompute(cache, *again, [3]))[3] > 1e-2


@pytest.mark.parametrize("job", ["precompute", "rechunk"])
def test_tokens_unlike_the_sample_are_counted_and_told_once(llama, chats, store, tmp_path, monkeypatch, caplog, job):
    def with_least_steps(rows, hidden_size, aim):
        scale = calibrate(rows, hidden_size, aim)
        return type(scale)(-160, scale.high_channels, scale.error, 0.0)  # steps that everything overflows

    monkeypatch.setattr("dspark_store.inspection.rechunk.calibrate", with_least_steps)
    monkeypatch.setattr("dspark_store.precompute.capture.calibrate", with_least_steps)
    if job == "rechunk":
        rechunk(store, tmp_path / "made", CopySettings(state_dtype="int8"))
    else:
        precompute(llama, chats, tmp_path / "made", *INT8)
    told = [record.message for record in caplog.records if "got a coarser one" in record.message]
    cache = open_cache(tmp_path / "made")
    assert len(told) == len(cache.layer_ids)  # the last layer and the last states are one object
    assert all(scale.widened == 1.0 for scale in cache.schema.scales)
