"""The logit lens: what a model would say after each of its layers, as one HTML file that needs nothing else.

The residual stream behind a layer goes through the model's final norm and head, in float32, as if no layer followed
("interpreting GPT: the logit lens", nostalgebraist, 2020).
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eaas.gateway.dashboard.board import listed, many, share, visible
from eaas.gateway.dashboard.compose import drift_of
from eaas.model.loader import load_spec, load_weights
from eaas.model.tokenizer import Tokenizer
from eaas.ops.top_picture import bars
from eaas.worker.views import gate_entropy
from experts.checkpoint import Checkpoint, SafetensorsFile
from experts.kernels import from_dtype

_BEST = 5
_AT_ONCE = 64  # rows of logits: 39 MB of a vocabulary of 152,000
_BARS = 48
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Logit lens</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body {{ font: 13px/1.4 system-ui, sans-serif; color: #1a2530; background: #fff; }}
table {{ border-collapse: collapse; font-size: 12px; }}
th {{ font-weight: 500; color: #5b6a78; text-align: right; padding: 1px 6px; }}
td {{ padding: 1px 5px; white-space: pre; border: 1px solid #fff; background: rgb(79 176 255 / var(--p, 0)); }}
small {{ color: #44525f; }}
</style>
<h1>Logit lens</h1>
{body}
</html>
"""


class LogitLensRefused(ValueError):
    """The files are not what this report is made of; the text says what is needed."""


class Row(NamedTuple):
    """A token of a request that was recorded. at: of a file, its row."""

    request: str
    position: int
    token: int
    file: SafetensorsFile
    at: int


def logit_lens(folder: Path, model: Path, out: Path, most_rows: int) -> None:
    """Write the report of an inspection's files, of its first `most_rows` rows, to `out`, for its owner's eyes alone.
    Raises LogitLensRefused: there are no files, or they hold no rows, or not those of this model; or nothing can be
    written there. CheckpointInvalid: a file of the inspection or of the model is unreadable."""
    if not folder.is_dir():
        raise LogitLensRefused(f"There is no folder {folder}. Give that of an inspection, which its start said.")
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise LogitLensRefused(f"{out} cannot be written. Give --out a file in a folder that exists and is yours.")
    files = [SafetensorsFile(path) for path in sorted(folder.rglob("part-*.safetensors"))]
    checkpoint = Checkpoint.open(model)
    rows = _rows(folder, files, checkpoint)
    taps = {name for file in files for name in file.entries}
    residuals, gates = (_layers(taps, kind) for kind in ("residual", "gate"))
    if not residuals and not gates:
        raise LogitLensRefused(
            f"{folder} has {listed(sorted(taps))}; residuals or gates are needed. Record again with "
            "the taps layers.*.residual and layers.*.gate."
        )
    shown = rows[:most_rows]
    tokenizer, spec = Tokenizer.load(model), load_spec(checkpoint)

    def text(token: int) -> str:
        return html.escape(visible(tokenizer.token_text(token)) or f"#{token}")

    parts = [f"<p>{len(shown)} of {many(len(rows), 'recorded row')} of {html.escape(str(folder))}.</p>"]
    if residuals:
        last = "embed" if spec.tie_embeddings else "head"
        weights = load_weights(checkpoint, spec, ("final_norm", last))
        norm, head = from_dtype(weights["final_norm"]), from_dtype(weights[last])
        following = {(row.request, row.position): row.token for row in rows}

        def cells(layer: int) -> list[str]:
            made = ["<td>"] * len(shown)
            for places, x in _recorded(shown, f"layers.{layer}.residual", len(norm)):
                logits = (x / np.sqrt((x * x).mean(axis=1, keepdims=True) + spec.eps) * norm) @ head.T
                for place, each in zip(places, logits, strict=True):
                    came = following.get((shown[place].request, shown[place].position + 1))
                    made[place] = _cell(each, came, text)
            return made

        parts += _tables(shown, {layer: cells(layer) for layer in residuals}, text)
    if gates:
        parts += _entropies(shown, gates, spec.moe.experts)
    # What was asked is in it, as in the files.
    out.touch(0o600)
    if out.is_file():
        out.chmod(0o600)
    out.write_text(_PAGE.format(body="\n".join(parts)), encoding="utf-8")


