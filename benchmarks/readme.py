"""Write the figures of README.md and docs/figures.md from benchmarks/results, so that none is typed by hand.

python -m benchmarks.readme
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

ROOT = RESULTS.parent.parent
README, FIGURES = ROOT / "README.md", ROOT / "docs" / "figures.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
Row = dict[str, Any]
PEERS = ("transformers", "llamacpp", "vllm")
TITLES = {"transformers": "transformers", "llamacpp": "llama.cpp", "vllm": "vLLM"}
# What tells two measurements of one benchmark apart; of those that agree in it the newest counts.
DECODE = ("machine", "shape", "experts", "lanes_per_server", "busy_core", "peers", "batch")
VLLM = ("shape", "vllm", "experts", "bind", "batch")
HTTP_PAIR = ("machine", "shape", "version", "vllm_dtype", "prompt", "streams")
HANDOVER = ("machine", "shape", "batch", "servers", "lanes_per_server")
GATEWAY = ("machine", "shape", "experts", "streams")
BALANCE = ("setting",)
RECOVERY = ("experts", "attention", "pool", "fault")
FAILOVER = ("what", "share_of_core", "streams", "model")
ROUTER_SCALE = ("servers", "workers", "gateways")
FAULT_POINTS = ("experts", "attention", "model")
SEEN = ("failed", "lost", "repeated", "changed")
P2P = ("topology", "measure", "bytes", "footprint")
KILL = ("fault",)
SEVERAL = (
    "measure",
    "load",
    "apart",
    "peak",
    "least",
    "headroom",
    "shape",
    "servers",
    "pooled",
    "second",
    "streams",
)


def newest(benchmark: str, fields: Sequence[str], folder: Path = RESULTS) -> list[Row]:
    """The newest record of each combination of `fields`, sorted by them; a field that is absent sorts first."""
    path = folder / f"{benchmark}.jsonl"
    found: dict[tuple[Any, ...], Row] = {}
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else []):
        row = json.loads(line) | {"number": number}
        # By engine where several were measured; some benchmarks have one, and its figure alone.
        speeds = row.get("tokens_per_s")
        row["peers"] = ",".join(peer for peer in PEERS if isinstance(speeds, dict) and peer in speeds)
        row["machine"] = ", ".join((row["hardware"]["cpu"], *row["hardware"]["isa"]))
        found[key(row, fields)] = row
    return [found[name] for name in sorted(found)]


def key(row: Row, fields: Sequence[str]) -> tuple[Any, ...]:
    """A row's values of `fields`, each in a form that sorts beside an absent one."""
    values = [row.get(field) for field in fields]
    return tuple((value is not None, 0 if value is None else value) for value in values)


def latest(folder: Path = RESULTS) -> str:
    """Every figure there is, as Markdown: what docs/figures.md has between its marks."""
    decode = newest("decode", DECODE, folder)
    parts = [decode_table(list(rows)) for _, rows in groupby(decode, lambda row: key(row, DECODE[:-1]))]
    pair = newest("http_pair", HTTP_PAIR, folder)
    parts += [http_pair_table(list(rows)) for _, rows in groupby(pair, lambda row: key(row, HTTP_PAIR[:4]))]
    parts += vllm_table(newest("vllm", VLLM, folder))
    handover, gateway = newest("handover", HANDOVER, folder), newest("gateway", GATEWAY, folder)
    for rows_of, table in ((handover, handover_table), (gateway, gateway_table)):
        parts += [table(list(rows)) for _, rows in groupby(rows_of, lambda row: row["machine"])]
    parts += idle_table(newest("idle", ("experts",), folder))
    parts += balance_table(newest("balance", BALANCE, folder))
    parts += shapes_table(newest("elasticity_shapes", (), folder))
    parts += elasticity_table(newest("elasticity", ("measure", "trace", "burstiness"), folder))
    parts += several_tables(newest("several_models", SEVERAL, folder))
    parts += eta_table(newest("eta", ("load",), folder))
    parts += recovery_table(newest("recovery", RECOVERY, folder))
    parts += router_scale_table(newest("router_scale", ROUTER_SCALE, folder))
    parts += failover_table(newest("failover", FAILOVER, folder))
    parts += hosts_table(newest("hosts", ("fault",), folder))
    parts += hosts_transport_table(newest("hosts.transport", ("streams",), folder))
    parts += fault_points_table(newest("fault_points", FAULT_POINTS, folder))
    parts += p2p_tables(newest("p2p", P2P, folder))
    if (folder / "p2p.svg").exists():
        parts.append("Every transport, size and topology: [plot](../benchmarks/results/p2p.svg).")
    parts += [
        f"How a step's time grows with batch, context and servers, beside its floor: shape "
        f"{path.stem.removeprefix('scaling-')}: [table](../benchmarks/results/{path.name})"
        + (f", [plot](../benchmarks/results/{path.stem}.svg)." if path.with_suffix(".svg").exists() else ".")
        for path in sorted(folder.glob("scaling-*.md"))
    ]
    return "\n\n".join(parts)


