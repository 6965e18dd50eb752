"""Dispatch: each token's row to the servers of its experts, listed, sealed and signalled, in one launch.

Definition, for every token t < n of a call: pair (t, k) goes to the first of the best graded replicas of its expert
(`pack.choose_servers`); the row goes once to every server that has one of its pairs; the server's list says which. The
last program to finish writes the headers of all servers that are asked anything, and releases their signals. It also
notes in `asked` what a reply must say, and begins the step's time when this is the step's first call.

Cost: reads n * hidden bf16; writes n * min(top_k, servers) rows. At 128 tokens of 7,168 columns to one server: 1.8 MB
read, 0.9 (e4m3) or 1.8 MB written: under 1 us of an H200's copy rate. So launch, three dependent loads (ids, routes,
then nothing), one pass over a row in registers, and two fences: about 5 us.

Nothing waits here: a program that finds itself last does what is left, the others end.
"""
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from experts.gpu.pack import choose_servers, covered_blocks, grade_servers, list_row, send_row, write_header
from experts.gpu.tables import ClientTables, check_tensor
from experts.gpu.words import ASKED, CLIENT, PEER, SLOT, VERDICT, WIRE
from p2p.device import clock_ns, is_last, signal


def dispatch_reference(
    ids: np.ndarray, routes: np.ndarray, grade: np.ndarray
) -> tuple[np.ndarray, dict[int, set[int]]]:
    """The definition: server of each pair (-1: nobody), and the tokens whose row each server gets.

    Args:
        ids: [n, top_k].
        routes: [experts, replicas] of this layer.
        grade: [servers], as `pack.grade_servers` gives it.
    """
    chosen = np.full(ids.shape, -1)
    rows: dict[int, set[int]] = {}
    for token, k in np.ndindex(*ids.shape):
        expert = ids[token, k]
        if not 0 <= expert < len(routes):
            continue
        candidates = [server for server in routes[expert] if server >= 0 and grade[server] > 0]
        if candidates:
            best = max(grade[server] for server in candidates)
            chosen[token, k] = next(server for server in candidates if grade[server] == best)
            rows.setdefault(int(chosen[token, k]), set()).add(token)
    return chosen, rows


def dispatch(tables: ClientTables, layer: int, rows: torch.Tensor, ids: torch.Tensor, n_rows: torch.Tensor) -> None:
    """Send a call's tokens.

    Args:
        layer: Counted over MoE layers.
        rows: bf16 [B, hidden].
        ids: int32 [B, top_k]; outside 0 to experts - 1: a pair that nobody can answer.
        n_rows: int32 [1] on the device: tokens of `rows` that count.

    Raises:
        ValueError: a shape or type does not fit.
    """
    check_rows(tables, layer, rows, ids, n_rows)
    dispatch_kernel[(len(rows),)](
        rows, ids, n_rows, tables.peers, tables.routes, tables.suspect, tables.owed, tables.sequence,
        tables.control, tables.place, tables.asked, tables.listed, tables.counted, tables.routed, layer,
        **tables.constants(dispatch_kernel.arg_names), num_warps=tables.send_warps, enable_fp_fusion=False,
    )  # fmt: skip


def check_rows(tables: ClientTables, layer: int, rows: torch.Tensor, ids: torch.Tensor, n_rows: torch.Tensor) -> None:
    """What a call's rows, ids and count must be.

    Raises:
        ValueError: they are not.
    """
    shape = tables.shape
    if not 0 <= layer < shape.layers:
        raise ValueError(f"layer is {layer}; this model has MoE layers 0 to {shape.layers - 1}.")
    for name, tensor, dtype, needed in (
        ("rows", rows, torch.bfloat16, (len(rows), shape.hidden)),
        ("ids", ids, torch.int32, (len(rows), shape.top_k)),
        ("n_rows", n_rows, torch.int32, (1,)),
    ):
        check_tensor(name, tensor, dtype, needed)
    if not 1 <= len(rows) <= shape.capacity:
        raise ValueError(f"{len(rows)} rows; a call has 1 to {shape.capacity}.")


