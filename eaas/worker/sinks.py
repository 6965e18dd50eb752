"""Where rows of an inspection go: files of safetensors or npy, an Arrow stream, or events of traced requests.

Of safetensors, a part of the rows is a file: `part-000001.safetensors`, with one tensor [rows, width] of each tap, and
`sequence` (the number of each row), `request` (its index among the metadata's "requests"), `position` and `token`. With
npy each of these is a file of its own. A file is there whole, or not at all.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eaas.worker.protocol import Inspect
from eaas.worker.taps import STATISTICS, Tap

if TYPE_CHECKING:
    from eaas.spans import WorkerSpans


class SinkUnusable(Exception):
    """There is no such sink here; the text says what is needed."""


class SinkFailed(Exception):
    """A sink takes nothing more."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows that steps recorded.

    Args:
        sequence: int64 [rows]: the number of each.
        requests: Whose each is.
        positions, tokens: int32 [rows].
        parts: Of each tap float32 [rows, width], valid until the next `Sink.flush` returns.
    """

    sequence: np.ndarray
    requests: Sequence[str]
    positions: np.ndarray
    tokens: np.ndarray
    parts: Sequence[np.ndarray]


class Sink:
    """Who is given rows, by one thread: this one keeps none, for whoever wants the views alone.

    Any of its methods may raise OSError or SinkFailed. where: in words for whoever reads them, a folder; empty where
    there is none.
    """

    where = ""

    def take(self, rows: Rows) -> None:
        """Take what was recorded."""

    def flush(self) -> None:
        """Deliver what was taken."""

    def close(self) -> None:
        """Nothing more is taken."""


class FileSink(Sink):
    """Parts of rows as files in a folder."""

    def __init__(self, folder: Path, taps: Sequence[Tap], about: Mapping[str, str], *, npy: bool) -> None:
        """Args: about: what each file says of itself. Raises SinkUnusable: the folder cannot be made."""
        self.where, self._folder, self._npy, self._about = str(folder), folder, npy, about
        self._names = [tap.name for tap in taps]
        self._rows: list[Rows] = []
        _make(folder)
        self._part = sum(1 for _ in folder.glob("part-*"))

    def take(self, rows: Rows) -> None:
        """Keep them for the next part."""
        self._rows.append(rows)

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        self._part += 1
        stem = f"part-{self._part:06}"
        names = sorted({name for one in rows for name in one.requests})
        numbers = {name: number for number, name in enumerate(names)}
        tensors = dict(_tensors(rows, numbers, self._names))
        if not self._npy:
            header = {"__metadata__": {**self._about, "requests": json.dumps(names)}}
            self._write(f"{stem}.safetensors", _safetensors(tensors, header))
            return
        for name, (kind, shape, pieces) in tensors.items():
            head = io.BytesIO()
            np.lib.format.write_array_header_1_0(head, {"descr": kind, "fortran_order": False, "shape": shape})
            self._write(f"{stem}.{name}.npy", [head.getvalue(), *pieces])
        about = {**self._about, "requests": names}
        self._write(f"{stem}.json", [json.dumps(about).encode()])

    def _write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        partial = self._folder / f".{name}.partial"
        try:
            partial.touch(0o600)
            with partial.open("wb", buffering=0) as file:
                for piece in pieces:
                    view = memoryview(piece)
                    while view.nbytes:
                        view = view[file.write(view) :]
            partial.rename(self._folder / name)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


Tensor = tuple[str, tuple[int, ...], list[memoryview]]


def _tensors(rows: Sequence[Rows], numbers: Mapping[str, int], names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Of each tensor its type as numpy names it, its shape, and its bytes in pieces."""
    sequence = np.concatenate([one.sequence for one in rows])
    request = np.array([numbers[name] for one in rows for name in one.requests])
    for name, array in (
        ("sequence", sequence.astype("<i8")),
        ("request", request.astype("<i8")),
        ("position", np.concatenate([one.positions for one in rows]).astype("<i4")),
        ("token", np.concatenate([one.tokens for one in rows]).astype("<i4")),
    ):
        yield name, (array.dtype.str, array.shape, [_bytes(array)])
    for number, name in enumerate(names):
        pieces = [one.parts[number] for one in rows]
        yield name, ("<f4", (len(sequence), pieces[0].shape[1]), [_bytes(piece) for piece in pieces])


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _safetensors(tensors: Mapping[str, Tensor], header: dict[str, Any]) -> list[bytes | memoryview]:
    kinds, at = {"<i8": "I64", "<i4": "I32", "<f4": "F32"}, 0
    pieces: list[bytes | memoryview] = []
    for name, (kind, shape, parts) in tensors.items():
        end = at + sum(part.nbytes for part in parts)
        header[name] = {"dtype": kinds[kind], "shape": shape, "data_offsets": [at, end]}
        at = end
        pieces += parts
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return [len(head).to_bytes(8, "little"), head, *pieces]


