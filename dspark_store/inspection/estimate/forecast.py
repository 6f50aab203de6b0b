"""What ``dspark-store estimate`` answers: a corpus, a measurement, and the store in every codec and dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dspark_store.format.dtypes import CACHE_DTYPES
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import StoreSchema
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.estimate.corpus import Corpus, count_source, count_store
from dspark_store.inspection.estimate.estimation import Duration, StoreEstimate, estimate_duration, estimate_store
from dspark_store.inspection.estimate.measurement import (
    Measurement,
    TrialEncoder,
    Variant,
    measure_store,
    measure_target,
    variants,
)
from dspark_store.precompute.capture import missing_shards
from dspark_store.precompute.estimate import recorded_rate
from dspark_store.precompute.job import Job, check_identity, plan_job
from dspark_store.precompute.rows import SampleCounts, tell_refusals
from dspark_store.precompute.settings import PrecomputeConfig
from dspark_store.readers.cache import Cache
from dspark_store.readers.index import StoreIndex
from dspark_store.readers.tensors import chosen_slots
from dspark_store.target.batches import recorded_limit

_NEEDED = ("num_hidden_layers", "target_vocab_size")
TABLE = "a table of ratios: nothing was measured"


@dataclass(frozen=True, slots=True)
class Forecast:
    """``chosen`` is the store that was asked for, ``others`` all codecs and dtypes, it among them.

    ``counts`` says how many samples are cut or not supervised, None where no row had to be read. ``basis`` says in
    words where the ratios come from, ``measured_rows`` is 0 where they are not measured; ``rate_basis`` says where the
    speed comes from. ``last_layer`` is the id of the target's last layer, ``free`` the bytes left where the store is to
    be.
    """

    corpus: Corpus
    counts: SampleCounts | None
    chosen: StoreEstimate
    others: tuple[StoreEstimate, ...]
    last_layer: int
    measured_rows: int
    basis: str
    duration: Duration | None
    rate_basis: str
    free: int


@dataclass(frozen=True, slots=True)
class StoreChoice:
    """What is to be other than in the store whose lengths and states an estimate goes by. None is as it is there."""

    codec: str | None = None
    chunk_tokens: int | None = None
    layer_ids: Sequence[int] | None = None
    tokens_per_second: float | None = None

    def schema(self, cache: Cache) -> StoreSchema:
        """Return the store's schema, changed; ValueError for a layer that the store does not have."""
        schema = cache.schema
        if self.layer_ids is not None:
            chosen_slots(schema, self.layer_ids)
            schema = replace(schema, layer_ids=tuple(self.layer_ids), num_layers=len(self.layer_ids))
        if self.codec is None and self.chunk_tokens is None:
            return schema
        return Variant(self.codec or schema.codec, schema.dtype.name).schema(schema, self.chunk_tokens or 0)


def forecast_job(config: PrecomputeConfig, measure: int, recorded: StoreRecord | None = None) -> Forecast:
    """Estimate the store that a precompute with these settings would make.

    ``measure`` of its rows are run through the target; with 0 the target is not loaded. Of a store that is ``recorded``
    at its place, with its tokens, only the samples are counted whose states are missing, or all when none are. Raises
    what a precompute does.
    """
    config.check()
    job = plan_job(config, recorded=recorded)
    schema, last_layer = job.new_record.schema, job.new_record.last_layer
    corpus, counts = _samples_of(job, measure, recorded)
    schemas = _schemas(schema, config.chunk_tokens, list(CACHE_DTYPES))
    measurement, basis = None, TABLE
    if measure:
        with TrialEncoder(corpus.rows, schemas, last_layer) as encoder:
            device = measure_target(job, encoder)
        measurement = encoder.measurement
        basis = f"{len(corpus.rows):,} rows taken at random and run through the target on {device}"
    known_rate = None if measurement else recorded_rate(recorded)
    duration = estimate_duration(
        corpus,
        schema.shard_size,
        config.batch_limit,
        tokens_per_second=config.tokens_per_second or known_rate,
        positions_per_second=measurement.positions_per_second if measurement else None,
        encode_seconds=measurement.encode_seconds[Variant.of(schema)] if measurement else None,
        threads=config.resolved_encode_threads,
    )
    given = config.tokens_per_second is not None
    rate_basis = "as given" if given else "measured on these rows" if measurement else "as the store records"
    chosen, others = _estimates(job.new_record, schemas, corpus, measurement)
    free = LocalStorage(config.output_dir).free_bytes()
    rows = len(measurement.rows) if measurement else 0
    return Forecast(corpus, counts, chosen, others, last_layer, rows, basis, duration, rate_basis, free)


