"""The terminal's picture of a board: as many lines as the screen has. Pure."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.style import Style
from rich.text import Text

from eaas.gateway.dashboard.board import (
    BAD,
    DEGRADED,
    DOWN,
    GOOD,
    INFO,
    LOST,
    MARK_GLYPHS,
    MOOD_GLYPHS,
    STATE_GLYPHS,
    VERDICT_GLYPHS,
    WARN,
    WHOLE,
    Board,
    Figure,
    GateView,
    Happening,
    Heat,
    Inspection,
    Server,
    Worker,
    number,
    share,
    short,
)

SORTS = ("number", "load", "state")
_VERDICT_STYLES = {
    WHOLE: "bold #d7f5e3 on #14532d",
    DEGRADED: "bold #fff3d1 on #7c4a03",
    DOWN: "bold #ffe4e4 on #8f1d1d",
}
_MOODS = {GOOD: "#5fd38d", INFO: "#9aa7b4", WARN: "#f2b84b", BAD: "#ff7676"}
_INK, _DIM, _RULE = "#dbe3ea", "#8b98a5", "#3d4956"
_RAMP = " ░▒▓█"
_SPARKS = "▁▂▃▄▅▆▇█"
_LABEL = 9
_TOKEN = 14
_LEAST_HAPPENINGS = 4
_LEGEND = "» took over  + gained  − gave up a copy  ✕ lost  … loads  ↓ drains  ? suspect"
# From a cell at rest to the hottest.
_COLD, _HOT = (22, 38, 54), (62, 166, 255)


@dataclass(frozen=True, kw_only=True)
class Show:
    """How to show a board. news: what the feed is doing, in words; mood of it. sort: one of SORTS. gates: what an
    inspection sees in place of the servers' heat. step: of its layers, counted on from the first, and around."""

    width: int
    height: int
    sort: str = SORTS[0]
    gates: bool = False
    step: int = 0
    news: str = "live"
    mood: str = GOOD


def draw(board: Board, show: Show) -> list[Text]:
    """Lines from top to bottom, exactly `show.height` of them, none wider than `show.width`.

    Layers of the heat map that do not fit are folded together, the busiest of them shown; happenings take what is left.
    """
    top = [_headline(board, show), *_reasons(board, show), *_gateway(board, show)]
    top += _attention(board, show, 2 if show.height < 30 else 8)
    # Title, names, busy and legend of the heat map; title of the happenings; keys.
    left = show.height - len(top) - 4 - 1 - 1
    room = left - min(_LEAST_HAPPENINGS, len(board.happenings))
    if show.gates and board.inspection is not None:
        lines = [*top, *_inspection(board.inspection, show, room + 4)]
    else:
        lines = [*top, *_heat(board.heat, show, max(1, min(board.heat.layers, room)))]
    lines += _happenings(board, show, show.height - len(lines) - 1)
    lines = lines[: show.height - 1]
    lines += [Text("")] * (show.height - 1 - len(lines))
    lines.append(_keys(show, inspected=board.inspection is not None, several=len(board.models) > 1))
    for line in lines:
        line.truncate(show.width, overflow="ellipsis")
    return lines


def clock(at_s: float) -> str:
    """A time of day in UTC, such as 03:12:44."""
    return time.strftime("%H:%M:%S", time.gmtime(at_s))


def sorted_servers(servers: Sequence[Server], sort: str) -> list[Server]:
    """Columns in the order asked for; equal ones by number."""
    if sort == "load":
        return sorted(servers, key=lambda server: -server.rows_per_s)
    if sort == "state":
        return sorted(servers, key=lambda server: (server.state == "serving", server.state != LOST))
    return list(servers)


def _rule(title: str, show: Show, right: str = "") -> Text:
    text = Text("── ", _RULE).append(title, f"bold {_INK}").append(" ", _RULE)
    tail = f" {right} ──" if right else ""
    text.append("─" * max(0, show.width - text.cell_len - len(tail)), _RULE)
    return text.append(tail, _DIM) if right else text


def _headline(board: Board, show: Show) -> Text:
    stale = show.mood == BAD
    # What was well may not be any more.
    state = f"? NO NEWS, was {board.verdict}" if stale else f"{VERDICT_GLYPHS[board.verdict]} {board.verdict.upper()}"
    verdict = Text(f" {state}  {' · '.join(board.facts)}")
    right = f"{clock(board.at_s)} UTC "
    verdict.truncate(max(0, show.width - len(right)), overflow="ellipsis", pad=True)
    verdict.append(right)
    verdict.stylize(_VERDICT_STYLES[DOWN if stale else board.verdict])
    return verdict


