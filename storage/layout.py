"""The store's contract: which arrays there are, how they are chunked, and the one document that commits rows.

    NAME.zarr/          attributes: schema version, problem, provenance, checksum; the shapes of all arrays
      runs/             x (N, d1)   t (N, d2)   z (N, d_out)   [run (N, 1)]   one row-chunking for all of them
      observations/     x (n, d1)   y (n, d_out)   [noise (n, d_out)]  likewise

All metadata stand inline in the root's `zarr.json` (Zarr's consolidated metadata), which is what zarr-python and
xarray read. Replacing that one file commits rows of all arrays of a table at once, so that no reader ever sees
half a row. The arrays' own `zarr.json` follow after the commit.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from storage import documents
from storage.errors import StoreError
from storage.problem import Column, Problem, Variable

# 1: the first. 2: the same with numbers of runs. 3: the root document carries a checksum of itself, which versions
# that know only the others would leave behind when they append; an append makes 3 of the others.
SCHEMA, READ = 3, (1, 2, 3)
WITH_CHECKSUM = 3
ROOT = "zarr.json"
TABLES = {"runs": ("x", "t", "z", "run"), "observations": ("x", "y", "noise")}
ROW_DIMENSION = {"runs": "run", "observations": "observation"}
# An array's columns are a labelled dimension: the label array of the same name makes them a coordinate in xarray.
COLUMN_DIMENSION = {
    "x": "control_input",
    "t": "calibration_input",
    "z": "output",
    "run": "identity",
    "y": "output",
    "noise": "output",
}
OPTIONAL = {"runs": "run", "observations": "noise"}  # the array that a table has if its first rows had it
DTYPES = {"run": "float64"}  # of arrays that do not have the store's type: a run's number must be exact
MEANING = {
    "x": "control inputs",
    "t": "calibration inputs",
    "z": "simulator outputs",
    "y": "observed outputs",
    "run": "number of the simulator run that a row belongs to",
    "noise": "standard deviation of the observation noise",
}
BLOCK_BYTES = 2 << 20  # of one row-chunk over all arrays of a table: large enough to read fast, small enough to shuffle
MANY_BLOCKS = 64  # a table should have this many blocks, so that they can be dealt to many processes
LEAST_ROWS = 1024  # of a chunk chosen for the user


def columns(problem: Problem, table: str) -> dict[str, tuple[Column, ...]]:
    """The columns of a table's arrays, in their order on disk and in a packed row."""
    return problem.runs_columns if table == "runs" else problem.observations_columns


def add_optional(members: dict[str, dict[str, Any]], table: str) -> None:
    """Adds the metadata of a table's optional array, which has the chunks of the other arrays, to those of all."""
    array = OPTIONAL[table]
    found = copy.deepcopy(members[f"{table}/{'z' if table == 'runs' else 'y'}"])
    found["attributes"]["long_name"] = MEANING[array]
    found["dimension_names"][1] = COLUMN_DIMENSION[array]
    found["data_type"] = DTYPES.get(array, found["data_type"])
    if array == "run":
        _set_width(found, 1)
    # zarr 3 loses the members of a group that do not stand next to each other, hence in the order of the tables.
    everything = {**members, f"{table}/{array}": found}
    members.clear()
    for name in TABLES:
        members |= {path: metadata for path, metadata in everything.items() if path.split("/")[0] == name}


def _set_width(metadata: dict[str, Any], width: int) -> None:
    metadata["shape"][1] = metadata["chunk_grid"]["configuration"]["chunk_shape"][1] = width
    for codec in metadata["codecs"]:
        if codec["name"] == "sharding_indexed":
            codec["configuration"]["chunk_shape"][1] = width


