"""No wrong reply and no hang, whatever the network and the hosts do; and proof that each check is needed.

A longer run: make sim ARGS="--calls 1000000 --seed 1".
"""

from __future__ import annotations

import ctypes
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from experts.model import Dtype
from experts.wire import Kind
from p2p import build
from tests.experts.wire_codec import HEADER, rows_digest
from tests.sim.expert_world import LAYOUT, WAKE_NS, Faults, Link, World
from tests.sim.mutants import FLAGS, Mutant
from tests.sim.network import Adversary

CALLS = 6_000
CALLS_OF_A_SEED = 25_000
HERE = Path(__file__).parent

HOSTILE = Adversary(
    pieces=3,
    late_rate=0.002,
    late_ns=(50_000, 20_000_000),
    repeat_rate=0.01,
    loss_rate=0.0003,
    overtake_rate=0.02,
    flip_rate=0.0005,
    recycles=True,
)
RARE = Faults(
    freeze_server=1 / 400,
    freeze_client=1 / 1500,
    restart_server=1 / 1500,
    restart_client=1 / 1500,
    relink=1 / 1500,
)
FLAPPING = Faults(
    freeze_server=0.03,
    freeze_client=0.01,
    restart_server=0.01,
    restart_client=0.05,
    relink=0.01,
    freeze_ns=(5_000, 5_000_000),
    absent_ns=(0, 2_000_000),
)
# Clients that hardly live for one call: sequences begin anew while the old life's frames still travel.
DYING = Faults(
    freeze_server=0.03,
    freeze_client=0.01,
    restart_server=0.02,
    restart_client=0.4,
    relink=0.01,
    freeze_ns=(5_000, 500_000),
    absent_ns=(0, 2_000_000),
)
ALIKE = 40  # calls of one layer and one routing, which only their rows and answers tell apart
STRUCK = ("servers frozen", "clients frozen", "servers restarted", "clients restarted", "links made anew")