@triton.jit
def send_headers(
    peers, copy, control, asked, sequence, slot_at, slot, counted, listed, layer, rows, attempt, now, deadline,
    SERVERS: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, MODEL_HASH: tl.constexpr,
    ROWS_OUT: tl.constexpr, ROWS_OFFSET: tl.constexpr, ROW_STRIDE: tl.constexpr, REPLY_STRIDE: tl.constexpr,
):  # fmt: skip
    """Write the headers of all servers with pairs, note what their replies must say, and release their signals.

    By one program, after a barrier behind all rows and lists.

    Args:
        now, deadline: By the device's clock.
        slot_at, slot: Where each server is asked, int64 and int32 [WIDTH].
        counted, listed: Pairs of each server, int64, and what its list contributes to the checksum, u64 [WIDTH].
    """
    server = tl.arange(0, WIDTH)
    there = server < SERVERS
    asks = there & (counted > 0)
    peer = peers + (copy * SERVERS + server) * PEER.WORDS
    incarnation = tl.load(peer + PEER.INCARNATION, mask=there, other=0)
    number = tl.load(sequence + server, mask=there, other=0) + 1
    one = number * 0
    length = one + rows * ROW_STRIDE + ROWS_OFFSET
    checksum = write_header(
        slot_at, asks, one + WIRE.REQUEST, incarnation, number, one + attempt, length,
        one + tl.maximum(deadline - now, 0),
        one + tl.load(control + CLIENT.INCARNATION), one + rows * (4 * K) + WIRE.BYTES,
        covered_blocks(one + rows, K), listed, one, one + layer, one + rows, counted, one + ROWS_OUT, one,
        HIDDEN, MODEL_HASH,
    )  # fmt: skip
    tl.store(sequence + server, number, mask=asks)
    row = asked + (attempt * SERVERS + server) * ASKED.WORDS
    reply_at = tl.load(peer + PEER.REPLY, mask=there, other=0) + SLOT.FIRST + slot.to(tl.int64) * REPLY_STRIDE
    tl.store(row + ASKED.VERDICT, tl.where(asks, VERDICT.WAITING, VERDICT.NONE).to(tl.int64), mask=there)
    tl.store(row + ASKED.SLOT, slot.to(tl.int64), mask=there)
    tl.store(row + ASKED.SEQUENCE, number, mask=there)
    tl.store(row + ASKED.CHECKSUM, checksum, mask=there)
    tl.store(row + ASKED.REPLY, reply_at, mask=there)
    tl.store(row + ASKED.PAIRS, counted, mask=there)
    tl.store(row + ASKED.INCARNATION, incarnation, mask=there)
    tl.store(row + ASKED.SENT_NS, one + now, mask=there)
    tl.store(row + ASKED.TOOK_NS, one, mask=there)
    # Last: the server may read the frame as soon as it changes.
    signal(slot_at, number, asks)


@triton.jit
def slots_at(peers, copy, slot, SERVERS: tl.constexpr, WIDTH: tl.constexpr, REQUEST_STRIDE: tl.constexpr):
    """Address of the slot in which each server is asked, int64 [WIDTH]; without meaning where slot is -1."""
    server = tl.arange(0, WIDTH)
    peer = peers + (copy * SERVERS + server) * PEER.WORDS
    window = tl.load(peer + PEER.REQUEST, mask=server < SERVERS, other=0)
    return window + SLOT.FIRST + slot.to(tl.int64) * REQUEST_STRIDE


@triton.jit
def count_routed(routed, layer, expert, here, step, LAYERS: tl.constexpr, EXPERTS: tl.constexpr):
    """Count a row for each of its experts, and a step for each expert that it is the first to ask."""
    spot = routed + (layer * EXPERTS + expert)
    tl.atomic_add(spot, 1, mask=here, sem="relaxed")
    met = tl.atomic_xchg(spot + 2 * LAYERS * EXPERTS, step, mask=here, sem="relaxed")
    tl.atomic_add(spot + LAYERS * EXPERTS, 1, mask=here & (met != step), sem="relaxed")