def default_chunk_rows(row_bytes: int, expected_rows: int | None) -> int:
    """Rows of a chunk: about BLOCK_BYTES, fewer where that would leave fewer than MANY_BLOCKS blocks."""
    rows = max(1, BLOCK_BYTES // row_bytes)
    if expected_rows is not None:
        rows = min(rows, max(LEAST_ROWS, expected_rows // MANY_BLOCKS))
    return int(2 ** (rows.bit_length() - 1))


def chunk_key(table: str, array: str, index: int) -> str:
    """The file of one chunk (or shard); names are flat, so that a chunk costs one directory entry."""
    return f"{table}/{array}/c.{index}.0"


def array_metadata(
    table: str,
    array: str,
    names: list[str],
    *,
    dtype: str,
    compression: str,
    chunk_rows: int,
    shard_rows: int | None,
) -> dict[str, Any]:
    """The Zarr v3 metadata of an empty array of this contract."""
    width = len(names)
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if compression == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": 3, "checksum": False}})
    codecs.append({"name": "crc32c"})
    if shard_rows is not None:
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        inner = {"chunk_shape": [chunk_rows, width], "codecs": codecs, "index_codecs": index, "index_location": "end"}
        codecs = [{"name": "sharding_indexed", "configuration": inner}]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [0, width],
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard_rows or chunk_rows, width]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": "NaN",
        "codecs": codecs,
        "attributes": {"long_name": MEANING[array]},
        "dimension_names": [ROW_DIMENSION[table], COLUMN_DIMENSION[array]],
        "storage_transformers": [],
    }


def labelled(problem: Problem) -> dict[str, Sequence[Variable]]:
    """What the labelled dimensions run over."""
    return {
        "control_input": problem.control_inputs,
        "calibration_input": problem.calibration_inputs,
        "output": problem.outputs,
    }


def label_metadata(dimension: str, problem: Problem) -> dict[str, Any]:
    """The metadata of the names along a dimension, with the units and descriptions that belong to them."""
    variables = labelled(problem)[dimension]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [len(variables)],
        "data_type": "string",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [len(variables)]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": "",
        "codecs": [{"name": "vlen-utf8", "configuration": {}}, {"name": "crc32c"}],
        "attributes": {
            "units": [v.unit for v in variables],
            "description": [v.description for v in variables],
        },
        "dimension_names": [dimension],
        "storage_transformers": [],
    }


def group_metadata() -> dict[str, Any]:
    """The metadata of a group without attributes."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {}}


def root_document(problem: Problem, provenance: dict[str, Any], members: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The document that makes a store: attributes, and the metadata of every member inline."""
    vcal = {"schema": SCHEMA, "problem": problem.model_dump(mode="json"), "provenance": provenance}
    return {
        **group_metadata(),
        "attributes": {"title": problem.name, "vcal": vcal},
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": members},
    }


def parse_root(data: bytes, url: str) -> dict[str, Any]:
    """The root document of a store of a known schema, or an error that says what was found instead."""
    document = documents.parse(data, f"{url}/{ROOT}", StoreError, "restore it from a copy, or ingest the data again")
    try:
        schema = document["attributes"]["vcal"]["schema"]
    except (KeyError, TypeError):
        raise StoreError(
            f"{url} is not a vcal store (its {ROOT} does not say so); make one with 'vcal ingest' or storage.create"
        ) from None
    if type(schema) is not int or schema not in READ:
        raise StoreError(
            f"{url} has the store schema {schema!r}, this version reads {', '.join(map(str, READ))}; "
            + ("upgrade vcal-dist" if isinstance(schema, int) and schema > SCHEMA else "ingest the data again")
        )
    if has_checksum(document) and document["attributes"]["vcal"].get(documents.CHECKSUM) != _checksum(document):
        raise StoreError(
            f"{url}/{ROOT} does not match its checksum: problem, priors, numbers of rows or provenance were changed "
            "after they were written; restore it from a copy, or ingest the rows and the problem into a new store"
        )
    return dict(document)


def has_checksum(document: dict[str, Any]) -> bool:
    """Whether the document was written with a checksum of itself."""
    return bool(document["attributes"]["vcal"]["schema"] >= WITH_CHECKSUM)


def seal(document: dict[str, Any]) -> None:
    """Makes the document one of this schema, with a checksum of all that it says now."""
    document["attributes"]["vcal"]["schema"] = SCHEMA
    document["attributes"]["vcal"][documents.CHECKSUM] = _checksum(document)


def _checksum(document: dict[str, Any]) -> str:
    attributes = document["attributes"]
    vcal = {key: value for key, value in attributes["vcal"].items() if key != documents.CHECKSUM}
    return documents.checksum({**document, "attributes": {**attributes, "vcal": vcal}})


def members(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The inline metadata of a store's groups and arrays, by path."""
    found: dict[str, dict[str, Any]] = document["consolidated_metadata"]["metadata"]
    return found


def to_bytes(document: dict[str, Any]) -> bytes:
    """A metadata document as it is written."""
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False).encode()