@pytest.mark.timeout(0)
def test_no_wrong_reply_is_accepted_no_call_hangs_and_all_comes_back_when_faults_stop(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, seed = request.config.getoption("--calls", None), request.config.getoption("--seed", 1)
    total: Counter[str] = Counter()
    for share, faults in ((0.7, RARE), (0.2, FLAPPING), (0.1, DYING)):
        left = int((calls or CALLS) * share)
        while left > 0:
            world = World(seed, HOSTILE, faults, dtype=(Dtype.FLOAT32, Dtype.BFLOAT16)[seed % 2])
            if faults is DYING:
                world.asks = world.asks[:ALIKE]
            counts = world.run(min(left, CALLS_OF_A_SEED))
            told = f"seed {seed}: {dict(counts)}, network {vars(world.network.counts)}"
            assert not world.wrong, f"{told}: {world.wrong}"
            # A frozen client ends its call when it thaws.
            assert world.latest_ns <= WAKE_NS + faults.freeze_ns[1], told
            # Lost where the replies of every replica were, in every slot: never more than a few.
            assert counts["lost"] <= 2 + counts["right"] / 10_000, told
            lost = counts["lost"]
            world.heal()
            world.run(50)
            assert not world.wrong and world.counts["lost"] == lost, f"after the faults, {told}"
            total.update(world.counts)
            total.update({f"network {kind}": n for kind, n in vars(world.network.counts).items()})
            left -= min(left, CALLS_OF_A_SEED)
            seed += 1
            if calls:
                with capsys.disabled():
                    print(told, flush=True)
            world.close()
    network = ("late", "repeated", "lost", "overtook", "flipped", "recycled")
    idle = [kind for kind in (*STRUCK, *(f"network {kind}" for kind in network)) if not total[kind]]
    assert not idle, f"never happened: {idle}"
    if calls:
        with capsys.disabled():
            print(f"in all: {dict(total)}", flush=True)


def test_with_one_failure_at_a_time_and_a_network_that_keeps_its_promise_no_call_is_lost() -> None:
    faults = Faults(
        freeze_server=1 / 100,
        restart_server=1 / 100,
        freeze_ns=(100_000, 3_000_000_000),
        absent_ns=(0, 500_000_000),
    )
    for seed in range(3):
        world = World(seed, Adversary(), faults, one_at_a_time=True)
        counts = world.run(1_500)
        assert not world.wrong and not counts["lost"], f"seed {seed}: {dict(counts)} {world.wrong}"
        assert counts["servers frozen"] and counts["servers restarted"], f"seed {seed}: {dict(counts)}"
        world.close()


def test_one_seed_gives_one_run() -> None:
    def run(seed: int) -> tuple[Counter[str], int, dict[str, int]]:
        world = World(seed, HOSTILE, FLAPPING)
        counts = world.run(300)
        world.close()
        return counts, world.network.now(), vars(world.network.counts)

    assert run(1) == run(1)
    assert run(1) != run(2)


FRAME, CLIENT = "p2p/native/frame.cpp", "experts/native/client_exchange.cpp"
OPENS = "    uint64_t found = checksum(header_out, frame + P2P_FRAME_HEADER, header_out->length, copy);\n"
COPIES = "    std::memcpy(copy, frame + P2P_FRAME_HEADER, header_out->length);\n"
VALIDATES = OPENS.replace(", copy)", ", nullptr)")
SEQUENCE = Mutant(source=FRAME, says="if (header_out->sequence != sequence) return P2P_E_SEQUENCE;", instead="")
INCARNATION = Mutant(source=FRAME, says="if (header_out->receiver != receiver) return P2P_E_INCARNATION;", instead="")
SENDER = Mutant(source=FRAME, says="if (header_out->sender != sender) return P2P_E_SENDER;", instead="")
CHECKSUM = Mutant(
    source=FRAME,
    says="return found == header_out->checksum ?",
    instead="return found == header_out->checksum || header_out->length ?",
)
USES_THE_SLOT = Mutant(
    source=CLIENT,
    says="reinterpret_cast<const float*>(chunk.reply + sizeof(WireHeader))",
    instead="reinterpret_cast<const float*>(static_cast<const uint8_t*>(memory) + P2P_FRAME_OFFSET + 64)",
)
ATTEMPT = Mutant(source=CLIENT, says=" || (status != STATUS_INVALID && frame.attempt != chunk.attempt)", instead="")
NEVER_ASKS_AGAIN = Mutant(source=CLIENT, says="&& now_ns >= server.replan_at_ns", instead="&& false")
VALIDATES_THEN_COPIES = Mutant(source=FRAME, says=OPENS, instead=VALIDATES + COPIES)
VALIDATES_THE_SLOT = Mutant(source=FRAME, says=OPENS, instead=COPIES + VALIDATES)


@pytest.mark.parametrize(
    ("mutant", "faults", "calls"),
    [
        pytest.param(SEQUENCE, RARE, 2_000, id="sequence"),
        pytest.param(CHECKSUM, RARE, 2_000, id="checksum"),
        pytest.param(USES_THE_SLOT, RARE, 2_000, id="copy"),
        pytest.param(INCARNATION, DYING, 12_000, id="incarnation"),
        pytest.param(SENDER, DYING, 12_000, id="sender"),
    ],
)
def test_without_a_check_wrong_replies_are_accepted(mutant: Mutant, faults: Faults, calls: int, tmp_path: Path) -> None:
    world = World(1, HOSTILE, faults, library=mutant.library(tmp_path))
    if faults is DYING:
        world.asks = world.asks[:ALIKE]
    while not world.wrong and world.counts["right"] < calls:
        world.run(50)
    assert world.wrong, f"seed 1: the mutant survives {dict(world.counts)}"
    world.close()


def forge_reply(link: Link, attempt: int) -> None:
    """A sealed and signalled reply to the link's first request, right in all but the attempt and the rows."""
    at = LAYOUT.slot_offset(0)
    request, window = link.to_server.image[at:].view(np.uint8), link.reply.memory[at:]
    header = request[128:192].copy().view(HEADER)
    header["kind"] = Kind.REPLY
    rows = int(header["pairs"][0]) * 64
    window[192 : 192 + rows] = 1
    header["digest"] = rows_digest(window[192 : 192 + rows].view(np.float32).reshape(-1, 16))
    window[128:192] = header.view(np.uint8)
    length, owner, sender = 64 + rows, link.client.endpoint.incarnation, link.server.endpoint.incarnation
    fields = np.array([0, owner, 1, attempt | length << 32, 0, sender, 0, 0], np.uint64)
    library = ctypes.CDLL(str(build.ROOT / "p2p" / "_p2p.so"))
    address = ctypes.c_void_p(link.reply.address + at)
    library.p2p_frame_seal(address, ctypes.c_void_p(fields.ctypes.data))
    library.p2p_signal_store(address, ctypes.c_uint64(1))


def world_with_one_request(library: ctypes.CDLL | None = None) -> tuple[World, Link]:
    world = World(1, Adversary(), Faults(), servers=1, clients=1, replicas=1, library=library)
    world.begin(world.clients[0])
    return world, world.clients[0].links[0]


def test_a_reply_to_another_attempt_is_refused() -> None:
    """A sequence is sent once, with one attempt, so that the world cannot make such a frame: it is made here."""
    for attempt, judged in ((1, False), (0, True)):
        world, link = world_with_one_request()
        forge_reply(link, attempt)
        world.step(link.client)
        assert bool(world.wrong) == judged, f"attempt {attempt}"
        world.close()


def test_without_the_attempt_a_reply_to_another_is_accepted(tmp_path: Path) -> None:
    world, link = world_with_one_request(ATTEMPT.library(tmp_path))
    forge_reply(link, 1)
    world.step(link.client)
    assert world.wrong
    world.close()


@pytest.mark.parametrize(
    ("mutant", "verdict"),
    [
        pytest.param(None, 0, id="as shipped"),
        pytest.param(VALIDATES_THEN_COPIES, 1, id="validates, then copies"),
        pytest.param(VALIDATES_THE_SLOT, 2, id="copies, then validates the slot"),
    ],
)
def test_a_write_that_lands_while_a_frame_is_copied_is_never_accepted(
    mutant: Mutant | None, verdict: int, tmp_path: Path
) -> None:
    frame = mutant.write(tmp_path) if mutant else build.ROOT / FRAME
    program = tmp_path / "late_write"
    build.run_compiler([*FLAGS, str(HERE / "late_write.cpp"), str(frame), "-o", str(program)])
    assert subprocess.run([program]).returncode == verdict


LOSSY = Adversary(loss_rate=0.003)


def test_what_is_lost_on_the_way_to_or_from_a_sole_replica_is_asked_for_again() -> None:
    for seed in range(3):
        world = World(seed, LOSSY, Faults(), replicas=1)
        counts = world.run(500)
        assert not world.wrong and not counts["lost"], f"seed {seed}: {dict(counts)} {world.wrong}"
        assert world.network.counts.lost > 10, f"seed {seed}"
        world.close()


def test_a_client_that_never_asks_again_loses_calls(tmp_path: Path) -> None:
    world = World(0, LOSSY, Faults(), replicas=1, library=NEVER_ASKS_AGAIN.library(tmp_path))
    assert world.run(500)["lost"] > 0, "seed 0"
    world.close()


def test_a_signal_that_comes_again_after_its_answer_is_not_answered() -> None:
    world, link = world_with_one_request()
    server, at = link.server, LAYOUT.slot_offset(0)
    world.network.settle()
    assert world.library.expert_server_step(server.handle, 0) == 1
    answered = link.to_client.image.tobytes()
    link.request.memory[at : at + 8].view(np.uint64)[0] = 0
    assert world.library.expert_server_step(server.handle, 0) == 0
    assert link.to_client.image.tobytes() == answered, "the answer may still be on its way"
    world.close()
