"""The statistics of a store: what they count, the same however they are made, and how they are written."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark_store.cli.main import main
from dspark_store.format.metadata import write_metadata
from dspark_store.format.schema import LAST, LAYERS
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.shardwise import Workers
from dspark_store.inspection.stats import survey as shard_survey
from dspark_store.inspection.stats.survey import Rules, measure_store
from dspark_store.readers.cache import Cache, open_cache
from dspark_store.writers.publish import settle_tokens
from dspark_store.writers.tokens import write_token_shard
from tests.readers.test_foreign import CHAINS, rewrite
from tests.stores import RAGGED, STORE_ID, Shape, build_store
from tests.writers.small_store import random_tokens, small_record


def measure(path, rules=None, **options):
    """Return the statistics as a reader of the file gets them."""
    cache = open_cache(path, allow_incomplete=True)
    return json.loads(json.dumps(measure_store(cache, rules or Rules(), **options), allow_nan=False))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return build_store(tmp_path_factory.mktemp("statistics") / "store")


def values_of(store, slot):
    return torch.cat([sample.layers[slot] for sample in store.samples]).double().numpy()


def test_layers_are_measured_in_the_order_of_their_depth(store):
    figures = measure(store.path)
    assert [layer["layer_id"] for layer in figures["layers"]] == [-1, 2, 5]
    for layer in figures["layers"]:
        values = values_of(store, store.schema.layer_ids.index(layer["layer_id"]))
        norms = np.linalg.norm(values, axis=1)
        assert layer["tokens"] == sum(RAGGED)
        assert layer["norm"]["mean"] == pytest.approx(norms.mean(), rel=1e-12)
        assert layer["norm"]["std"] == pytest.approx(norms.std(), rel=1e-9)
        assert (layer["norm"]["min"], layer["norm"]["max"]) == (pytest.approx(norms.min()), pytest.approx(norms.max()))
        assert layer["norm"]["quantiles"]["p50"] == pytest.approx(np.median(norms), rel=0.045)
        assert layer["channels"]["mean"] == pytest.approx(values.mean(axis=0).tolist(), abs=1e-9)
        assert layer["channels"]["std"] == pytest.approx(values.std(axis=0).tolist(), rel=1e-9)
        assert layer["channels"]["absolute_max"] == np.abs(values).max(axis=0).tolist()
        energy = np.sort((values**2).sum(axis=0))[::-1]
        assert layer["channels"]["energy_share"]["top_1"] == pytest.approx(energy[0] / energy.sum())
        assert layer["channels"]["rms_by_rank"]["rms"][0] == pytest.approx(np.sqrt(energy[0] / len(values)))


def test_the_first_tokens_of_samples_are_measured_apart(store):
    first = [np.linalg.norm(sample.layers[0][0].double().numpy()) for sample in store.samples]
    assert measure(store.path)["layers"][1]["norm"]["first_token_mean"] == pytest.approx(np.mean(first))


def test_neighbours_are_compared_by_the_cosines_of_their_tokens(store):
    (low, _) = measure(store.path)["neighbours"]
    one, other = (torch.from_numpy(values_of(store, store.schema.layer_ids.index(layer))) for layer in (-1, 2))
    expected = torch.nn.functional.cosine_similarity(one, other).numpy()
    assert (low["lower"], low["upper"], low["tokens"]) == (-1, 2, sum(RAGGED))
    assert low["cosine"]["mean"] == pytest.approx(expected.mean(), abs=1e-12)
    assert low["cosine"]["max"] == pytest.approx(expected.max(), abs=1e-12)


def test_lengths_supervision_and_ids_are_counted(store):
    figures = measure(store.path)
    assert figures["lengths"]["tokens"] == sum(RAGGED)
    assert (figures["lengths"]["min"], figures["lengths"]["max"], figures["lengths"]["full"]) == (1, 20, 2)
    assert figures["lengths"]["quantiles"]["p50"] == 9
    histogram = figures["lengths"]["histogram"]
    assert dict(zip(histogram["starts"], histogram["counts"], strict=True)) == {
        length: RAGGED.count(length) for length in range(21)
    }
    supervised = [int(sample.mask.sum()) for sample in store.samples]
    assert figures["supervision"]["tokens"] == sum(supervised)
    assert figures["supervision"]["samples_without"] == supervised.count(0)
    ids = np.concatenate([sample.ids for sample in store.samples])
    assert figures["vocabulary"]["all"]["used"] == len(np.unique(ids))
    assert figures["vocabulary"]["supervised"]["tokens"] == sum(supervised)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_dtype_and_a_last_state_of_its_own(dtype, tmp_path):
    built = build_store(tmp_path, dtype=dtype, shared_last=False, spoiled=4)
    figures = measure(built.path)
    found = figures["last_hidden_states"]
    assert (found["column"], found["same_objects_as_layer"]) == (LAST, None)
    last = torch.cat([sample.last for sample in built.samples]).double().numpy()
    assert found["norm"]["mean"] == pytest.approx(np.linalg.norm(last, axis=1).mean())
    assert figures["layers"][1]["nonfinite"] == {"values": 1, "tokens": 1}
    assert figures["layers"][1]["tokens"] == sum(RAGGED) - 1
    assert figures["store"]["nonfinite_samples"] == 1


@pytest.mark.parametrize("until", ["complete", "states"])
def test_every_object_is_opened_once_and_a_shared_one_not_again(tmp_path, monkeypatch, until):
    built = build_store(tmp_path, until=until)
    opened: list[str] = []
    opening = LocalStorage.open

    def open_noted(storage, key):
        opened.append(key)
        return opening(storage, key)

    monkeypatch.setattr(LocalStorage, "open", open_noted)
    figures = measure(built.path)
    assert figures["last_hidden_states"]["same_objects_as_layer"] == 5
    assert figures["last_hidden_states"]["norm"] == figures["layers"][2]["norm"]
    assert len(opened) == len(set(opened)) == 3 * (2 + 3)
    assert not [key for key in opened if key.startswith(LAST)]


def test_chunks_are_read_once_however_small_the_reads(store, monkeypatch):
    whole = measure(store.path)
    spans: list[slice] = []
    reading = Cache.read

    def read(cache, rows, **options):
        spans.extend([options["positions"]] if LAYERS in options["columns"] else [])
        return reading(cache, rows, **options)

    monkeypatch.setattr(Cache, "read", read)
    monkeypatch.setattr(shard_survey, "_READ_BYTES", 1)
    figures = measure(store.path)
    (once, again), first = (found["layers"][0] for found in (whole, figures)), "first_token_mean"
    assert again["exponents"] == once["exponents"]
    assert again["norm"][first] == pytest.approx(once["norm"][first])
    chunk = store.schema.chunk_tokens
    assert len(spans) == sum(-(-length // chunk) for length in RAGGED)
    assert all(span.start % chunk == 0 and span.stop - span.start <= chunk for span in spans)


def test_no_file_of_the_store_stays_open(store):
    measure(store.path)
    gc.collect()
    held = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in held if path.is_relative_to(store.path)]


def test_any_number_of_threads_gives_the_same_bits(store):
    assert measure(store.path, workers=Workers(1)) == measure(store.path, workers=Workers(5))


def test_a_cluster_writes_the_same_bytes_as_threads(cluster, tmp_path):
    path = build_store(tmp_path / "store", lengths=RAGGED * 3, shape=Shape(shard_size=1), spoiled=4).path
    for place, options in (("threads", []), ("cluster", ["--scheduler", cluster.scheduler_address])):
        assert main(["stats", str(path), "--output", str(tmp_path / place), *options]) == 0
    for name in ("stats.json", "stats.html"):
        assert (tmp_path / "threads" / name).read_bytes() == (tmp_path / "cluster" / name).read_bytes()


def test_a_foreign_column_gives_the_same_figures(tmp_path):
    built = build_store(tmp_path)
    before = measure(built.path)
    rewrite(built, LAYERS, (1, 8, 8), shards=(3, 24, 24), **CHAINS["zstd"])
    after = measure(built.path)
    assert after["layers"] == before["layers"]
    assert after["last_hidden_states"]["same_objects_as_layer"] is None
    assert after["last_hidden_states"]["norm"] == before["last_hidden_states"]["norm"]


def test_a_growing_store_is_measured_as_far_as_it_is_captured(tmp_path):
    built = build_store(tmp_path, without_shards=(1,))
    figures = measure(built.path)
    store = figures["store"]
    assert (store["phase"], store["captured_shards"], store["shards"]) == ("states", 2, 3)
    assert (figures["read"]["samples"], figures["read"]["samples_with_states"]) == (7, 4)
    assert figures["layers"][0]["tokens"] == sum(RAGGED[:3]) + sum(RAGGED[6:])
    assert figures["vocabulary"]["all"]["tokens"] == figures["lengths"]["tokens"] == sum(RAGGED)
    assert store["nonfinite_samples"] is None


def test_a_store_without_captured_states_has_tokens_only(tmp_path):
    figures = measure(build_store(tmp_path, without_shards=(0, 1, 2)).path)
    assert (figures["layers"], figures["neighbours"], figures["last_hidden_states"]) == ([], [], None)
    assert figures["vocabulary"]["all"]["tokens"] == sum(RAGGED)


def test_a_store_in_its_token_phase_is_refused(tmp_path):
    with pytest.raises(ValueError, match="still in its token phase"):
        measure(build_store(tmp_path, until="tokens").path)


def test_chosen_layers_are_those_of_the_whole(store):
    whole, part = measure(store.path), measure(store.path, Rules(layers=(5, -1), last=False))
    assert part["layers"] == [whole["layers"][0], whole["layers"][2]]
    assert [(pair["lower"], pair["upper"]) for pair in part["neighbours"]] == [(-1, 5)]
    assert part["last_hidden_states"] is None
    only = measure(store.path, Rules(layers=(), last=True))
    assert (only["layers"], only["last_hidden_states"]) == ([], whole["last_hidden_states"])
    with pytest.raises(ValueError, match="layer 3 was not captured"):
        measure(store.path, Rules(layers=(3,)))


def test_a_draw_is_of_that_many_samples_and_follows_its_seed(store):
    draws = [measure(store.path, Rules(samples=3, seed=seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1]
    assert draws[0]["layers"] != draws[2]["layers"]
    assert (draws[0]["read"]["samples"], draws[0]["read"]["drawn"], draws[0]["read"]["seed"]) == (3, True, 1)
    assert draws[0]["lengths"]["samples"] == 7
    everything = measure(store.path, Rules(samples=99))
    assert everything["layers"] == measure(store.path)["layers"]
    with pytest.raises(ValueError, match="--samples must be >= 1, got 0"):
        measure(store.path, Rules(samples=0))


def test_outliers_are_times_of_the_median_channel(tmp_path):
    built = build_store(tmp_path, shape=Shape(hidden_size=8))
    figures = measure(built.path, Rules(outlier_factor=1.0))["layers"][0]["channels"]["outliers"]
    values = values_of(built, 1)
    greatest, std = np.abs(values).max(axis=0), values.std(axis=0)
    found = (greatest > np.median(greatest)) | (std > np.median(std))
    assert figures["count"] == found.sum()
    assert {item["channel"] for item in figures["strongest"]} == set(np.flatnonzero(found).tolist())
    assert measure(built.path)["layers"][0]["channels"]["outliers"]["count"] == 0
    with pytest.raises(ValueError, match="--outlier-factor must be >= 1"):
        Rules(outlier_factor=0.5)


def test_a_blend_is_counted_by_source(tmp_path):
    record = replace(small_record(), schema=replace(small_record().schema, sources=("code", "<b>chat</b>")))
    storage = LocalStorage(tmp_path)
    write_metadata(storage, record)
    tokens = replace(random_tokens((9, 4, 5), 0), sources=(1, 0, 1))
    write_token_shard(storage, record, 0, tokens, cursor=3)
    settle_tokens(storage, record)
    code, chat = measure(tmp_path)["sources"]
    assert (code["name"], code["samples"], code["tokens"]) == ("code", 1, 4)
    assert (chat["samples"], chat["tokens"], chat["mean_length"]) == (2, 14, 7.0)
    assert chat["supervised"] == int(tokens.masks[0].sum() + tokens.masks[2].sum())
    assert code["token_share"] == pytest.approx(4 / 18)


def test_another_store_at_the_same_path_is_refused(tmp_path):
    built = build_store(tmp_path)
    survey = replace(shard_survey.ShardSurvey.of(Cache(built.storage), Rules()), store_id=STORE_ID[::-1])
    with pytest.raises(ValueError, match="holds another store now"):
        survey(0)
