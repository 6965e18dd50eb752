"""What workers say of their load, added up so that no counter falls; and the header that carries a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from eaas.gateway.metrics import Ledger, kv_use
from eaas.traceparent import is_sampled, valid_traceparent
from eaas.worker.protocol import Hello, WorkerLoad


@dataclass
class Connected:
    """As a connection says it: what fits at its worker, and its newest load."""

    hello: Hello
    load: WorkerLoad | None


def seen(blocks: int, load: WorkerLoad | None) -> Any:
    return Connected(
        Hello(
            name="attention/1", incarnation=1, model_hash="", numerics_class="", max_model_len=1, vocab=1,
            kv_tokens=16 * blocks,
        ),
        load,
    )  # fmt: skip


def test_the_cache_of_all_workers_is_as_full_as_their_blocks() -> None:
    workers = [seen(100, WorkerLoad(kv_use=1.0)), seen(300, WorkerLoad(kv_use=0.2)), seen(100, None)]
    assert kv_use(workers) == pytest.approx((100 + 60) / 500)
    assert kv_use([]) == 0.0


def test_counters_never_fall_though_workers_come_and_go() -> None:
    ledger = Ledger()
    for incarnation, preemptions, total in (
        (1, 5, 5), (2, 3, 8), (1, 6, 9),
        (2, 3, 9),  # over another connection
        (3, 0, 9), (3, 2, 11), (1, 6, 11),
    ):  # fmt: skip
        ledger.heard(incarnation, WorkerLoad(preemptions=preemptions, looked_up=preemptions, reused=preemptions))
        assert (ledger.preemptions, ledger.looked_up, ledger.reused) == (total, total, total)
    for incarnation in range(10, 2000):
        ledger.heard(incarnation, WorkerLoad())
    assert ledger.preemptions == 11
    assert len(ledger._last) <= 256


@pytest.mark.parametrize(
    ("header", "valid"),
    [
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", True),
        ("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00", True),
        ("ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", False),
        ("00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", False),
        ("00-00000000000000000000000000000000-00f067aa0ba902b7-01", False),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01", False),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more", False),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0", False),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\n", False),
        ("", False),
        ("0" * 100_000, False),
    ],
)
def test_a_header_that_is_none_is_taken_for_none(header: str, valid: bool) -> None:
    assert valid_traceparent(header) == (header if valid else "")


def test_the_flag_says_whether_the_trace_is_recorded() -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-"
    assert [is_sampled(trace + flags) for flags in ("00", "01", "02", "03", "ff")] == [
        False,
        True,
        False,
        True,
        True,
    ]