def _reasons(board: Board, show: Show) -> list[Text]:
    most = 2 if show.height < 30 else 5
    lines: list[Text] = []
    if show.mood == BAD:
        lines.append(Text(f" {MOOD_GLYPHS[BAD]} {show.news}; below is what was known", f"bold {_MOODS[BAD]}"))
    for reason in board.reasons[:most]:
        glyph = MOOD_GLYPHS[reason.mood]
        lines.append(Text(f" {glyph} {reason.text}", f"bold {_MOODS[reason.mood]}"))
    first = next((reason.do for reason in board.reasons if reason.do), "")
    if first:
        lines.append(Text(f"   → {first}", _DIM))
    more = len(board.reasons) - most
    if more > 0 and lines:
        lines[-1].append(f"  (and {more} more)", _DIM)
    return lines


def _gateway(board: Board, show: Show) -> list[Text]:
    lines = [_figures(show, board.figures[at : at + 4]) for at in range(0, len(board.figures), 4)]
    title = _rule(board.gateway.name, show, f"last {board.rates.window_s:.0f} s")
    return [title, *lines, _spark(board, show)]


def _figures(show: Show, figures: Sequence[Figure]) -> Text:
    line = Text(" ")
    # Of 80: two latencies, or one figure.
    for figure, share_of_80 in zip(figures, (25, 25, 16, 12), strict=False):
        wide = max(8, share_of_80 * show.width // 80)
        style = _INK if figure.mood == INFO else f"bold {_MOODS[figure.mood]}"
        cell = Text().append(f"{figure.name} ", _DIM).append(figure.value, style)
        if figure.more and cell.cell_len + len(figure.more) + 1 < wide:
            cell.append(f" {figure.more}", _INK)
        cell.truncate(wide, pad=True)
        line.append_text(cell)
    return line


def _spark(board: Board, show: Show) -> Text:
    rates = [point.tokens_per_s for point in board.past]
    most = max(rates, default=0.0)
    tail = f" most {number(most)}/s"
    wide = max(1, show.width - 11 - len(tail))
    shown = rates[-wide:]
    bars = "".join(_SPARKS[min(7, int(8 * rate / most))] if rate > 0 and most else "▁" for rate in shown)
    line = Text(" tokens/s ", _DIM).append(bars.rjust(wide), "#3ea6ff")
    return line.append(tail, _DIM)


def _attention(board: Board, show: Show, most: int) -> list[Text]:
    pool = board.pools.get("attention")
    serving = sum(worker.state == "serving" for worker in board.workers)
    right = f"{serving} of {pool.wanted} serving" if pool else f"{serving} serving"
    if pool and pool.starting:
        right += f", {pool.starting} starting"
    if len(board.workers) > most:
        right += f", {len(board.workers) - most} not shown"
    workers = list(board.workers)
    if show.sort == "load":
        workers.sort(key=lambda worker: -(worker.tokens_per_s or 0))
    elif show.sort == "state":
        workers.sort(key=lambda worker: worker.state == "serving")
    rows = [_worker(worker) for worker in workers[:most]] or [Text(" none", _MOODS[WARN])]
    return [_rule("attention workers", show, right), *rows]


def _worker(worker: Worker) -> Text:
    state = f"{STATE_GLYPHS.get(worker.state, ''):<1} {worker.state:<9}"
    return Text.assemble(
        (f" {worker.name:<13}", _INK),
        (state, _DIM if worker.state == "serving" else f"bold {_MOODS[WARN]}"),
        ("KV ", _DIM),
        _bar(worker.kv_use, 6),
        (f"{share(worker.kv_use):>5}", _INK),
        (" run ", _DIM),
        (f"{worker.running:<3}", _INK),
        (" wait ", _DIM),
        (f"{worker.waiting:<3}", _INK),
        (" tok/s ", _DIM),
        (f"{number(worker.tokens_per_s):<5}", _INK),
        (" busy ", _DIM),
        (share(worker.busy), _INK),
    )


def _bar(value: float | None, wide: int) -> Text:
    full = round(wide * min(1.0, max(0.0, value or 0.0)))
    hot = _MOODS[WARN] if (value or 0) >= 0.9 else "#3ea6ff"
    return Text("█" * full, hot).append("░" * (wide - full), _RULE)


def _heat(heat: Heat, show: Show, rows: int) -> list[Text]:
    servers = sorted_servers(heat.servers, show.sort)
    room = show.width - _LABEL - 1
    wide = max(1, min(9, room // max(1, len(servers))))
    shown = servers[: room // wide]
    right = f"hottest {number(heat.hottest)}" if heat.hottest >= 1 else "no load"
    if heat.balance is not None and heat.hottest >= 1:
        right += f", busiest server {heat.balance:.2f} of mean"
    if len(shown) < len(servers):
        right += f", {len(servers) - len(shown)} servers not shown"
    lines = [_rule("expert servers by layer, rows/s", show, right), _names(shown, wide)]
    each = max(1, math.ceil(heat.layers / rows))
    for first in range(0, heat.layers, each):
        last = min(heat.layers, first + each)
        label = f"layer {first}" if last == first + 1 else f"{first}–{last - 1}"
        line = Text(f" {label:<{_LABEL}}", _DIM)
        for server in shown:
            line.append_text(_cell(server, first, last, heat.hottest, wide))
        lines.append(line)
    if not shown:
        lines.append(Text(" none", _MOODS[WARN]))
    busy = Text(f" {'busy':<{_LABEL}}", _DIM)
    for server in shown:
        busy.append_text(_busy(server, wide))
    return [*lines, busy, Text(f" {_LEGEND}", _DIM)]


def _names(servers: Sequence[Server], wide: int) -> Text:
    line = Text(f" {'server':<{_LABEL}}", _DIM)
    for server in servers:
        glyph = STATE_GLYPHS.get(server.state, "")
        digits = server.name.rpartition("/")[2]
        text = f"{digits}{glyph}" if wide > 3 else (glyph or digits[-1])
        line.append(text.center(wide)[:wide], _state_style(server.state))
    return line


def _state_style(state: str) -> str:
    if state == "serving":
        return f"bold {_INK}"
    return f"bold {_MOODS[BAD]}" if state == LOST else f"bold {_MOODS[WARN]}"


def _cell(server: Server, first: int, last: int, hottest: float, wide: int) -> Text:
    if server.state == LOST:
        style = "#ff9c9c on #4a1518" if not server.replacement else "#b86a6a on #2c1618"
        return Text().append("✕".center(max(1, wide - 1)), style).append(" " * (wide > 1))
    rows = max(server.rows[first:last], default=0.0)
    held = any(server.held[first:last])
    mark = next((mark for mark in server.marks[first:last] if mark), "")
    heat = min(1.0, rows / hottest) if hottest >= 1 else 0.0
    ink, back = _shades(heat)
    style = Style.parse(f"{ink} on {back}" if held else _DIM)
    if wide >= 5:
        body = short(rows).rjust(wide - 3) if held else "·".rjust(wide - 3)
        text = Text().append(body + " ", style)
        text.append(f"{MARK_GLYPHS[mark]:<1}", style + Style.parse("bold #ffd479") if mark else style)
        return text.append(" ")
    glyph = MARK_GLYPHS[mark] if mark else _RAMP[min(4, math.ceil(heat * 4))] if held else "·"
    return Text(glyph.center(wide), style)


def _shades(heat: float) -> tuple[str, str]:
    """Ink and ground of a cell. heat: 0 to 1."""
    red, green, blue = (round(cold + (hot - cold) * heat) for cold, hot in zip(_COLD, _HOT, strict=True))
    return "#06121d" if heat > 0.62 else "#e6eef5", f"#{red:02x}{green:02x}{blue:02x}"


def _busy(server: Server, wide: int) -> Text:
    if server.state == LOST:
        replacement = f"→ {server.replacement.rpartition('/')[2]}" if server.replacement else ""
        text = replacement or ("lost" if wide >= 5 else "✕")
        style = _DIM if replacement else f"bold {_MOODS[BAD]}"
    elif server.state == "serving":
        text = share(server.busy) if wide >= 5 else _SPARKS[min(7, int(8 * (server.busy or 0)))]
        style = _MOODS[WARN] if (server.busy or 0) >= 0.9 else _INK
    else:
        text, style = server.state, _MOODS[WARN]
    text = text if len(text) <= wide else text[: wide - 1] + "…" if wide > 2 else text[:wide]
    return Text(text.center(wide), style)


def _inspection(inspection: Inspection, show: Show, most: int) -> list[Text]:
    """At most so many lines, but six."""
    right = f"{number(inspection.produced)} records, {number(inspection.dropped)} dropped"
    fault = [Text(f" {MOOD_GLYPHS[BAD]} {inspection.fault}", f"bold {_MOODS[BAD]}")] if inspection.fault else []
    if not inspection.layers:
        return [_rule(inspection.id, show, right), *fault, Text(" no gate was recorded yet, no experts", _DIM)]
    at = show.step % len(inspection.layers)
    gate = inspection.layers[at]
    now = next((value for value in reversed(gate.entropy) if value is not None), None)
    drift = f", drift {100 * gate.drift:+.1f} points" if gate.drift is not None else ""
    by_layer = Text(" by layer ", _DIM)
    for place, one in enumerate(inspection.layers):
        by_layer.append(bars(one.entropy[-1:] or (None,)), f"bold {_MOODS[WARN]}" if place == at else "#3ea6ff")
    curve = Text(" entropy  ", _DIM).append(bars(gate.entropy), "#3ea6ff").append(f" {share(now)}{drift}", _INK)
    lines = [_rule(f"experts by token, layer {gate.layer}", show, right), *fault, by_layer, curve]
    together = " ".join(f"{a}+{b} ×{short(n)} " for a, b, n in gate.pairs)
    lines.append(Text(" together ", _DIM).append(together, _INK))
    return [*lines, *_token_heat(gate, show, max(1, most - len(lines) - 1))]


def bars(values: Sequence[float | None]) -> str:
    """Shares of 1; a space where there is none."""
    return "".join(" " if value is None else _SPARKS[min(7, int(8 * value))] for value in values)


def _token_heat(gate: GateView, show: Show, rows: int) -> list[Text]:
    wide = max(4, min(9, (show.width - _TOKEN - 1) // max(1, len(gate.experts))))
    lines = [Text(f" {'expert':<{_TOKEN}}", _DIM)]
    for expert in gate.experts:
        lines[0].append(f"{expert} ".rjust(wide), f"bold {_INK}")
    for text, counts in gate.tokens[:rows]:
        line = Text(f" {text}", _INK)
        line.truncate(_TOKEN, overflow="ellipsis", pad=True)
        line.append(" ")
        most = max(counts, default=0) or 1
        for count in counts:
            ink, back = _shades(count / most)
            line.append(f"{short(count) if count else '·'} ".rjust(wide), f"{ink} on {back}" if count else _DIM)
        lines.append(line)
    return lines


def _happenings(board: Board, show: Show, rows: int) -> list[Text]:
    if rows < 2:
        return []
    as_of = "" if board.as_of_s is None else f"router heard {clock(board.as_of_s)}"
    lines = [_rule("what happened", show, as_of)]
    for happening in board.happenings[: rows - 1]:
        lines += _happening(happening, board.at_s, show.width)
    return lines[:rows]


def _happening(happening: Happening, now_s: float, width: int) -> list[Text]:
    age = now_s - happening.at_s
    color = _MOODS[happening.mood]
    head = Text().append(f" {clock(happening.at_s)} ", _DIM)
    head.append(f"{MOOD_GLYPHS[happening.mood]} ", f"bold {color}")
    style = color if happening.mood != INFO and age < 60 else _INK if age < 60 else _DIM
    wide = head.cell_len
    said = textwrap.wrap(happening.text, max(20, width - wide)) or [""]
    return [head.append(said[0], style), *(Text(" " * wide + more, style) for more in said[1:])]


def _keys(show: Show, inspected: bool, several: bool) -> Text:
    line = Text(" ")
    middle = [("s", f"sort: {show.sort}")]
    if inspected:
        middle = [("e", "servers"), ("l", "layer")] if show.gates else [("s", "sort"), ("e", "experts")]
    middle += [("m", "model")] if several else []
    for key, name in (("q", "quit"), ("p", "pause"), *middle, ("?", "help")):
        line.append(f" {key} ", "bold #06121d on #8b98a5").append(f" {name}  ", _DIM)
    right = f"{MOOD_GLYPHS[show.mood]} {'no news' if show.mood == BAD else show.news} "
    line.append(" " * max(1, show.width - line.cell_len - len(right)))
    return line.append(right, f"bold {_MOODS[show.mood]}")
