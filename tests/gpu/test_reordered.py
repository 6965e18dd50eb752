"""The exchange over a network that reorders and delays puts: right bits, and mutants that signal too early die."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportIndexIssue=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from experts.gpu import dispatch as dispatching
from experts.gpu import reply as replying
from experts.gpu.combine import combine
from experts.gpu.dispatch import dispatch
from experts.gpu.wait_replies import wait_replies
from p2p.device import INTERPRET, folded, is_last, load_acquire, mix, put, row_stamp, signal
from tests.gpu.device import fresh_seed, same_bits
from tests.gpu.exchange_world import Call, World, shape_of
from tests.gpu.reordering import Network

if not INTERPRET:
    pytest.skip("needs the interpreter, whose puts can be exchanged; found a GPU", allow_module_level=True)

WANTED = 100_000
BATCH, ROWS, WORDS = 8, 64, 64  # programs of a launch, rows of each, u32 words of a row
_WORDS = tl.constexpr(WORDS)
_STRIDE = tl.constexpr(WORDS * 4 + 64)  # to the next row, its seal between
_ROWS_AT = tl.constexpr(128)  # the signal and how many rows there are come before


def exchange(network: Network, world: World, call: Call) -> None:
    """A call of one frame, its servers in turn."""
    tables, arguments = world.client.tables, (call.layer, call.rows, call.ids, call.n_rows)
    with network.launch("client"):
        dispatch(tables, *arguments)
    for place, end in enumerate(world.ends):
        with network.launch(f"server {place}"):
            end.enqueue_pass()
    with network.launch("client"):
        wait_replies(tables, *arguments)
        combine(tables, *arguments[:3], call.weights, call.n_rows, call.out)


def exchanged(network: Network, calls: int, seed: int, tokens: int = 5) -> int:
    """Calls whose every row has the bits of a local one, without a verdict against anyone: the rows and answers put."""
    world = World(shape=shape_of(capacity=tokens))
    for number in range(calls):
        call = Call.random(world.shape, seed + number, layer=number % 2, tokens=tokens, live=tokens)
        exchange(network, world, call)
        assert same_bits(call.out, call.expected(world.shape)), f"seed {seed}, call {number}: wrong rows"
        report = world.client.report()
        assert report.usable and not report.verdicts and not report.redispatched, (
            f"seed {seed}, call {number}: {report}"
        )
    counts = [end.counters() for end in world.ends]
    rows = sum(it.rows + it.pairs for it in counts)
    assert network.held > rows > calls * tokens, f"seed {seed}: {network.held} pieces held back, of {rows} rows"
    return rows


@pytest.mark.smoke
def test_a_call_over_a_network_that_reorders_and_delays_gives_the_bits_of_a_local_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed = fresh_seed()
    exchanged(Network(seed, monkeypatch), 2, seed, tokens=3)


@triton.jit
def word_of(row, sequence):
    """A row's words, u32 of the shape [rows, WORDS]."""
    number = row[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    return mix((number + sequence.to(tl.int64) * 0x100000000).to(tl.uint64)).to(tl.uint32)


@triton.jit
def send_kernel(window, sequence, counter, ROWS: tl.constexpr):
    """Put rows under seals; the last program puts their number and signals."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words = word_of(row, sequence)
    at = window + _ROWS_AT + row.to(tl.int64) * _STRIDE
    index = tl.arange(0, _WORDS)[None, :]
    put(at, tl.trans(index), tl.trans(words))
    seal = tl.sum(folded(words, index, row[:, None]), axis=1) + row_stamp(row * 0 + sequence, row * 0 + 7, row)
    put(at, _WORDS // 2, seal)
    if is_last(counter, tl.num_programs(0)):
        put(window + 64 + sequence * 0, 0, sequence * 0 + tl.num_programs(0) * ROWS)
        signal(window, sequence, window != 0)


@triton.jit
def receive_kernel(window, sequence, wrong, ROWS: tl.constexpr):
    """Acquire the signal; count the rows whose words or seals are not what they must be."""
    seen = load_acquire(window.to(tl.pointer_type(tl.int64)))
    count = tl.load((window + 64).to(tl.pointer_type(tl.int64)))
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = window + _ROWS_AT + row.to(tl.int64) * _STRIDE
    index = tl.arange(0, _WORDS)[None, :]
    words = tl.load(at[:, None].to(tl.pointer_type(tl.uint32)) + index)
    seal = tl.load((at + _WORDS * 4).to(tl.pointer_type(tl.uint64)))
    stamp = row_stamp(row * 0 + sequence, row * 0 + 7, row)
    bad = tl.sum(folded(words, index, row[:, None]), axis=1) + stamp != seal
    bad |= tl.max((words != word_of(row, sequence)).to(tl.int32), axis=1) > 0
    bad |= (seen != sequence) | (count != tl.num_programs(0) * ROWS)
    tl.store(wrong + row, bad.to(tl.int32))


@pytest.mark.full(seconds=120)
@pytest.mark.timeout(1200)
def test_a_hundred_thousand_rows_over_such_a_network_and_none_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row is a sealed row or answer that is put: first those of whole calls, then rows
    under the same puts, seals, arrivals and signals, 512 to a signal, which the interpreter gets through in time."""
    seed = fresh_seed()
    network = Network(seed, monkeypatch)
    sent, sequence = exchanged(network, 20, seed), 0
    window = torch.zeros(128 + BATCH * ROWS * (WORDS * 4 + 64), dtype=torch.uint8)
    counter, wrong = torch.zeros(1, dtype=torch.int64), torch.zeros(BATCH * ROWS, dtype=torch.int32)
    while sent < WANTED:
        sequence += 1
        wrong.fill_(1)
        with network.launch("sender"):
            send_kernel[(BATCH,)](window.data_ptr(), sequence, counter, ROWS=ROWS)
        with network.launch("receiver"):
            receive_kernel[(BATCH,)](window.data_ptr(), sequence, wrong, ROWS=ROWS)
        assert not wrong.any(), f"seed {seed}: {int(wrong.sum())} wrong rows under signal {sequence}"
        sent += BATCH * ROWS


def _early_rows(patch: Callable[[object, str, object], None]) -> None:
    """Requests' signals before the puts of their rows."""
    rows: list[tuple[object, ...]] = []
    send_row, send_signal = dispatching.send_row, dispatching.signal

    def signalled(*arguments: object) -> None:
        send_signal(*arguments)
        for row in rows:
            send_row(*row)

    patch(dispatching, "send_row", lambda *row: rows.append(row))
    patch(dispatching, "signal", signalled)


def _any_last(patch: Callable[[object, str, object], None]) -> None:
    """The program with the last number signals, whoever has arrived."""
    patch(dispatching, "is_last", lambda counter, total: tl.program_id(0) == total - 1)


def _early_signal(module: object) -> Callable[[Callable[[object, str, object], None]], None]:
    """Signals before the puts of their headers."""

    def planted(patch: Callable[[object, str, object], None]) -> None:
        write_header, send_signal = module.write_header, module.signal  # type: ignore[attr-defined]

        def header(
            at: tl.tensor, mask: tl.tensor, kind: object, to: object, number: tl.tensor, *rest: object
        ) -> object:
            send_signal(at, number, mask)
            return write_header(at, mask, kind, to, number, *rest)

        patch(module, "write_header", header)
        patch(module, "signal", lambda *arguments: None)

    return planted


MUTANTS = {
    "requests signalled before their rows": _early_rows,
    "a last program that acquires no arrival": _any_last,
    "requests signalled before their headers": _early_signal(dispatching),
    "replies signalled before their headers": _early_signal(replying),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_network_kills_mutants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = fresh_seed()
    network = Network(seed, monkeypatch)
    MUTANTS[name](monkeypatch.setattr)
    with pytest.raises(AssertionError, match=r"wrong rows|call 0"):
        exchanged(network, 1, seed)