def short(folder: Path = RESULTS) -> str:
    """What README.md has between its marks: the kill that its picture shows, and the comparison with llama.cpp."""
    kills, decode = newest("kill", KILL, folder), newest("decode", DECODE, folder)
    beside = [row for row in decode if "llamacpp" in row["tokens_per_s"]]
    # Of the machine that was measured last.
    last = max(beside, key=lambda row: row["number"], default=None)
    beside = [row for row in beside if last and row["machine"] == last["machine"]]
    parts = [kill_line(kills[-1])] if kills else []
    parts += ["## Beside llama.cpp", comparison_table(beside)] if beside else []
    return "\n\n".join(parts)


def kill_line(row: Row) -> str:
    """What the clients of the recorded kill saw of it."""
    stall = row["longest_stall_ms"]
    seen = f"{row['lost']} tokens were lost, {row['repeated']} repeated, {row['changed']} texts changed"
    return (
        f"The kill: {row['requests']} streams, {row['arrivals_per_s']:g} new ones a second, on "
        f"{row['hardware']['cores']} cores of an {row['hardware']['cpu']}; one of {row['experts']} expert servers "
        f"ended by SIGKILL at {row['at_s']:.0f} s. {row['failed']} requests failed, {seen}"
        + (f"; the longest added wait of any stream was {stall:.0f} ms." if stall is not None else ".")
    )


def comparison_table(rows: Sequence[Row]) -> str:
    """EaaS beside llama.cpp: medians of all shapes and batches."""
    first = rows[0]
    lines = [
        f"Tokens/s through the HTTP endpoint, bf16, {first['experts']} expert servers on {machine(first)}, beside "
        f"llama-cpp-python {first['versions'].get('llama-cpp-python', '')} in the same run; medians of "
        f"{first['rounds']} interleaved rounds.",
        "",
        "| shape, streams | EaaS | llama.cpp | EaaS / llama.cpp (least to greatest) |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['shape']}, {row['batch']} | {row['tokens_per_s']['http']['median']:.0f} | "
        f"{row['tokens_per_s']['llamacpp']['median']:.0f} | {cell(row['ratio']['http/llamacpp'], 2)} |"
        for row in rows
    ]
    return "\n".join(lines)


def machine(row: Row) -> str:
    """What a row was measured on."""
    hardware = row["hardware"]
    return f"{row['threads']} threads on an {hardware['cpu']} ({', '.join(hardware['isa'])})"


def cell(figure: dict[str, float] | None, digits: int) -> str:
    """Median and spread; a dash where nothing was measured."""
    if figure is None:
        return "–"
    least, most = f"{figure['min']:.{digits}f}", f"{figure['max']:.{digits}f}"
    return f"{figure['median']:.{digits}f} ({least} to {most})"


