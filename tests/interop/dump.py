"""Reads stores with one stock implementation and writes what it saw; run as a program that never meets this package.

``python -I dump.py IMPLEMENTATION OUT STORE...`` writes OUT/<store's name>.npz: every array by its path.
"""

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

type Arrays = dict[str, np.ndarray]

COLUMNS = ("input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states")


def read_zarr(store: Path) -> Arrays:
    import zarr

    group = zarr.open_group(store, mode="r")
    str(group.tree())
    members: dict[str, Any] = dict(group.members(max_depth=None))
    arrays = {path: np.asarray(node[...]) for path, node in members.items() if isinstance(node, zarr.Array)}
    sample = arrays["target_hidden_states"].shape[0] - 1
    one = np.asarray(members["target_hidden_states"][sample : sample + 1])
    if not np.array_equal(one.view(np.uint8), arrays["target_hidden_states"][sample:].view(np.uint8)):
        raise SystemExit("one sample differs from the same sample in the whole array")
    return arrays


def read_values(store: Path) -> Arrays:
    """Return the states of a store of int8 codes as each implementation gives them, by the lines in docs/format.md."""
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    (lines,) = [block for block in page.split("```") if "ldexp" in block]
    attributes = json.loads((store / "target_hidden_states/zarr.json").read_text())["attributes"]
    channels = attributes["high_channels"]
    found = {}
    for name, read in (("zarr", read_zarr), ("xarray", read_xarray), ("tensorstore", read_tensorstore)):
        q, layers = read(store)["target_hidden_states"], len(attributes["layer_ids"])
        width = q.shape[-1] // layers - len(channels[0]) - 1
        names: dict[str, Any] = {"np": np, "q": q, "channels": channels, "K": layers, "H": width}
        with np.errstate(over="ignore"):  # where nothing is stored
            exec(lines.removeprefix("text\n"), names)  # noqa: S102 # of our own page
        found[name] = names["x"]
    return found


def read_zarrs(store: Path) -> Arrays:
    import zarr
    import zarrs

    pipeline = f"zarrs.{zarrs.ZarrsCodecPipeline.__name__}"
    with zarr.config.set({"codec_pipeline.path": pipeline, "codec_pipeline.strict": True}):
        return read_zarr(store)


def read_tensorstore(store: Path) -> Arrays:
    import tensorstore

    arrays = {}
    for metadata in sorted(store.rglob("zarr.json")):
        if '"node_type": "array"' in metadata.read_text():
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{metadata.parent}/"}}
            arrays[metadata.parent.relative_to(store).as_posix()] = tensorstore.open(spec, read=True).result()[...]
    return {path: np.asarray(array.read().result()) for path, array in arrays.items()}


def read_xarray(store: Path) -> Arrays:
    import xarray

    columns = xarray.open_zarr(store, consolidated=False, mask_and_scale=False)
    arrays = {str(name): np.asarray(values) for name, values in columns.items()}
    tree = xarray.open_datatree(store, engine="zarr", consolidated=False, mask_and_scale=False)
    for node in tree.subtree:
        for name, values in node.data_vars.items():
            path = f"{node.path.strip('/')}/{name}".lstrip("/")
            seen = np.asarray(values)
            if path in arrays and not np.array_equal(arrays[path].view(np.uint8), seen.view(np.uint8)):
                raise SystemExit(f"open_zarr and open_datatree disagree about {path}")
            arrays[path] = seen
    return arrays


def read_dask(store: Path) -> Arrays:
    import dask.array

    return {name: np.asarray(dask.array.from_zarr(str(store), component=name).compute()) for name in COLUMNS}


READERS: Mapping[str, Callable[[Path], Arrays]] = {
    "zarr": read_zarr,
    "zarrs": read_zarrs,
    "tensorstore": read_tensorstore,
    "xarray": read_xarray,
    "dask": read_dask,
    "values": read_values,
}


def main(implementation: str, out: str, *stores: str) -> None:
    """Dump every store; a warning ends the program, whatever the interpreter's own setting."""
    with warnings.catch_warnings(action="error"):
        for store in map(Path, stores):
            arrays: dict[str, Any] = READERS[implementation](store)
            np.savez(Path(out, f"{store.name}.npz"), **arrays)
    if "dspark_store" in sys.modules:
        raise SystemExit("the package under test was imported")


if __name__ == "__main__":
    main(*sys.argv[1:])
