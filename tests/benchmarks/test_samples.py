"""Samples, the stores written from them, and what access patterns ask for."""

import numpy as np
import pytest
import torch

from benchmarks.measure import (
    ACCESSES,
    SPAN,
    Axes,
    Setting,
    Trial,
    chosen_axes,
    default_axes,
    default_setting,
    requests,
)
from benchmarks.samples import stored_samples, synthetic_samples, write_samples
from dspark_store import open_cache, verify_store
from tests.stores import RAGGED, build_store


@pytest.fixture(scope="module")
def samples():
    return synthetic_samples(40, 8, 4, 12, ragged=True)


def test_samples_of_a_store_are_its_own(tmp_path):
    built = build_store(tmp_path / "store")
    samples = stored_samples(tmp_path / "store")
    assert samples.lengths == RAGGED
    assert (samples.layers, samples.width, samples.seq_length) == (3, 8, 20)
    for sample, kept in enumerate(built.samples):
        assert torch.equal(torch.stack(list(samples.states(sample))), kept.layers)


def test_fewer_samples_are_spread_over_the_store_and_the_last_layers_are_taken(tmp_path):
    built = build_store(tmp_path / "store")
    samples = stored_samples(tmp_path / "store", count=2, layers=1)
    assert samples.lengths == (RAGGED[0], RAGGED[-1])
    assert torch.equal(samples.states(1)[0], built.samples[-1].layers[2])
    assert len(stored_samples(tmp_path / "store", nbytes=1).lengths) == 1


def test_a_written_store_is_sound_and_holds_the_samples(samples, tmp_path):
    write_samples(samples, samples.schema("default", 16, 5), tmp_path / "store", threads=2)
    cache = open_cache(tmp_path / "store")
    assert verify_store(cache) == []
    for sample, length in enumerate(samples.lengths):
        states = cache.read([sample], positions=slice(0, length), layout="stacked")
        assert torch.equal(states["target_hidden_states"][0], torch.stack(list(samples.states(sample))))
        assert torch.equal(states["target_last_hidden_states"][0], samples.states(sample)[-1])


def test_grouped_layers_are_the_features_side_by_side(samples):
    grouped = samples.grouped(2)
    assert (grouped.layers, grouped.width, grouped.state_bytes) == (2, 16, samples.state_bytes)
    one, other = samples.states(3)[2:4]
    assert torch.equal(grouped.states(3)[1], torch.cat([one, other], dim=1))
    with pytest.raises(ValueError, match="do not divide"):
        samples.grouped(3)


@pytest.mark.parametrize("access", ACCESSES)
def test_requests_lie_within_their_samples(samples, access):
    for request in requests(access, samples, 5):
        assert 0 < request.valid <= request.positions * len(request.spans)
        for row, span in enumerate(request.spans):
            assert 0 <= span.start <= span.stop <= samples.lengths[span.sample]
            assert (span.batch, span.place, span.room) == (row, 0, request.positions)
            assert span.stop - span.start <= SPAN
    assert (requests(access, samples, 1)[0].layer is not None) == (access == "layer")


def test_requests_go_over_every_sample_before_one_comes_again(samples):
    for access in ("sample", "sequential"):
        read = [span.sample for request in requests(access, samples, 3) for span in request.spans]
        assert sorted(read[:12]) == list(range(12))


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("access", ACCESSES)
def test_a_trial_reads_what_was_asked_for(samples, layers, access, tmp_path):
    trial = Trial(samples.grouped(layers), Setting("fast", 16, 5, layers), tmp_path / "store", 1)
    trial.write()
    with trial.opened(access) as reading:
        for request in requests(access, samples, 3):
            batch = reading.read(request)["target_hidden_states"]
            for span in request.spans:
                states = torch.stack(list(samples.states(span.sample)))[:, span.start : span.stop]
                got = batch[span.batch, :, : span.stop - span.start].unflatten(2, (layers, samples.width))
                got = got.transpose(1, 2).flatten(0, 1)
                at = request.layer
                wanted = states if at is None else states[at // layers * layers : (at // layers + 1) * layers]
                assert torch.equal(got, wanted)
                assert not batch[span.batch, :, span.stop - span.start :].any()


def test_reading_one_layer_of_several_in_a_chunk_reads_them_all(samples, tmp_path):
    counts = {}
    for layers in (1, 4):
        trial = Trial(samples.grouped(layers), Setting("none", 8, 12, layers), tmp_path / str(layers), 1)
        trial.write()
        asked = requests("layer", samples, 4)
        with trial.opened("layer") as reading:
            counts[layers] = reading.bytes_read(asked)
    assert 2.5 < counts[4] / counts[1] <= 4


def test_objects_opened_anew_cost_their_tails(samples, tmp_path):
    trial = Trial(samples, Setting("none", 8, 4), tmp_path / "store", 1)
    trial.write()
    asked = requests("sample", samples, 1)
    counts = {}
    for access in ("sample", "scattered"):
        with trial.opened(access) as reading:
            counts[access] = reading.bytes_read(asked)
    tails = 8 * samples.layers * trial.opening().object_bytes
    assert counts["scattered"] >= counts["sample"] + tails


def test_facts_of_a_trial_are_those_of_its_files(samples, tmp_path):
    trial = Trial(samples, Setting("default", 8, 5), tmp_path / "store", 1)
    trial.write()
    files = [path for name in ("input_ids", "loss_mask") for path in (tmp_path / "store" / name).glob("c.*")]
    files += (tmp_path / "store" / "target_hidden_states").glob("c.*")  # the last states are one of the layers
    assert sorted(trial.files.values()) == sorted(path.stat().st_size for path in files)
    assert len(files) == 3 * (2 + samples.layers)
    opening = trial.opening()
    assert opening.store_ms > 0
    assert opening.object_ms > 0


def test_the_default_is_on_the_grid_and_every_axis_can_be_given(samples):
    default = default_setting(samples)
    axes = default_axes(samples, quick=False)
    for every in (axes, default_axes(samples, quick=True)):
        assert default in every.settings()
        assert set(every.layers) == {1, samples.layers}
        assert max(every.chunk_tokens) <= samples.seq_length
    given = Axes(("none",), (40, 8), (), (1, 2))
    assert chosen_axes(axes, given, samples) == Axes(("none",), (8, 40), axes.shard_sizes, (1, 2))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (Axes((), (41,), (), ()), "--chunk-tokens 41 is outside 1 to 40"),
        (Axes((), (), (), (1, 3)), "--layers-per-chunk 3 does not divide the 4 layers"),
        (Axes((), (), (0,), ()), "--shard-size must be >= 1"),
        (Axes((), (), (), (2,)), "must have 1 in it"),
    ],
)
def test_axes_that_cannot_be_are_refused(samples, axes, message):
    with pytest.raises(ValueError, match=message):
        chosen_axes(default_axes(samples, quick=True), axes, samples)


def test_synthetic_lengths_are_full_or_spread():
    assert set(synthetic_samples(40, 8, 2, 5, ragged=False).lengths) == {40}
    assert sorted(synthetic_samples(40, 8, 2, 5, ragged=True).lengths) == np.linspace(1, 40, 5).astype(int).tolist()
