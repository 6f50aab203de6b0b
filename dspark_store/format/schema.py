"""Which arrays a store has, and the ``zarr.json`` of each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import cast

from dspark_store.format.codecs import CODEC_PRESETS, CodecChain, plain_chain, state_chain, token_chain
from dspark_store.format.dtypes import INT8, CacheDtype, cache_dtype
from dspark_store.format.grid import ShardGrid
from dspark_store.format.int8 import AIMS, MOST_WIDTH, LayerScale, code_width
from dspark_store.format.jsonvalue import MOST_COUNTED, JsonFields, JsonValue, shown
from dspark_store.format.shard import LEAST_LAYER, Place

IDS, MASK = "input_ids", "loss_mask"
LAYERS, LAST = "target_hidden_states", "target_last_hidden_states"
COLUMNS = (IDS, MASK, LAYERS, LAST)
"""The columns of a store, which are also the cache keys of its samples."""
EMBED, HEAD, HEAD_BIAS = "target/embed_tokens/weight", "target/lm_head/weight", "target/lm_head/bias"
WEIGHTS = (EMBED, HEAD, HEAD_BIAS)
TOKEN_LEDGER, STATE_LEDGER = "ledger/tokens", "ledger/states"
SOURCE_CURSOR = "source_cursor"
TOKEN_OBJECTS = (IDS, MASK, SOURCE_CURSOR)
INDEX_LENGTH, INDEX_SUPERVISED, INDEX_DIGEST = "index/length", "index/supervised", "index/digest"
INDEX_SOURCE = "index/source"
INDEX_STATUS, INDEX_OBJECTS = "index/status", "index/objects"
SHARD_SOURCES = "ledger/sources"
"""The number of each row's source, by shard: what `index/source` is made of when the tokens are final."""
ID_FILL, MASK_FILL, STATUS_FILL, SOURCE_FILL = -1, 255, 255, 65535
NO_RECORD = 2**64 - 1
_WEIGHT_CHUNK_BYTES = 4 * 1024 * 1024
MOST_IDS = 2**31 - 1
"""Token ids, and so rows of a vocabulary: int32."""
MOST_LAYERS = 1024
MOST_CHUNKS = 2**22
"""Chunks that one object has room for: its index is read whole."""
MOST_CHUNK_BYTES = 2**31 - 1
"""Of a decoded chunk: no codec of the presets takes more."""
MOST_SHARD_TOKENS = 2**28
"""Positions that the token objects of a shard have room for: they are checked whole."""
_INDEX_CODECS: list[JsonValue] = plain_chain(8).metadata()


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array: everything its ``zarr.json`` says. ``inner`` is the chunk inside a shard, None when unsharded."""

    shape: tuple[int, ...]
    data_type: str
    fill_value: int | str
    chunk: tuple[int, ...]
    inner: tuple[int, ...] | None
    chain: CodecChain
    dimensions: tuple[str, ...]
    attributes: Mapping[str, JsonValue]

    def document(self) -> dict[str, JsonValue]:
        """Return the array's Zarr v3 metadata."""
        codecs = self.chain.metadata()
        if self.inner is not None:
            configuration: dict[str, JsonValue] = {
                "chunk_shape": list(self.inner),
                "codecs": codecs,
                "index_codecs": _INDEX_CODECS,
                "index_location": "end",
            }
            codecs = [{"name": "sharding_indexed", "configuration": configuration}]
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.data_type,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": self.fill_value,
            "codecs": codecs,
            "attributes": dict(self.attributes),
            "dimension_names": list(self.dimensions),
            "storage_transformers": [],
        }


def group_document(attributes: Mapping[str, JsonValue] | None = None) -> dict[str, JsonValue]:
    """Return a group's Zarr v3 metadata."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes or {})}


def metadata_bytes(document: Mapping[str, JsonValue]) -> bytes:
    """Return the text of a ``zarr.json``."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def object_key(column: str, shard: int, slot: int = 0) -> str:
    """Return the key of a column's object: ``target_hidden_states/c.12.0.3`` for layer slot 3 of shard 12."""
    return f"{column}/c.{shard}.0" if column in (IDS, MASK) else f"{column}/c.{shard}.0.{slot}"


@dataclass(frozen=True, slots=True)
class StateObject:
    """One object that a shard has of a column: its slot on the layer axis and the layer's id, 0 and None without."""

    column: str
    slot: int
    layer_id: int | None

    @property
    def name(self) -> str:
        """The object's name in the ledger's attribute ``objects``."""
        return f"{self.column}/{self.slot}" if self.column == LAYERS else self.column

    def key(self, shard: int) -> str:
        """Return the key of the object in a shard."""
        return object_key(self.column, shard, self.slot)

    def place(self, shard: int) -> Place:
        """Return the place that the object's trailer names."""
        return Place(self.column, self.slot, self.layer_id, shard)