def _samples_of(job: Job, rows: int, recorded: StoreRecord | None) -> tuple[Corpus, SampleCounts | None]:
    """Count the samples of a job, from the store where it has its tokens, else from the source."""
    seq_length = job.config.seq_length
    if recorded is not None and recorded.phase != "tokens":
        check_identity(recorded, job)
        storage = LocalStorage(job.config.output_dir)
        index, samples = StoreIndex(storage, recorded), np.arange(recorded.schema.num_samples)
        counts = SampleCounts.of(job.source, seq_length, index.length, index.supervised, samples >= 0)
        if not recorded.complete:
            samples = samples[np.isin(samples // recorded.schema.shard_size, missing_shards(storage, recorded.schema))]
        return Corpus(index.length[samples].astype(np.int64), index.supervised[samples].astype(np.int64), ()), counts
    known = not job.config.estimate and job.config.min_supervised == 0
    corpus = count_source(job.source, seq_length, rows, all_kept=known)
    tell_refusals(job.source)
    if corpus.supervised is None:
        return corpus, None
    counts = SampleCounts.of(job.source, seq_length, corpus.lengths, corpus.supervised)
    counts.check()
    return corpus, counts


def forecast_store(cache: Cache, choice: StoreChoice, measure: int) -> Forecast:
    """Estimate a finished or growing store, or what it would be in another codec or with fewer of its layers.

    ``measure`` of its rows are encoded anew, if it has states already. Dtypes that hold more than the store's are left
    out: their bits are not known.
    """
    missing = [name for name in _NEEDED if cache.manifest.get(name) is None]
    if missing:
        raise ValueError(f"store at {cache.storage} cannot be estimated: its manifest does not have {missing[0]}")
    corpus = count_store(cache, measure)
    schema, storage = choice.schema(cache), cache.storage
    record = replace(cache.record, schema=schema)
    dtypes = list(CACHE_DTYPES) if schema.dtype.name == "fp32" else [schema.dtype.name]
    schemas = _schemas(schema, choice.chunk_tokens or 0, dtypes)
    measurement, basis = None, TABLE
    if measure and cache.index.committed():
        with TrialEncoder(corpus.rows, schemas, record.last_layer) as encoder:
            measure_store(cache, schema.layer_ids, encoder)
        measurement = encoder.measurement
        basis = f"{len(corpus.rows):,} rows of the store, taken at random and encoded anew"
    given = choice.tokens_per_second
    if given is not None and given <= 0:
        raise ValueError(f"tokens-per-second must be > 0, got {given}")
    duration = estimate_duration(
        corpus,
        schema.shard_size,
        recorded_limit(cache.manifest) or 1,
        tokens_per_second=given or recorded_rate(cache.record),
    )
    chosen, others = _estimates(record, schemas, corpus, measurement)
    rate_basis = "as given" if given else "as the store records"
    rows = len(measurement.rows) if measurement else 0
    full = int((corpus.lengths == schema.seq_length).sum())  # some of them may have been cut
    counts = SampleCounts(len(corpus), schema.seq_length, 0, full, int((cache.supervised == 0).sum()))
    return Forecast(
        corpus, counts, chosen, others, record.last_layer, rows, basis, duration, rate_basis, storage.free_bytes()
    )


def _schemas(schema: StoreSchema, chunk_tokens: int, dtypes: Sequence[str]) -> dict[Variant, StoreSchema]:
    """Return the schema in every variant; the one that was asked for is as it is."""
    found = {variant: variant.schema(schema, chunk_tokens) for variant in variants(dtypes)}
    return {**found, Variant.of(schema): schema}


def _estimates(
    record: StoreRecord, schemas: Mapping[Variant, StoreSchema], corpus: Corpus, measurement: Measurement | None
) -> tuple[StoreEstimate, tuple[StoreEstimate, ...]]:
    found = {variant: estimate_store(record, schema, corpus, measurement) for variant, schema in schemas.items()}
    return found[Variant.of(record.schema)], tuple(found.values())