class ArrowSink(Sink):
    """An Arrow IPC stream, `records-000001.arrows`, with a row of each record."""

    def __init__(self, folder: Path, taps: Sequence[Tap], about: Mapping[str, str]) -> None:
        """Raises SinkUnusable: no pyarrow, or no folder."""
        try:
            import pyarrow
        except ImportError:
            raise SinkUnusable(
                "An Arrow stream needs pyarrow at the attention workers: pip install 'eaas[arrow]'."
            ) from None
        self.where, self._arrow = str(folder), pyarrow
        self._names = pyarrow.array([tap.name for tap in taps])
        _make(folder)
        self._schema = pyarrow.schema(
            [
                ("sequence", pyarrow.int64()),
                ("tap", pyarrow.dictionary(pyarrow.int32(), pyarrow.string())),
                ("request", pyarrow.string()),
                ("position", pyarrow.int32()),
                ("token", pyarrow.int32()),
                ("values", pyarrow.large_list(pyarrow.float32())),
            ],
            metadata=dict(about),
        )
        path = folder / f"records-{sum(1 for _ in folder.glob('records-*.arrows')) + 1:06}.arrows"
        path.touch(0o600)
        self._file = pyarrow.OSFile(str(path), "wb")
        self._stream = pyarrow.ipc.new_stream(self._file, self._schema)

    def take(self, rows: Rows) -> None:
        arrow, count, taps = self._arrow, len(rows.requests), len(rows.parts)
        widths = np.repeat([part.shape[1] for part in rows.parts], count)
        columns = [
            np.tile(rows.sequence, taps),
            arrow.DictionaryArray.from_arrays(np.repeat(np.arange(taps, dtype=np.int32), count), self._names),
            arrow.array(list(rows.requests) * taps),
            np.tile(rows.positions, taps),
            np.tile(rows.tokens, taps),
            arrow.LargeListArray.from_arrays(
                np.concatenate(([0], np.cumsum(widths))), np.concatenate([part.ravel() for part in rows.parts])
            ),
        ]
        try:
            self._stream.write_batch(
                arrow.record_batch([arrow.array(column) for column in columns], schema=self._schema)
            )
        except arrow.ArrowException as error:
            raise SinkFailed(str(error)) from None

    def flush(self) -> None:
        """What was written is there for whoever reads."""
        self._file.flush()

    def close(self) -> None:
        self._stream.close()
        self._file.close()


class SpanSink(Sink):
    """Spans below those of traced requests, about one a second, with the statistics of each tap's rows together."""

    def __init__(self, spans: WorkerSpans | None, taps: Sequence[Tap], *, statistics: bool) -> None:
        """Raises SinkUnusable: nothing is traced here, or it is not statistics that are recorded."""
        if spans is None or not statistics:
            raise SinkUnusable("The sink `spans` needs attention workers that trace (--trace-url) and statistics only.")
        self._spans, self._names = spans, [tap.name for tap in taps]

    def take(self, rows: Rows) -> None:
        """Add events; those of requests that are not traced go nowhere."""
        requests = np.array(rows.requests)
        for request in dict.fromkeys(rows.requests):
            mine = np.flatnonzero(requests == request)
            events: dict[str, dict[str, float]] = {
                name: dict[str, float](zip(STATISTICS, _together(part[mine]), strict=True))
                for name, part in zip(self._names, rows.parts, strict=True)
            }
            self._spans.add_activations(request, int(rows.positions[mine[0]]), len(mine), events)


def opened(
    below: Path, worker: str, checkpoint: str, spans: WorkerSpans | None, order: Inspect, taps: Sequence[Tap]
) -> Sink:
    """The sink that an inspection asks for. Raises SinkUnusable: there is none such here.

    Args: worker: its name and incarnation. checkpoint: fingerprint of what it serves."""
    folder = below / order.id / worker.replace("/", "-")
    about = {"inspection": order.id, "model": order.model or "", "checkpoint": checkpoint}
    about |= {"worker": worker, "keep": "statistics" if order.statistics else "rows"}
    match order.sink:
        case "arrow":
            return ArrowSink(folder, taps, about)
        case "spans":
            return SpanSink(spans, taps, statistics=order.statistics)
        case "views":
            return Sink()
        case _:
            return FileSink(folder, taps, about, npy=order.sink == "npy")


def _together(rows: np.ndarray) -> list[float]:
    """The statistics of rows as those of one. Args: rows: [rows, 4]."""
    mean, rms, most, broken = rows.astype(np.float64).T
    return [float(mean.mean()), float(np.sqrt((rms**2).mean())), float(most.max()), float(broken.sum())]


def _make(folder: Path) -> None:
    try:
        # Each with its own mode: whoever may look into a folder may look into those below.
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise SinkUnusable(f"{folder} cannot be made: {error.strerror}.") from None