@dataclass(frozen=True, slots=True)
class StoreSchema:
    """The shape of a store. ``num_samples`` is 0 until the token phase (or a manifest) settles it.

    ``num_layers`` captured layers of ``hidden_size`` features; ``layer_ids`` names them, and is empty until a manifest
    does; ``chunk_tokens`` positions a chunk of a state column; ``codec`` a preset. ``sources`` names the parts of a
    blend, in the order of their numbers, where there are two or more: only then does the store say which part each
    sample came from. ``dtype`` is what reading gives. ``mantissa_bits`` of 7 are kept of bf16 states, all where it is
    None. States are stored as they are, or as codes of the name ``int8``; ``scales`` has what they were made by, for
    each of the state objects, once the store is calibrated.
    """

    num_samples: int
    shard_size: int
    seq_length: int
    hidden_size: int
    num_layers: int
    layer_ids: tuple[int, ...]
    dtype: CacheDtype
    codec: str
    chunk_tokens: int
    sources: tuple[str, ...] = ()
    mantissa_bits: int | None = None
    int8: str | None = None
    scales: tuple[LayerScale, ...] = ()

    def __post_init__(self) -> None:
        if len(self.sources) == 1 or len(self.sources) > SOURCE_FILL:
            raise ValueError(f"a store has no or 2 to {SOURCE_FILL} named sources, got {len(self.sources)}")
        if len(set(self.sources)) < len(self.sources):
            raise ValueError(f"the sources of a store must have different names, got {', '.join(self.sources)}")
        if self.mantissa_bits is not None and not (1 <= self.mantissa_bits <= 6 and self.dtype.name == "bf16"):
            raise ValueError(f"mantissa_bits must be 1 to 6 of bf16, got {self.mantissa_bits} of {self.dtype.name}")
        self._check_bounds()

    def _check_bounds(self) -> None:
        """Raise ValueError for sizes that no array can have, or that no reader could hold one chunk or index of."""
        if self.layer_ids and len(self.layer_ids) != self.num_layers:
            raise ValueError(f"num_layers is {self.num_layers}, but layer_ids names {len(self.layer_ids)}")
        if self.int8 is not None:
            self._check_codes()
        itemsize, states = self.dtype.itemsize, self.states
        bounds = {
            "num_layers": (self.num_layers, MOST_LAYERS),
            "chunk_tokens x hidden_size in bytes": (self.chunk_tokens * self.hidden_size * itemsize, MOST_CHUNK_BYTES),
            "shard_size x chunks in seq_length": (states.slots, MOST_CHUNKS),
            "shard_size x seq_length": (self.shard_size * self.seq_length, MOST_SHARD_TOKENS),
            "bytes of a column": (
                max(1, states.num_shards)
                * (self.shard_size * states.padded_length * self.hidden_size * max(1, self.num_layers) * itemsize),
                MOST_COUNTED,
            ),
        }
        for name, (value, most) in bounds.items():
            if value > most:
                raise ValueError(f"{name} is {value:,}, the format allows at most {most:,}")

    def _check_codes(self) -> None:
        if self.int8 not in AIMS or self.dtype.name != "bf16" or self.mantissa_bits is not None:
            raise ValueError(f"state_dtype {self.int8} of {self.values} is unknown; bf16 has {', '.join(AIMS)}")
        if self.hidden_size > MOST_WIDTH:
            raise ValueError(f"hidden_size is {self.hidden_size:,}, {self.int8} has at most {MOST_WIDTH:,}")
        if self.scales and len(self.scales) != self.num_layers + 1:
            raise ValueError(f"{len(self.scales)} scales are not those of {self.num_layers} layers and the last states")

    @property
    def state_dtype(self) -> str:
        """What states are stored as: the name of the cache dtype, or of the codes."""
        return self.int8 or self.dtype.name

    @property
    def features(self) -> tuple[str, ...]:
        """What a reader must know beyond version 1 of the format, by name."""
        return () if self.int8 is None else ("int8",)

    @property
    def calibrated(self) -> bool:
        """Whether states can be stored: always, but as codes only once it is known how."""
        return self.int8 is None or bool(self.scales)

    @property
    def stored(self) -> StoreSchema:
        """The shape of what is stored: of codes, a store with their width and the dtype of their bytes."""
        return self if self.int8 is None else _shape_of_codes(self)

    def scale(self, column: str, slot: int) -> LayerScale:
        """Return what the codes of a state object were made by; ValueError before the store is calibrated."""
        if not self.scales:
            raise ValueError(f"the store of {self.int8} states is not calibrated yet")
        return self.scales[self.num_layers if column == LAST else slot]

    @property
    def tokens(self) -> ShardGrid:
        """The grid of the token columns: a sample is one chunk."""
        return ShardGrid(self.num_samples, self.shard_size, self.seq_length, self.seq_length)

    @property
    def states(self) -> ShardGrid:
        """The grid of the state columns."""
        return ShardGrid(self.num_samples, self.shard_size, self.seq_length, self.chunk_tokens)

    @property
    def state_objects(self) -> tuple[StateObject, ...]:
        """The objects of a shard's states, in ledger order: the captured layers, then the last hidden states."""
        layers = [StateObject(LAYERS, slot, self.layer_id(slot)) for slot in range(self.num_layers)]
        return (*layers, StateObject(LAST, 0, None))

    def layer_id(self, slot: int) -> int | None:
        """Return the layer id in a slot; None while no manifest has named the layers."""
        return self.layer_ids[slot] if self.layer_ids else None

    def chain(self, column: str) -> CodecChain:
        """Return the codec chain of a column, or of the rows' sources."""
        if column == SHARD_SOURCES:
            return plain_chain(2)
        if column in (IDS, MASK):
            return token_chain(self.codec, 4 if column == IDS else 1)
        return state_chain(self.codec, self.stored.dtype.itemsize)

    def layout(self) -> dict[str, JsonValue]:
        """Return the schema as the attribute ``layout``."""
        layout = {each.name: getattr(self, each.name) for each in fields(self)}
        layout |= {"layer_ids": list(self.layer_ids), "dtype": self.dtype.name, "sources": list(self.sources)}
        layout |= {
            "state_dtype": layout.pop("int8"),
            "calibration": [scale.to_json() for scale in layout.pop("scales")],
        }
        optional = ("sources", "mantissa_bits", "state_dtype", "calibration")
        return {name: value for name, value in layout.items() if value or name not in optional}

    @property
    def values(self) -> str:
        """What the values of states are, in words."""
        if self.int8 is not None:
            errors = [scale.error for scale in self.scales]
            told = f", {min(errors):.1%} to {max(errors):.1%} off by layer" if errors else ""
            widened = max((scale.widened for scale in self.scales), default=0.0)
            told += f", {widened:.1%} of a layer's tokens widened" if widened else ""
            return f"{self.dtype.name} from {self.int8} (lossy{told})"
        kept = self.mantissa_bits
        return self.dtype.name if kept is None else f"{self.dtype.name} rounded to {kept} of 7 mantissa bits (lossy)"

    def stored_as(self, state_dtype: str) -> StoreSchema:
        """Return the schema with states stored as a cache dtype, or as codes that are still to be calibrated."""
        codes = state_dtype in AIMS
        dtype = cache_dtype("bf16" if codes else state_dtype)
        return replace(self, dtype=dtype, int8=state_dtype if codes else None, scales=())

    def with_scales(self, scales: Mapping[str, LayerScale]) -> StoreSchema:
        """Return the schema calibrated: the scales of the state objects by their names."""
        return replace(self, scales=tuple(scales[item.name] for item in self.state_objects))

    def settled(self, num_samples: int) -> StoreSchema:
        """Return the schema with its final number of samples."""
        return replace(self, num_samples=num_samples)

    def columns(self) -> dict[str, ArraySpec]:
        """Return the four columns by path."""
        n, seq, width, dtype = self.num_samples, self.seq_length, self.stored.hidden_size, self.stored.dtype
        shard = (self.shard_size, self.states.padded_length, width)
        inner = (1, self.chunk_tokens, width)
        logical: dict[str, JsonValue] = {"dtype": self.dtype.logical}
        layered: dict[str, JsonValue] = {**logical, "layer_ids": list(self.layer_ids)}
        if self.int8 is not None:
            *layers, last = [list(scale.high_channels) for scale in self.scales] or [[]]
            layered |= {"state_dtype": self.int8, "high_channels": cast(JsonValue, layers)}
            logical |= {"state_dtype": self.int8, "high_channels": cast(JsonValue, last)}
        axes = ("layer_feature", "feature") if self.int8 is None else ("layer_code", "code")
        stored = (dtype.zarr_name, dtype.fill_value, shard, inner, self.chain(LAST))
        position = ("sample", "position")
        tokens = ((self.shard_size, seq), (1, seq))
        return {
            IDS: ArraySpec((n, seq), "int32", ID_FILL, *tokens, self.chain(IDS), position, {}),
            MASK: ArraySpec((n, seq), "uint8", MASK_FILL, *tokens, self.chain(MASK), position, {}),
            LAYERS: ArraySpec((n, seq, self.num_layers * width), *stored, (*position, axes[0]), layered),
            LAST: ArraySpec((n, seq, width), *stored, (*position, axes[1]), logical),
        }

    def ledgers(self) -> dict[str, ArraySpec]:
        """Return the two ledgers by path, and the rows' sources where there are several."""
        shards = self.tokens.num_shards
        ledgers = {
            TOKEN_LEDGER: _ledger_spec(shards, TOKEN_OBJECTS, "token_object", whole=False),
            STATE_LEDGER: _ledger_spec(shards, [item.name for item in self.state_objects], "state_object", whole=False),
        }
        if self.sources:
            row = (1, self.shard_size)
            ledgers[SHARD_SOURCES] = ArraySpec(
                (shards, row[1]), "uint16", SOURCE_FILL, row, row, self.chain(SHARD_SOURCES), ("shard", "row"), {}
            )
        return ledgers

    def token_index(self) -> dict[str, ArraySpec]:
        """Return the index arrays that are written when the tokens are done."""
        n = self.num_samples
        index = {
            INDEX_LENGTH: _index_spec((n,), "int32", -1, ("sample",)),
            INDEX_SUPERVISED: _index_spec((n,), "int32", -1, ("sample",)),
            INDEX_DIGEST: _index_spec((n, 2), "uint64", 0, ("sample", "digest_word")),
        }
        if self.sources:
            index[INDEX_SOURCE] = _index_spec((n,), "uint16", SOURCE_FILL, ("sample",))
        return index

    def final_index(self) -> dict[str, ArraySpec]:
        """Return the index arrays that are written when the store completes."""
        names = [*TOKEN_OBJECTS, *(item.name for item in self.state_objects)]
        return {
            INDEX_STATUS: _index_spec((self.num_samples,), "uint8", STATUS_FILL, ("sample",)),
            INDEX_OBJECTS: _ledger_spec(self.tokens.num_shards, names, "object", whole=True),
        }

    def weights(self, shape: Sequence[int]) -> ArraySpec:
        """Return the array of a target table: (V, H) in chunks of about 4 MiB, or a head's bias (V,)."""
        width = shape[1] if len(shape) > 1 else 1
        rows = max(1, min(shape[0], _WEIGHT_CHUNK_BYTES // (width * self.dtype.itemsize)))
        return ArraySpec(
            tuple(shape),
            self.dtype.zarr_name,
            self.dtype.fill_value,
            (rows, *shape[1:]),
            None,
            state_chain(self.codec, self.dtype.itemsize),
            ("vocab", "feature")[: len(shape)],
            {"dtype": self.dtype.logical},
        )


@lru_cache(maxsize=64)
def _shape_of_codes(schema: StoreSchema) -> StoreSchema:
    return replace(schema, hidden_size=code_width(schema.hidden_size), dtype=INT8, int8=None, scales=())


def parse_layout(layout: Mapping[str, JsonValue]) -> StoreSchema:
    """Read the attribute ``layout``; ValueError when it is not one."""
    given = JsonFields(layout, "layout")
    if (codec := given.text("codec")) not in CODEC_PRESETS:
        raise ValueError(f"codec {shown(codec)} is unknown; expected one of {', '.join(CODEC_PRESETS)}")
    int8 = given.text("state_dtype") if given.has("state_dtype") else None
    scales = given.items("calibration") if given.has("calibration") and int8 else ()
    width = given.count("hidden_size", 1)
    return StoreSchema(
        num_samples=given.count("num_samples"),
        shard_size=given.count("shard_size", 1),
        seq_length=given.count("seq_length", 1),
        hidden_size=width,
        num_layers=given.count("num_layers"),
        layer_ids=given.counts("layer_ids", LEAST_LAYER, MOST_LAYERS),
        dtype=cache_dtype(given.text("dtype")),
        codec=codec,
        chunk_tokens=given.count("chunk_tokens", 1),
        sources=given.texts("sources") if given.has("sources") else (),
        mantissa_bits=given.count("mantissa_bits", 1, 6) if given.has("mantissa_bits") else None,
        int8=int8,
        scales=tuple(LayerScale.from_json(JsonFields.of(item, "calibration"), width) for item in scales),
    )


def _index_spec(shape: tuple[int, ...], data_type: str, fill: int, dimensions: tuple[str, ...]) -> ArraySpec:
    chunk = (max(1, shape[0]), *shape[1:])
    itemsize = {"int32": 4, "uint64": 8, "uint16": 2, "uint8": 1}[data_type]
    return ArraySpec(shape, data_type, fill, chunk, None, plain_chain(itemsize), dimensions, {})


def _ledger_spec(shards: int, objects: Sequence[str], dimension: str, *, whole: bool) -> ArraySpec:
    """``dimension`` names the axis of objects: xarray refuses one name with two sizes in a group."""
    shape = (shards, len(objects), 2)
    chunk = (max(1, shards) if whole else 1, *shape[1:])
    names: dict[str, JsonValue] = {"objects": list(objects)}
    return ArraySpec(shape, "uint64", NO_RECORD, chunk, None, plain_chain(8), ("shard", dimension, "field"), names)