def _rows(folder: Path, files: Iterable[SafetensorsFile], checkpoint: Checkpoint) -> list[Row]:
    """All rows, by request and position. One that was computed twice is there once."""
    found: dict[tuple[str, int], Row] = {}
    for file in files:
        told: Mapping[str, str] = json.loads(file.header).get("__metadata__") or {}
        lacking = sorted({"request", "position", "token"} - file.entries.keys())
        if lacking or "requests" not in told:
            raise LogitLensRefused(f"{file.path} lacks {', '.join(lacking or ['requests'])}: no inspection wrote it.")
        if told.get("keep") != "rows":
            raise LogitLensRefused(
                f"{file.path} holds {told.get('keep')} of rows; the rows themselves are needed. Record again and "
                "keep rows."
            )
        recorded = told.get("checkpoint", "")
        if recorded and recorded != checkpoint.fingerprint:
            raise LogitLensRefused(
                f"{file.path} is of the model {told['model']}, checkpoint {recorded[:16]}; {checkpoint.directory} is "
                f"checkpoint {checkpoint.fingerprint[:16]}. Give the one that was served: --model FOLDER."
            )
        names = json.loads(told["requests"])
        columns = (file.tensor(name).tolist() for name in ("request", "position", "token"))
        for at, (request, position, token) in enumerate(zip(*columns, strict=True)):
            found[names[request], position] = Row(names[request], position, token, file, at)
    if not found:
        raise LogitLensRefused(
            f"{folder} holds no rows in files part-*.safetensors; those of an inspection with the sink safetensors are "
            "needed. Give its folder."
        )
    order: dict[str, int] = {}
    for request, _ in found:
        order.setdefault(request, len(order))
    return sorted(found.values(), key=lambda row: (order[row.request], row.position))


def _layers(taps: Iterable[str], kind: str) -> list[int]:
    found = (re.fullmatch(rf"layers\.(\d+)\.{kind}", name) for name in taps)
    return sorted(int(match[1]) for match in found if match)


def _recorded(rows: Sequence[Row], name: str, width: int) -> Iterator[tuple[list[int], np.ndarray]]:
    """Those whose files have this tap, some at a time: places of them, and what was recorded, [n, width]."""
    tensors = {file: file.tensor(name) for file in {row.file for row in rows} if name in file.entries}
    having = [place for place, row in enumerate(rows) if row.file in tensors]
    for start in range(0, len(having), _AT_ONCE):
        places = having[start : start + _AT_ONCE]
        x = np.stack([tensors[rows[place].file][rows[place].at] for place in places])
        if x.shape[1] != width:
            raise LogitLensRefused(f"{name} is {x.shape[1]} wide, the model {width}. Give the one that was served.")
        yield places, x


def _cell(logits: np.ndarray, came: int | None, text: Callable[[int], str]) -> str:
    best = np.argpartition(-logits, _BEST)[:_BEST]
    best = best[np.argsort(-logits[best])].tolist()
    scores = np.exp(logits - logits[best[0]])
    parts = (scores[best] / scores.sum()).tolist()
    title = "&#10;".join(f"{text(token)} {part:.2%}" for token, part in zip(best, parts, strict=True))
    rank = "" if came is None else f" #{(logits > logits[came]).sum() + 1}"
    return f'<td style="--p:{parts[0]:.2f}" title="{title}">{text(best[0])} <small>{share(parts[0])}{rank}</small>'


def _tables(rows: Sequence[Row], cells: Mapping[int, Sequence[str]], text: Callable[[int], str]) -> Iterator[str]:
    yield "<p>What the model would say next after each layer, its probability, and the rank of what came.</p>"
    heads = "".join(f"<th>layer {layer}" for layer in cells)
    for request, places in groupby(range(len(rows)), key=lambda place: rows[place].request):
        yield f"<h2>{html.escape(request)}</h2><table><tr><th>position<th>token{heads}"
        for place in places:
            row = "".join(of_layer[place] for of_layer in cells.values())
            yield f"<tr><th>{rows[place].position}<th>{text(rows[place].token)}{row}"
        yield "</table>"


def _entropies(rows: Sequence[Row], layers: Iterable[int], experts: int) -> Iterator[str]:
    yield "<h2>Gate entropy</h2><p>Of the greatest possible, by position; drift is the last quarter less the first.</p>"
    yield "<table><tr><th>layer<th>by position<th>mean<th>drift"
    for layer in layers:
        by_place: list[tuple[int, float]] = []
        for places, logits in _recorded(rows, f"layers.{layer}.gate", experts):
            by_place += zip((rows[place].position for place in places), gate_entropy(logits).tolist(), strict=True)
        found = [value for _, value in sorted(by_place) if np.isfinite(value)]
        means = [float(part.mean()) for part in np.array_split(found, _BARS) if len(part)]
        mean, drift = float(np.mean(found)) if found else None, drift_of(found)
        shown = "–" if drift is None else f"{100 * drift:+.1f} points"
        yield f"<tr><th>{layer}<td>{bars(means)}<td>{share(mean)}<td>{shown}"
    yield "</table>"
