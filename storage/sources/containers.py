"""Files that hold named arrays: npz, HDF5, Zarr and NetCDF, opened as the same small thing.

Where a file has a group with the table's name (`runs` or `observations`, as our own store has), its arrays are taken,
otherwise the arrays at the top. NetCDF, and Zarr whose arrays all name their dimensions, are read through xarray: fill
values become NaN, packed numbers are unpacked; times stay the numbers that they are in the file.
"""

from __future__ import annotations

import contextlib
import math
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import IngestError
from storage.sources import classic_netcdf
from storage.sources.files import SourceFile

if TYPE_CHECKING:
    import xarray as xr

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class NamedArray:
    """An array of a file, not yet read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    dims: tuple[str, ...] | None  # None where the format does not name them
    labels: tuple[str, ...]  # of the last dimension, if the file has them
    read: Callable[[Slices], NDArray[Any]]

    @property
    def numeric(self) -> bool:
        """Whether it holds real numbers."""
        return self.dtype.kind in "biuf"


Arrays = dict[str, NamedArray]


@contextlib.contextmanager
def opened(file: SourceFile, table: str) -> Iterator[Arrays]:
    """The arrays of a file for a table."""
    openers = {"npz": _npz, "hdf5": _hdf5, "zarr": _zarr, "netcdf": _netcdf}
    with openers[file.format](file, table) as arrays:
        yield arrays


@contextlib.contextmanager
def _npz(file: SourceFile, table: str) -> Iterator[Arrays]:
    """An npz archive; an array of it can only be read as a whole, and is kept until the archive is closed."""
    with file.open() as stream, np.load(stream, allow_pickle=False) as archive:
        kept: dict[str, NDArray[Any]] = {}

        def read(name: str, where: Slices) -> NDArray[Any]:
            if name not in kept:
                kept[name] = archive[name]
            return kept[name][where]

        arrays: Arrays = {}
        for name in archive.files:
            shape, dtype = _npy_header(archive.zip, name, file)
            arrays[name] = NamedArray(shape, dtype, None, (), partial(read, name))
        yield arrays


def _npy_header(archive: zipfile.ZipFile, name: str, file: SourceFile) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of a member, without reading it."""
    member = f"{name}.npy" if f"{name}.npy" in archive.namelist() else name
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
        else:  # only structured arrays are written so
            return (), np.dtype(object)
    size, stored = math.prod(shape) * dtype.itemsize, archive.getinfo(member).file_size
    if size > stored:  # NumPy takes memory for what the header says
        raise IngestError(f"{file}: the array '{name}' should have {size:,} bytes and has {stored:,}; write it again")
    return shape, dtype


@contextlib.contextmanager
def _hdf5(file: SourceFile, table: str) -> Iterator[Arrays]:
    import h5py

    with contextlib.ExitStack() as stack:
        source = stack.enter_context(file.open()) if file.remote else file.url
        root = stack.enter_context(h5py.File(source, "r"))
        _refuse_elsewhere(file, root)
        group = root[table] if isinstance(root.get(table), h5py.Group) else root
        found = {name: item for name, item in group.items() if isinstance(item, h5py.Dataset)}
        yield {name: NamedArray(item.shape or (), item.dtype, None, (), _slicer(item)) for name, item in found.items()}


@contextlib.contextmanager
def _zarr(file: SourceFile, table: str) -> Iterator[Arrays]:
    import xarray as xr
    import zarr

    from storage.durable import FoundStore

    # Zarr would wait for a pipe in the place of a chunk.
    store = file.url if file.remote else FoundStore(file.url, read_only=True)
    root = zarr.open(store, mode="r")
    if not isinstance(root, zarr.Group):
        raise IngestError(f"{file}: is a single Zarr array; put it into a group under the name of its column")
    inner = table if isinstance(root.get(table), zarr.Group) else None
    group = root if inner is None else root[inner]
    assert isinstance(group, zarr.Group)
    found = dict(group.arrays())
    for name, item in found.items():
        _refuse_pickle(file, name, item)
    if found and all(_zarr_dims(item) is not None for item in found.values()):
        consolidated = root.metadata.consolidated_metadata is not None
        # Zarr v2 fills with 0 unless told otherwise; to xarray every true 0 would then be missing.
        mask = False if any(item.fill_value == 0 for item in found.values()) else None
        with xr.open_zarr(
            store,
            group=inner,
            chunks=None,
            consolidated=consolidated,
            decode_times=False,
            decode_timedelta=False,
            use_zarr_fill_value_as_mask=mask,
        ) as dataset:
            yield _dataset(dataset)
        return
    yield {name: NamedArray(item.shape, np.dtype(item.dtype), None, (), _slicer(item)) for name, item in found.items()}