@triton.jit(do_not_specialize=["layer"])
def dispatch_kernel(
    rows, ids, n_rows, peers, routes, suspect, owed, sequence, control, place, asked, listed, counted, routed,
    layer,
    LAYERS: tl.constexpr, EXPERTS: tl.constexpr, REPLICAS: tl.constexpr, SERVERS: tl.constexpr,
    HIDDEN: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, ROWS_OUT: tl.constexpr,
    MODEL_HASH: tl.constexpr, ROW_SEAL: tl.constexpr, ROW_STRIDE: tl.constexpr, ROWS_OFFSET: tl.constexpr,
    REQUEST_STRIDE: tl.constexpr, REPLY_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, SEND_THREADS: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """One token: choose its servers and write its row and list; the last one signals."""
    token = tl.program_id(0)
    copy = tl.load(control + CLIENT.COPY)
    count = tl.load(n_rows)
    server = tl.arange(0, WIDTH)
    k = tl.arange(0, WIDE)
    here = k < tl.where(token < count, K, 0)
    expert = tl.load(ids + token * K + k, mask=here, other=-1)
    none = tl.zeros([WIDTH], tl.int32)
    grade, slot = grade_servers(peers, suspect, owed, copy, none, none, SERVERS, WIDTH, SLOTS)
    slot_at = slots_at(peers, copy, slot, SERVERS, WIDTH, REQUEST_STRIDE)
    if token < count:
        chosen = choose_servers(routes, layer, expert, here, grade, copy, LAYERS, EXPERTS, REPLICAS, WIDTH, WIDE)
        tl.store(place + token * K + k, chosen, mask=here)
        peer = peers + (copy * SERVERS + server) * PEER.WORDS
        incarnation = tl.load(peer + PEER.INCARNATION, mask=server < SERVERS, other=0)
        number = tl.load(sequence + server, mask=server < SERVERS, other=0) + 1
        send_row(
            rows, token, slot_at, chosen, number, incarnation,
            HIDDEN, K, ROWS_OUT, ROW_SEAL, ROW_STRIDE, ROWS_OFFSET, WIDTH, WIDE, TILE,
        )  # fmt: skip
        fold, pairs = list_row(slot_at, grade > 0, chosen, expert, token, count, K, WIDTH, WIDE)
        tl.atomic_add(listed + server, fold, mask=pairs > 0, sem="relaxed")
        tl.atomic_add(counted + server, pairs, mask=pairs > 0, sem="relaxed")
    if is_last(control + CLIENT.ARRIVALS, tl.num_programs(0)):
        there = server < SERVERS
        # Read and cleared for the next call in one.
        pairs = tl.atomic_xchg(counted + server, tl.zeros([WIDTH], tl.int64), mask=there, sem="relaxed")
        fold = tl.atomic_xchg(listed + server, tl.zeros([WIDTH], tl.uint64), mask=there, sem="relaxed")
        now = clock_ns(control + CLIENT.CLOCK, SEND_THREADS)
        step = tl.load(control + CLIENT.STEP)
        fresh = step != tl.load(control + CLIENT.STEP_SEEN)
        deadline = tl.where(fresh, now + tl.load(control + CLIENT.BUDGET_NS), tl.load(control + CLIENT.DEADLINE_NS))
        end = tl.where(fresh, now + tl.load(control + CLIENT.RUN_NS), tl.load(control + CLIENT.END_NS))
        # Of a step that waits no longer nobody is asked anything: he would compute for nothing.
        pairs = tl.where(there & (now < end), pairs, 0)
        # All threads have read them before one writes them.
        tl.debug_barrier()
        tl.store(control + CLIENT.DEADLINE_NS, deadline)
        tl.store(control + CLIENT.END_NS, end)
        tl.store(control + CLIENT.STEP_SEEN, step)
        send_headers(
            peers, copy, control, asked, sequence, slot_at, slot, pairs, fold, layer, count, 0,
            now, deadline,
            SERVERS, WIDTH, K, HIDDEN, MODEL_HASH, ROWS_OUT, ROWS_OFFSET, ROW_STRIDE, REPLY_STRIDE,
        )  # fmt: skip
    # Last: nobody waits for it.
    known = here & (expert >= 0) & (expert < EXPERTS)
    count_routed(routed, layer, expert, known, tl.load(control + CLIENT.STEP), LAYERS, EXPERTS)
