"""What ``dspark-store estimate`` answers: a corpus, a measurement, and the store in every codec and dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dspark_store.format.dtypes import CACHE_DTYPES
from dspark_store.format.int8 import AIMS
from dspark_store.format.manifest import StoreRecord
from dspark_store.format.schema import StoreSchema
from dspark_store.format.storage import LocalStorage
from dspark_store.inspection.estimate.estimation import (
    Corpus,
    Duration,
    StoreEstimate,
    count_source,
    count_store,
    estimate_store,
    measured_duration,
)
from dspark_store.inspection.estimate.measurement import Measurement, Variant, measure_store, measure_target, variants
from dspark_store.precompute.capture import missing_shards
from dspark_store.precompute.estimate import recorded_rate
from dspark_store.precompute.job import Job, check_identity, plan_job
from dspark_store.precompute.settings import PrecomputeConfig
from dspark_store.precompute.tokenise import SampleCounts, tell_refusals
from dspark_store.readers.cache import Cache
from dspark_store.readers.index import StoreIndex
from dspark_store.readers.tensors import chosen_slots

_NEEDED = ("num_hidden_layers", "target_vocab_size")
TABLE = "a table of ratios: nothing was measured"


@dataclass(frozen=True, slots=True)
class Forecast:
    """``record`` is that of the store that was asked for, ``stores`` the estimates of it in every codec and dtype.

    ``counts`` says how many samples are cut or not supervised, None where no row had to be read. ``basis`` says in
    words where the ratios come from, ``measured_rows`` is 0 where they are not measured; ``rate_basis`` says where the
    speed comes from. ``free`` are the bytes left where the store is to be.
    """

    record: StoreRecord
    corpus: Corpus
    counts: SampleCounts | None
    stores: Mapping[Variant, StoreEstimate]
    measured_rows: int
    basis: str
    duration: Duration | None
    rate_basis: str
    free: int

    @property
    def chosen(self) -> StoreEstimate:
        """The estimate of the store that was asked for."""
        return self.stores[Variant.of(self.record.schema)]


@dataclass(frozen=True, slots=True)
class StoreChoice:
    """What is to be other than in the store whose lengths and states an estimate goes by. None is as it is there."""

    codec: str | None = None
    chunk_tokens: int | None = None
    layer_ids: Sequence[int] | None = None
    tokens_per_second: float | None = None
    mantissa_bits: int | None = None

    def schema(self, cache: Cache) -> StoreSchema:
        """Return the store's schema, changed; ValueError for a layer that the store does not have."""
        schema = cache.schema
        if self.layer_ids is not None:
            chosen_slots(schema, self.layer_ids)
            schema = replace(schema, layer_ids=tuple(self.layer_ids), num_layers=len(self.layer_ids), scales=())
        if schema.mantissa_bits is not None and self.mantissa_bits not in (None, schema.mantissa_bits):
            raise ValueError(
                f"the states of {cache.storage} are rounded to {schema.mantissa_bits} mantissa bits already"
            )
        if self.codec is None and self.chunk_tokens is None and self.mantissa_bits is None:
            return schema
        variant = Variant(self.codec or schema.codec, schema.state_dtype, self.mantissa_bits or schema.mantissa_bits)
        return variant.schema(schema, self.chunk_tokens or 0)


def forecast_job(config: PrecomputeConfig, measure: int, recorded: StoreRecord | None = None) -> Forecast:
    """Estimate the store that a precompute with these settings would make.

    ``measure`` of its rows are run through the target; with 0 the target is not loaded. Of a store that is ``recorded``
    at its place, with its tokens, only the samples are counted whose states are missing, or all when none are. Raises
    what a precompute does.
    """
    config.check()
    job = plan_job(config, recorded=recorded)
    record, schema = job.new_record, job.new_record.schema
    corpus, counts = _samples_of(job, measure, recorded)
    measurement, basis = None, TABLE
    schemas = _schemas(schema, config.chunk_tokens, [*CACHE_DTYPES, *AIMS])
    duration = _by_rate(corpus, config.tokens_per_second or (None if measure else recorded_rate(recorded)))
    if measure:
        measurement = Measurement(corpus.rows, schemas, record.last_layer)
        device = measure_target(job, measurement)
        basis = f"{len(corpus.rows):,} rows taken at random and run through the target on {device}"
        rate, encode_seconds = measurement.positions_per_second, measurement.encode_seconds[Variant.of(schema)]
        if duration is None and rate is not None:
            encode_seconds /= config.resolved_encode_threads
            duration = measured_duration(corpus, schema.shard_size, config.batch_limit, rate, encode_seconds)
    given = config.tokens_per_second is not None
    rate_basis = "as given" if given else "measured on these rows" if measurement else "as the store records"
    stores = {variant: estimate_store(record, schema, corpus, measurement) for variant, schema in schemas.items()}
    rows = len(corpus.rows) if measurement else 0
    free = LocalStorage(config.output_dir).free_bytes()
    return Forecast(record, corpus, counts, stores, rows, basis, duration, rate_basis, free)


def _samples_of(job: Job, rows: int, recorded: StoreRecord | None) -> tuple[Corpus, SampleCounts | None]:
    """Count the samples of a job, from the store where it has its tokens, else from the source."""
    seq_length = job.config.seq_length
    if recorded is not None and recorded.phase != "tokens":
        check_identity(recorded, job.new_record, job.config)
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
    corpus, schema = count_store(cache, measure), choice.schema(cache)
    record = replace(cache.record, schema=schema)
    lossless = list(CACHE_DTYPES) if schema.dtype.name == "fp32" else [schema.dtype.name]
    dtypes = [*lossless, *AIMS] if schema.int8 is None else [schema.int8]
    if cache.schema.mantissa_bits is not None:
        dtypes = []
    measurement, basis = None, TABLE
    schemas = _schemas(schema, choice.chunk_tokens or 0, dtypes)
    if measure and cache.index.committed():
        measurement = Measurement(corpus.rows, schemas, record.last_layer)
        measure_store(cache, schema.layer_ids, measurement)
        basis = f"{len(corpus.rows):,} rows of the store, taken at random and encoded anew"
    given = choice.tokens_per_second
    if given is not None and given <= 0:
        raise ValueError(f"tokens-per-second must be > 0, got {given}")
    duration = _by_rate(corpus, given or recorded_rate(cache.record))
    stores = {variant: estimate_store(record, schema, corpus, measurement) for variant, schema in schemas.items()}
    rows = len(corpus.rows) if measurement else 0
    full = int((corpus.lengths == schema.seq_length).sum())  # some of them may have been cut
    counts = SampleCounts(len(corpus), schema.seq_length, 0, full, int((cache.supervised == 0).sum()))
    rate_basis, free = "as given" if given else "as the store records", cache.storage.free_bytes()
    return Forecast(record, corpus, counts, stores, rows, basis, duration, rate_basis, free)


def _by_rate(corpus: Corpus, tokens_per_second: float | None) -> Duration | None:
    """Take a rate in valid tokens at its word: it includes all."""
    return None if tokens_per_second is None else Duration(corpus.tokens / tokens_per_second, None)


def _schemas(schema: StoreSchema, chunk_tokens: int, dtypes: Sequence[str]) -> dict[Variant, StoreSchema]:
    """Return the schema in every variant; the one that was asked for is as it is."""
    found = {variant: variant.schema(schema, chunk_tokens) for variant in variants(dtypes, schema.mantissa_bits)}
    return {**found, Variant.of(schema): schema}