def _refuse_pickle(file: SourceFile, name: str, array: Any) -> None:
    """Raises before a codec of Zarr v2 could run what a file says; labels are read even if nobody asks for them."""
    if array.metadata.zarr_format == 3:
        return
    from numcodecs.pickles import Pickle

    codecs = (*(array.metadata.filters or ()), array.metadata.compressor)
    if any(isinstance(codec, Pickle) for codec in codecs):
        raise IngestError(
            f"{file}: the array '{name}' is stored as a pickle, which can run any program; write it again as numbers "
            "or as text"
        )


def _refuse_elsewhere(file: SourceFile, root: Any) -> None:
    """Raises if a part of an HDF5 file lies in another file, which its writer chose and the user did not name."""
    import h5py

    def look(name: str, link: Any) -> tuple[str, str] | None:
        """What is found ends the visit; h5py loses an error that is raised here."""
        if isinstance(link, h5py.ExternalLink):
            return name, link.filename
        if not isinstance(link, h5py.HardLink) or root.get(name, getclass=True) is not h5py.Dataset:
            return None
        made = root[name].id.get_create_plist()
        if made.get_external_count():
            return name, made.get_external(0)[0].decode(errors="replace")
        if made.get_layout() == h5py.h5d.VIRTUAL:
            others = {made.get_virtual_filename(i) for i in range(made.get_virtual_count())} - {"."}
            return (name, min(others)) if others else None
        return None

    found = root.visititems_links(look)
    if found is not None:
        name, other = found
        raise IngestError(
            f"{file}: '{name}' lies in another file, {other}; copy everything into one file, or give that file"
        )


def _slicer(array: Any) -> Callable[[Slices], NDArray[Any]]:
    return lambda where: np.asarray(array[where])


def _zarr_dims(array: Any) -> Any:
    if array.metadata.zarr_format == 3:
        names = array.metadata.dimension_names
        return names if names is not None and None not in names else (() if array.ndim == 0 else None)
    return array.attrs.get("_ARRAY_DIMENSIONS")


@contextlib.contextmanager
def _netcdf(file: SourceFile, table: str) -> Iterator[Arrays]:
    import h5py
    import xarray as xr

    with contextlib.ExitStack() as stack:
        stream: IO[bytes] = stack.enter_context(file.open())
        classic = stream.read(3) == b"CDF"
        stream.seek(0)
        group = None
        if classic:
            classic_netcdf.check(stream, file.size())
            stream.seek(0)
        else:
            with h5py.File(stream if file.remote else file.url, "r") as root:
                _refuse_elsewhere(file, root)
                root.attrs.get("_nc3_strict")  # where these are damaged, h5netcdf leaves half an object behind
                group = table if isinstance(root.get(table), h5py.Group) else None
        dataset = xr.open_dataset(
            stream if file.remote else file.url,
            engine="scipy" if classic else "h5netcdf",
            group=group,
            decode_times=False,
            decode_timedelta=False,
        )
        yield _dataset(stack.enter_context(dataset))


def _dataset(dataset: xr.Dataset) -> Arrays:
    """The variables and coordinates of a data set; text along a dimension labels the columns of its arrays."""
    labels = {
        str(name): tuple(str(label) for label in coordinate.values)
        for name, coordinate in dataset.coords.items()
        if coordinate.dims == (name,) and coordinate.dtype.kind in "OUST"
    }
    arrays: Arrays = {}
    for name, variable in dataset.variables.items():
        dims = tuple(str(d) for d in variable.dims)
        last = labels.get(dims[-1], ()) if dims else ()
        arrays[str(name)] = NamedArray(variable.shape, variable.dtype, dims, last, _reader(variable))
    return arrays


def _reader(variable: xr.Variable) -> Callable[[Slices], NDArray[Any]]:
    # A copy of the lazy variable is sliced: xarray keeps what it has read once, which would be the whole file.
    return lambda where: np.asarray(variable[where].values)