def decode_table(rows: Sequence[Row]) -> str:
    """Decoding speed of one shape, pool and load, by batch size."""
    first = rows[0]
    peers = [peer for peer in PEERS if any(peer in row["tokens_per_s"] for row in rows)]
    versions = {"transformers": "transformers", "llamacpp": "llama-cpp-python"}
    beside = " and ".join(
        vllm_words(first["engines"][peer])
        if peer == "vllm"
        else f"{versions[peer]} {first['versions'].get(versions[peer], '')}"
        for peer in peers
    )
    busy = first.get("busy_core")
    lines = [
        f"Shape {first['shape']}, bf16, decoding through the HTTP endpoint, {first['experts']} expert "
        f"server{'s' if first['experts'] > 1 else ''}, {machine(first)}"
        + (f", core {busy} kept busy by another process" if busy is not None else "")
        + f"; prompts of 16 tokens, {new_tokens(rows)} new ones; {beside or 'no peer'} in the same run, "
        f"{first['rounds']} interleaved rounds, medians (least to greatest).",
        "",
    ]
    inproc = any("ours/inproc" in row["ratio"] for row in rows)
    columns = ["batch", "EaaS, tokens/s"]
    columns += [text for peer in peers for text in (f"{TITLES[peer]}, tokens/s", f"EaaS / {TITLES[peer]}")]
    columns += ["engine: experts on servers / in process"] if inproc else []
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [str(row["batch"]), cell(row["tokens_per_s"]["http"], 0)]
        for peer in peers:
            cells += [
                cell(row["tokens_per_s"].get(peer), 0),
                cell(row["ratio"].get(f"http/{peer}"), 2),
            ]
        cells += [cell(row["ratio"].get("ours/inproc"), 2)] if inproc else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def http_pair_table(rows: Sequence[Row]) -> str:
    """EaaS and stock vLLM through their endpoints, by prompts and streams."""
    first = rows[0]
    rounds = sorted({row["rounds"] for row in rows})
    lines = [
        f"EaaS, bf16, beside stock {vllm_words(first['vllm'])}, both through their OpenAI endpoints, shape "
        f"{first['shape']}, {first['experts']} expert servers, {machine(first)}; {first['tokens']} new tokens; "
        f"{' to '.join(map(str, rounds))} interleaved rounds in which the other one's processes stand still. Tokens/s "
        "of all streams, prompts included, medians (least to greatest), and the ratio of decoding alone; time to the "
        "first token and between tokens, p50 and p99 of all streams of all rounds.",
        "",
        "| prompt, streams | EaaS, tokens/s | vLLM, tokens/s | EaaS / vLLM | decoding alone | TTFT, ms: EaaS | vLLM | "
        "ITL, ms: EaaS | vLLM |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        speed = row["tokens_per_s"]
        waits = [
            f"{row[what][name]['p50']:.0f}, {row[what][name]['p99']:.0f}"
            for what in ("ttft_ms", "itl_ms")
            for name in ("eaas", "vllm")
        ]
        cells = [f"{row['prompt']}, {row['streams']}", cell(speed["eaas"], 0), cell(speed["vllm"], 0)]
        cells += [cell(row["ratio"], 2), cell(row["ratio_decoding"], 2), *waits]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def vllm_words(found: Row) -> str:
    """A vLLM and the settings that it was given."""
    preload = f", {found['preload']} preloaded" if found["preload"] else ""
    return f"vLLM {found['version']} ({found['dtype']}, threads on cores {found['bind']}{preload})"


def vllm_table(rows: Sequence[Row]) -> list[str]:
    """vLLM with its experts in a pool beside stock vLLM."""
    if not rows:
        return []
    first = rows[0]
    lines = [
        f"vLLM with its experts in a pool of {first['experts']} servers beside stock vLLM of the same version, "
        f"tokens/s over HTTP, bf16, {machine(first)}; {first['rounds']} interleaved rounds in which the other one's "
        "processes stand still, medians (least to greatest); decoding alone, and with the prompts.",
        "",
        "| vLLM, its cores | shape, streams | with the pool | stock | pool / stock | with prompts: pool / stock |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        speed = row["tokens_per_s"]
        lines.append(
            f"| {row['vllm']}, {row['bind']} | {row['shape']}, {row['batch']} | {cell(speed['pool'], 0)} | "
            f"{cell(speed['stock'], 0)} | {cell(row['ratio'], 2)} | {cell(row['ratio_with_prefill'], 2)} |"
        )
    return ["\n".join(lines)]


def new_tokens(rows: Sequence[Row]) -> str:
    """How many each prompt was given, by batch size where that differs."""
    counts = {row["batch"]: row.get("tokens", 64) for row in rows}
    if len(set(counts.values())) == 1:
        return str(rows[0].get("tokens", 64))
    return ", ".join(f"{count} (batch {batch})" for batch, count in counts.items())


def handover_table(rows: Sequence[Row]) -> str:
    """Microseconds a layer of dispatch and combine with empty experts."""
    lines = [
        f"Hand-over: dispatch and combine with empty experts over real server processes, µs a layer beyond the same "
        f"step in process, {machine(rows[0])}.",
        "",
        "| shape | batch | servers x lanes | p50, µs | p99, µs |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        us = row["us_per_layer"]
        pool = f"{row['servers']} x {row['lanes_per_server']}"
        lines.append(f"| {row['shape']} | {row['batch']} | {pool} | {us['p50']:.1f} | {us['p99']:.1f} |")
    return "\n".join(lines)


def gateway_table(rows: Sequence[Row]) -> str:
    """The gateway's CPU time and what it leaves of the engine's speed."""
    lines = [
        f"Gateway: CPU time of its process per streamed token, and tokens/s through HTTP over the engine driven "
        f"directly, {machine(rows[0])}.",
        "",
        "| shape | streams | gateway CPU, µs a token | HTTP / engine |",
        "|---|---|---|---|",
    ]
    for row in rows:
        cpu, ratio = cell(row["gateway_cpu_us_per_token"], 1), cell(row["ratio"]["http/ours"], 2)
        lines.append(f"| {row['shape']} | {row['streams']} | {cpu} | {ratio} |")
    return "\n".join(lines)


def idle_table(rows: Sequence[Row]) -> list[str]:
    """What a cluster costs that nobody asks anything."""
    parts: list[str] = []
    for row in rows:
        found = row["cpu_ms_per_s"]
        names = sorted(found, key=lambda name: (name == "all", name))
        heads, cells = " | ".join(names), " | ".join(cell(found[name], 1) for name in names)
        about = f"CPU time of an idle cluster of {row['experts']} expert servers, ms a second, {machine(row)}."
        parts.append(f"{about}\n\n| {heads} |\n{'|---' * len(names)}|\n| {cells} |")
    return parts


def balance_table(rows: Sequence[Row]) -> list[str]:
    """Load of the busiest server over the mean, beside the public algorithm and the bound."""
    if not rows:
        return []
    lines = [
        "Balance: load of the busiest server over the mean, mean and 95th percentile over all batches of a drifting "
        "world; over the best fractional assignment for the same placement; bytes copied an interval, and as a share "
        "of EPLB's, run at each interval.",
        "",
        "| world | seeds | EaaS | over the bound | GB copied (of EPLB's) | EPLB, even split | EPLB, our waterfill |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        ours, even, poured = (row["policies"][name] for name in ("ours", "eplb_even", "eplb_waterfill"))
        cells = [f"{found['mean']:.3f}, {found['p95']:.3f}" for found in (ours, even, poured)]
        lines.append(
            f"| {row['setting']} | {row['seeds']} | {cells[0]} | {ours['over_bound']['mean']:.3f} | "
            f"{ours['gb_per_interval']:.3f} ({row['bytes_of_eplb']:.2%}) | {cells[1]} | {cells[2]} |"
        )
    return ["\n".join(lines), "[Plot](../benchmarks/results/balance.svg)."]


def shapes_table(rows: Sequence[Row]) -> list[str]:
    """Servers paid on loads made to defeat scaling."""
    parts = []
    for row in rows:
        lines = [
            "Mean servers paid on loads made to defeat scaling, six hours after six to learn from, at the shipped "
            f"headroom; means of {row['seeds']} seeds. Static: the smallest fleet with 0.1% late over all twelve "
            "hours, and the smallest that is no later than ours over the six.",
            "",
            "| load | ours | late | static | static, as late | knows the next 40 s | over static | at most |",
            "|---" * 8 + "|",
        ]
        lines += [
            f"| {name} | {found['ours']:.1f} | {found['late']:.2%} | {found['static']:.1f} | "
            f"{found['static_as_late']:.1f} | {found['knows']:.1f} | {found['over_static']:+.1%} | "
            f"{found['over_static_most']:+.1%} |"
            for name, found in row["shapes"].items()
        ]
        parts.append("\n".join(lines))
    return parts


def elasticity_table(rows: Sequence[Row]) -> list[str]:
    """Servers paid over a week, by policy and by the unit in which a fleet changes."""
    parts = []
    for row in rows:
        if row["measure"] != "week":
            continue
        lines = [
            f"Elasticity: mean servers paid over a week made from {row['trace']}, servers that start in 30 s, headroom "
            f"tuned to 0.1% late tokens on seeds 0-4, read on seeds 5-14 (mean demand {row['bound']['mean_demand']}"
            + (f", burstiness {row['burstiness']})." if "burstiness" in row else ")."),
            "",
            "| fleet changes by | servers paid | under the static fleet | late tokens | changes an hour |",
            "|---" * 5 + "|",
        ]
        lines += [
            f"| {name} | {found['paid']:.1f} | {found['saving']:.1%} | {found['late']:.2%} | "
            f"{found['changes_per_h']:.1f} |"
            for name, found in row["policies"].items()
        ]
        parts += ["\n".join(lines), "[One day of it](../benchmarks/results/elasticity.svg)."]
    return parts


def several_tables(rows: Sequence[Row]) -> list[str]:
    """One pool of two models beside a pool for each: servers over weeks, memory, what mixing costs, and live load."""
    of = {measure: [row for row in rows if row["measure"] == measure] for measure in MEASURES_OF_SEVERAL}
    return [table(of[measure]) for measure, table in MEASURES_OF_SEVERAL.items() if of[measure]]


def several_weeks_table(rows: Sequence[Row]) -> str:
    """Mean servers of two pools and of one, scaled and fixed."""
    lines = [
        f"Two models on one pool beside a pool for each, simulated: mean servers paid over a week made from "
        f"{rows[0]['trace']} (model B's half a day later, or in phase) and over square waves (a tenth of the peak "
        "between peaks; in turn, or in phase), at most 0.1% of the tokens late. Scaled: both sides by the load, "
        "headroom as shipped or tuned to just keep that; fixed: the smallest fleets that keep it on seeds 0-4. Figures "
        "of seeds 5-14, which are harsher.",
        "",
        "| load, servers of one model at its peak, least | headroom | scaled: two pools (late) | one pool (late) | "
        "fewer | fixed: two pools (late) | one pool (late) | fewer | fixed, sized on seeds 5-14: two, one, fewer |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        where = f"{row['load']}, {'apart' if row['apart'] else 'in phase'}, {row['peak']:g}, {row['least']}"
        headroom = f"{row['headroom']:g}" if row["headroom"] else "tuned"
        cells = [where, headroom]
        for side in ("scaled", "fixed"):
            cells += [f"{row[side][n]['paid']:.2f} ({row[side][n]['late']:.2%})" for n in ("two", "one")]
            cells.append(f"{row[side]['saving']:.1%}")
        known = row["fixed"]["with_hindsight"]
        cells.append(f"{sum(known['two'])}, {known['one']}: {1 - known['one'] / sum(known['two']):.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def several_memory_table(rows: Sequence[Row]) -> str:
    """A pool's memory for a model and a fine-tune of it, over that for the model alone."""
    lines = [
        "Memory of a pool that serves a model and a fine-tune of it, over that of the pool of the model alone: packed "
        "experts in the page cache, and what the expert servers hold of their own beyond those of the one pool.",
        "",
        "| shape, servers | experts rewritten | packed experts in memory, MB: alone | both | servers' own beyond, MB | "
        "ratio |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        alone, both = row["one"], row["two"]
        beyond = max(0, both["private_bytes"] - alone["private_bytes"])
        lines.append(
            f"| {row['shape']}, {row['servers']} | {row['rewritten']} of {row['experts']} | "
            f"{alone['resident_bytes'] / 1e6:.1f} | {both['resident_bytes'] / 1e6:.1f} | {beyond / 1e6:.1f} | "
            f"{row['ratio']:.2f} |"
        )
    return "\n".join(lines)


def several_mixing_table(rows: Sequence[Row]) -> str:
    """What an idle model costs another, and batches of two models beside batches of one."""
    first = rows[0]
    lines = [
        f"Batches of two models on one pool, shape {first['shape']}, {first['servers']} expert servers on "
        f"{first['hardware']['cores']} cores of an {first['hardware']['cpu']}; decoding, tokens/s, medians of "
        f"{first['rounds']} interleaved rounds (least to greatest). Alone, and beside an idle model: half the streams.",
        "",
        "| streams | alone | beside an idle model | ratio | all of one model | half of each | ratio |",
        "|---" * 7 + "|",
    ]
    lines += [
        f"| {row['streams']} | {cell(row['tokens_per_s']['alone'], 0)} | {cell(row['tokens_per_s']['beside'], 0)} | "
        f"{cell(row['ratio']['beside/alone'], 2)} | {cell(row['tokens_per_s']['one'], 0)} | "
        f"{cell(row['tokens_per_s']['mixed'], 0)} | {cell(row['ratio']['mixed/one'], 2)} |"
        for row in rows
    ]
    return "\n".join(lines)


def several_live_table(rows: Sequence[Row]) -> str:
    """Real processes under square waves: one pool beside a pool for each model."""
    first = rows[0]
    lines = [
        f"Two models ({' and '.join(first['models'])}) under square waves, the low rate a tenth of the high one: one "
        "pool of expert servers for both beside a pool for each. Every server is held to "
        f"{first['share_of_core']:g} of a core: two cores cannot hold that many full ones, so this shows what pools of "
        "such sizes do, not how many tokens a server makes.",
        "",
        "| shape, servers: one pool, two | high, requests/s | the models' loads, seconds | server-seconds: one pool | "
        "two pools | fewer | TTFT p50, p99, ms: one pool | two pools | p99, one / two, rounds | failed |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        one, two = row["one"], row["two"]
        waits = [f"{side['ttft_p50_s'] * 1e3:.0f}, {side['ttft_p99_s'] * 1e3:.0f}" for side in (one, two)]
        lines.append(
            f"| {row['shape']}: {row.get('pooled', row['servers'])}, {row['servers']} + {row['servers']} | "
            f"{row['requests_per_s']['high']:.0f} | "
            f"{'in turn' if row['load'] == 'apart' else row['load']}, {row['seconds']:g} | "
            f"{one['server_seconds']:.0f} | {two['server_seconds']:.0f} | {row['server_seconds_saved']:.1%} | "
            f"{' | '.join(waits)} | {cell(row['ttft_p99_ratio'], 2)} | {one['failed'] + two['failed']} |"
        )
    return "\n".join(lines)


MEASURES_OF_SEVERAL = {
    "week": several_weeks_table,
    "memory": several_memory_table,
    "mixing": several_mixing_table,
    "live": several_live_table,
}


def eta_table(rows: Sequence[Row]) -> list[str]:
    """How often predictions of when requests end held, and what polling by their word costs."""
    if not rows:
        return []
    lines = [
        "When requests end: shares that ended by the median and by the 90th percentile that were told when they were "
        "submitted, and at polls; polls of each, that which finds its end included; seconds from the end until that, "
        "polled when told, at the best fixed interval and at the best exponential backoff that take as many polls. "
        "Live ones are background responses by HTTP at a fresh cluster, judged by the client's clock from the first "
        "one on; the others are simulated.",
        "",
        "| load | requests | mean, s | p50, p90 at submission | at polls | polls | lost, s | fixed | exponential |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        held = [f"{row[at]['p50']:.1%}, {row[at]['p90']:.1%}" for at in ("at_submission", "at_polls")]
        lost = [f"{row[name]:.2f}" for name in ("lost_s", "lost_fixed_s", "lost_exponential_s")]
        cells = [
            row["load"],
            f"{row['requests']:,}",
            f"{row['mean_s']:.2f}",
            *held,
            f"{row['polls']:.2f}",
            *lost,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return ["\n".join(lines)]


def recovery_table(rows: Sequence[Row]) -> list[str]:
    """Seconds from the kill of a server until its replicas, and the pool, are back."""
    if not rows:
        return []
    lines = [
        "Recovery on the demonstration model, seconds from SIGKILL under streams (p50, worst): every expert on as many "
        "servers as wanted again; the replacement serves.",
        "",
        "| servers + workers | killed | kills | replicas back | pool whole |",
        "|---" * 5 + "|",
    ]
    for row in rows:
        found = [
            f"{row['seconds'][phase]['p50']:.2f}, {row['seconds'][phase]['worst']:.2f}"
            if phase in row["seconds"]
            else "–"
            for phase in ("replicas", "whole")
        ]
        target = f"{row['pool']}{' hung' if 'fault' in row else ''}"
        lines.append(f"| {row['experts']} + {row['attention']} | {target} | {row['kills']} | {found[0]} | {found[1]} |")
    return ["\n".join(lines)]


def router_scale_table(rows: Sequence[Row]) -> list[str]:
    """What a router costs with many members, and how soon everyone hears who is lost."""
    parts: list[str] = []
    for row in rows:
        rest = row["rest"]
        lost = {"a server": "server_lost", "a host of 8": "host_lost", "8 frozen": "host_frozen"}
        percent, size = rest["cpu_percent"]["median"], row["whole_view_bytes"]
        about = (
            f"A router with {row['servers']} expert servers, {row['workers']} attention workers and "
            f"{row['gateways']} gateways, {row['layers']} layers of {row['experts']} experts twice: {percent:.0f}% of "
            f"a core at rest for {rest['renewals_per_s']:,} renewals a second, {rest['view_bytes_per_s']:,} bytes of "
            f"Views a second; a whole View has {size:,} bytes. Seconds until stand-in members heard who is lost, and "
            f"what to load instead (p50, most); all on two cores of {row['machine']}."
        )
        lines = ["| lost | heard | told to load | a View, bytes | all Views, MB |", "|---" * 5 + "|"]
        for name, word in lost.items():
            heard, orders = (
                f"{row[word][seen]['p50']:.2f}, {row[word][seen]['most']:.2f}"
                for seen in ("gone_seen_s", "orders_seen_s")
            )
            view, traffic = row[word]["view_bytes_mean"]["median"], row[word]["traffic_bytes"]["median"] / 1e6
            lines.append(f"| {name} | {heard} | {orders} | {view:,.0f} | {traffic:.0f} |")
        parts.append(f"{about}\n\n" + "\n".join(lines))
    return parts


def failover_table(rows: Sequence[Row]) -> list[str]:
    """What failures cost in throughput and in silence, and what clients saw of them."""
    if not rows:
        return []
    first = rows[0]
    lines = [
        f"Failures on the {first['model']} model, {first['streams']} streams, {first['experts']} expert servers with "
        f"every expert on {first['replicas']}, {first['attention']} attention workers, {first['hardware']['cores']} "
        "cores: throughput lost after the fault beside calm runs by turns (median, 95% interval), also per second of a "
        "serving server; added stall, of all streams and of each fault's worst one; every expert on as many live "
        "servers again; the pool whole. Servers that share cores lose no capacity when one dies; a share of a core is "
        "a lane of its own for each.",
        "",
        "| fault | lane | pairs | loss | loss per server-second | faults | added stall, ms: p50, p99 | "
        "worst of each fault: p50, p99, most | redundant, s: p50, most | whole, s: p50, most | "
        "failed, lost, repeated, changed |",
        "|---" * 11 + "|",
    ]
    for row in rows:
        stall, worst, share = row["added_stall_ms"], row["worst_stall_ms"], row.get("share_of_core")
        losses = [
            f"{row[name]['median']:.2f}% ({row[name]['low']:.2f} to {row[name]['high']:.2f})" if name in row else "–"
            for name in ("loss_percent", "loss_percent_per_server_second")
        ]
        times = [
            f"{row[name]['p50']:.2f}, {row[name]['max']:.2f}" if row.get(name) else "–"
            for name in ("redundant_s", "whole_s")
        ]
        silence = [
            f"{stall['p50']:.0f}, {stall['p99']:.0f}",
            f"{worst['p50']:.0f}, {worst['p99']:.0f}, {worst['max']:.0f}",
        ]
        cells = [row["what"], f"{share:g} core" if share else "shared", str(row.get("pairs", "–")), *losses]
        cells += [str(row["faults"]), *silence, *times, ", ".join(str(row[name]) for name in SEEN)]
        lines.append(f"| {' | '.join(cells)} |")
    return ["\n".join(lines)]


def hosts_table(rows: Sequence[Row]) -> list[str]:
    """What clients saw while hosts and the links between them failed."""
    if not rows:
        return []
    lines = [
        "Sixteen greedy streams while hosts, or the links between them, fail: five network namespaces on the cores of "
        f"{rows[0]['machine']}, TLS everywhere, nixl over two rails, three etcd. The longest time between two tokens "
        "of each stream; in brackets without a fault, in the same run.",
        "",
        "| what happens | streams | failed | changed | stall p50, ms | p99 | most | whole again, s |",
        "|---" * 8 + "|",
    ]
    for row in sorted(rows, key=lambda row: row["number"]):
        stall, calm = row["stall_ms"], row["calm_stall_ms"]
        stalls = " | ".join(f"{stall[p]} ({calm[p]})" for p in ("p50", "p99", "p100"))
        counts = " | ".join(str(row[name]) for name in ("streams", "failed", "changed"))
        lines.append(f"| {row['what']} | {counts} | {stalls} | {row['whole_again_s']:.0f} |")
    return ["\n".join(lines)]


def hosts_transport_table(rows: Sequence[Row]) -> list[str]:
    """What crossing hosts costs."""
    if not rows:
        return []
    lines = [
        "The demonstration model, one attention worker and two expert servers: in one host over shm, and in two "
        f"network namespaces over nixl (TCP, two rails), both on the cores of {rows[0]['machine']}. TCP packets of "
        "up to 64 KB each, acknowledgements too.",
        "",
        "| streams | shm, tokens/s | nixl, tokens/s | nixl / shm | bytes a token (out + back) | packets |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        over, inside = row["nixl"], row["shm"]
        carried = [
            f"{over[f'{way}_{what}_per_token']['median']:,.{digits}f}"
            for what, digits in (("bytes", 0), ("packets", 1))
            for way in ("tx", "rx")
        ]
        lines.append(
            f"| {row['streams']} | {cell(inside['tokens_per_s'], 0)} | {cell(over['tokens_per_s'], 0)} | "
            f"{cell(row['nixl_over_shm'], 2)} | {carried[0]} + {carried[1]} | {carried[2]} + {carried[3]} |"
        )
    return ["\n".join(lines)]


def fault_points_table(rows: Sequence[Row]) -> list[str]:
    """Kills and freezes at named points of the protocol, and what clients saw of them."""
    parts = []
    for row in rows:
        lines = [
            f"{row['injected']:,} kills and freezes of real processes at named points of the protocol, one after "
            f"another under {row['streams']} streams ({row['requests']:,} requests, seed {row['seed']}): "
            f"{', '.join(f'{row[name]} {name}' for name in SEEN)}. Worst added stall of any stream, ms, after a kill "
            "and after a freeze (of 0.1 to 4 s).",
            "",
            "| point | kills | freezes | failed, lost, repeated, changed | kill | freeze |",
            "|---" * 6 + "|",
        ]
        for point, found in row["points"].items():
            seen = ", ".join(str(found[name]) for name in SEEN)
            lines.append(
                f"| {point} | {found['kill']} | {found['freeze']} | {seen} | {found['worst_kill_ms']:.0f} | "
                f"{found['worst_freeze_ms']:.0f} |"
            )
        parts.append("\n".join(lines))
    return parts


def p2p_tables(rows: Sequence[Row]) -> list[str]:
    """Round trips and bandwidth between two processes, by transport and size."""
    tables = []
    for measure, field, title in (
        ("latency", "p50", "Round trip between two processes with so many bytes each way, µs, median (p99)"),
        ("bandwidth", "gb_per_s", "Bandwidth of messages of so many bytes, four under way, GB/s"),
    ):
        here = [row for row in rows if row.get("measure") == measure and row["topology"] == "1to1"]
        if not here:
            continue
        names = list(dict.fromkeys(name for row in here for name in row["transports"]))
        lines = [
            f"{title}: {here[0]['hardware']['cores']} cores of an {here[0]['hardware']['cpu']}, {here[0]['rounds']} "
            "interleaved rounds. `shm` polls, `shm-parked` sleeps, both native with the checksum on; `shm-python` and "
            "`nixl` send the same frames by the Python API; `nixl-put` is put and signal alone, `nixl-bare` NIXL's "
            "own calls.",
            "",
            f"| bytes | {' | '.join(names)} |",
            "|---" * (1 + len(names)) + "|",
        ]
        for row in here:
            found = [row["transports"].get(name) for name in names]
            cells = [f"{figures[field]:.3g}" if figures else "–" for figures in found]
            if measure == "latency":
                cells = [f"{cell} ({f['p99']:.3g})" if f else cell for cell, f in zip(cells, found, strict=True)]
            lines.append(f"| {row['bytes']:,} | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return tables


def render(path: Path, figures: str) -> str:
    """A page's text with what lies between its marks replaced.

    Raises:
        ValueError: the marks are missing.
    """
    text = path.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{path.name} lacks the marks {BEGIN} and {END}; put them where the figures belong.")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{figures}\n{END}{tail}"


def pages() -> dict[Path, str]:
    """The text that each page with figures should have."""
    return {README: render(README, short()), FIGURES: render(FIGURES, latest())}


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
