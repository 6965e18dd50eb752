"""Native expert clients and servers over the simulated network, disturbed by seed and judged by a record of their own.

The code under test is what ships: `expert_client_begin` / `expert_client_step`, `expert_server_step` and the frames
beneath them. The world is their host: it delivers, freezes, kills, restarts and attaches; it knows every right answer
before the first call, from the kernels alone, and asks neither client nor server whether a reply was right.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import random
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from experts import native
from experts.model import Dtype
from p2p import native as p2p_native
from p2p.endpoint import PeerGone
from p2p.window import WindowLayout
from tests.experts.steps import LOST, MODEL_HASH, NO_SERVER, OK, PENDING, REPLICAS
from tests.sim.asks import MOST_TOKENS, SHAPE, Ask, asks
from tests.sim.network import Adversary, SimEndpoint, SimNetwork, SimPeer, SimWindow

LAYOUT = WindowLayout(slots=3, payload_bytes=512)
LANES = 2
DEADLINE_NS = 5_000_000_000
STEP_NS = 4_000
WAKE_NS = 5_000_000  # no wait of production is longer
UPKEEP_NS = 250_000_000


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often, for each call begun, a fault strikes; times are (shortest, longest)."""

    freeze_server: float = 0.0
    freeze_client: float = 0.0
    restart_server: float = 0.0
    restart_client: float = 0.0
    relink: float = 0.0
    freeze_ns: tuple[int, int] = (10_000, 200_000_000)
    absent_ns: tuple[int, int] = (0, 30_000_000)  # from a server's death to its successor


@dataclass(eq=False)
class Link:
    """The windows of one client and one server."""

    client: Client
    server: Server
    request: SimWindow  # the server's
    reply: SimWindow  # the client's
    to_server: SimPeer
    to_client: SimPeer
    life: tuple[socket.socket, socket.socket]
    place: int = -1  # of the client at the server
    index: int = -1  # of the server at the client


@dataclass(eq=False)
class Host:
    """One simulated process."""

    endpoint: SimEndpoint
    handle: int
    links: list[Link] = field(default_factory=list)  # current ones
    on_thaw: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class Server(Host):
    """An expert server; its successors have the same number."""

    number: int = 0


@dataclass(eq=False)
class Client(Host):
    """An attention worker's client, which makes one call after another."""

    number: int = 0
    epoch: int = 0
    leaving: list[Link] = field(default_factory=list)
    ask: Ask | None = None
    deadline_ns: int = 0
    wake_ns: int = 0
    out: ctypes.Array[ctypes.c_char] = field(
        default_factory=lambda: ctypes.create_string_buffer(MOST_TOKENS * SHAPE.hidden * 4)
    )


class World:
    """Clients and servers on one network.

    Args:
        seed: Of everything that happens.
        adversary: The network's habits.
        faults: What befalls the processes.
        replicas: Servers that hold an expert.
        one_at_a_time: No process fails while another has not come back from its failure.
        library: The native code under test; the product's unless given.
    """

    def __init__(
        self,
        seed: int,
        adversary: Adversary,
        faults: Faults,
        *,
        servers: int = 3,
        clients: int = 2,
        replicas: int = 2,
        dtype: Dtype = Dtype.FLOAT32,
        one_at_a_time: bool = False,
        library: ctypes.CDLL | None = None,
    ) -> None:
        self.network = SimNetwork(seed, adversary)
        self.random = random.Random(seed)
        self.faults, self.replicas, self.dtype, self.one_at_a_time = faults, replicas, dtype, one_at_a_time
        self.library = library or native.load()
        self.weights, self.asks = asks(dtype)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.latest_ns = 0  # by how much a call outlived its deadline
        self._chores: list[tuple[int, int, Callable[[], None]]] = []
        self._upkeep_ns = 0
        self._lives = itertools.count(1)
        self._down = 0
        self.servers = [self._new_server(number) for number in range(servers)]
        self.clients: list[Client] = []
        for number in range(clients):
            self.clients.append(self._new_client(number))

    def run(self, calls: int) -> Counter[str]:
        """Until so many more calls have ended, rightly or not; what happened in all so far."""
        until = self._ended() + calls
        while self._ended() < until:
            self._turn()
        return self.counts

    def heal(self) -> None:
        """Faults stop; what is under way or frozen comes back, and links without a free slot are made anew."""
        self.faults = Faults()
        self.network.adversary = replace(
            self.network.adversary, late_rate=0, repeat_rate=0, loss_rate=0, overtake_rate=0, flip_rate=0
        )
        while self._chores or any(client.ask for client in self.clients):
            self._turn(begin=False)
        self.network.settle()
        self._replace_full_links()
        while self._chores:
            self._turn(begin=False)

    def close(self) -> None:
        """Free everything."""
        for client in self.clients:
            self.library.expert_client_free(client.handle)
        for server in self.servers:
            if not server.endpoint.dead:
                self.library.expert_server_free(server.handle)
        for link in [link for client in self.clients for link in (*client.links, *client.leaving)]:
            _hang_up(link)

    def _ended(self) -> int:
        return self.counts["right"] + self.counts["lost"] + len(self.wrong)

    def _turn(self, *, begin: bool = True) -> None:
        network = self.network
        now_ns = network.now()
        due_ns = min(client.wake_ns for client in self.clients)
        if (at_ns := network.next_ns()) is not None and at_ns < due_ns:
            due_ns = at_ns
        if self._chores and self._chores[0][0] < due_ns:
            due_ns = self._chores[0][0]
        network.advance(max(0, due_ns - now_ns) + STEP_NS)
        now_ns += max(0, due_ns - now_ns) + STEP_NS
        while self._chores and self._chores[0][0] <= now_ns:
            heapq.heappop(self._chores)[2]()
        if now_ns >= self._upkeep_ns:
            self._upkeep_ns = now_ns + UPKEEP_NS
            self._replace_full_links()
        for server in self.servers:
            if not server.endpoint.frozen and not server.endpoint.dead:
                for link in server.links:
                    if link.request.rung:
                        self._serve(server, now_ns)
                        break
        for client in self.clients:
            if client.endpoint.frozen:
                client.wake_ns = now_ns + WAKE_NS
            elif client.ask is None:
                if begin and now_ns >= client.wake_ns:
                    self.begin(client)
                elif not begin:
                    client.wake_ns = now_ns + WAKE_NS
            elif now_ns >= client.wake_ns or any(link.reply.rung for link in client.links):
                self.step(client)

    def _serve(self, server: Server, now_ns: int) -> None:
        for link in server.links:
            link.request.rung = False
        while self.library.expert_server_step(server.handle, now_ns) > 0:
            for link in server.links:
                self._forward(server.endpoint, link.to_client)

    def _forward(self, endpoint: SimEndpoint, peer: SimPeer) -> None:
        try:
            endpoint.forward_slots(peer, LAYOUT)
        except PeerGone:
            # Its link hangs up, or does not: the one who wrote learns of it as in production.
            self.counts["to the gone"] += 1

    def begin(self, client: Client) -> None:
        """Begin a call."""
        now_ns = self.network.now()
        self.counts["begun"] += 1
        ask = client.ask = self.random.choice(self.asks)
        client.out.raw = ask.before
        client.deadline_ns, client.wake_ns = now_ns + DEADLINE_NS, now_ns + WAKE_NS
        rows, ids, gates = ask.addresses
        out = ctypes.addressof(client.out)
        status = self.library.expert_client_begin(
            client.handle, ask.layer, rows, ask.n, ids, gates, out, None, now_ns, client.deadline_ns
        )
        if status != OK:
            raise AssertionError(f"seed {self.network.seed}: a call could not begin, code {status}")
        for link in client.links:
            self._forward(client.endpoint, link.to_server)
        self._disturb()

    def step(self, client: Client) -> None:
        """One step of a call; judges it where it ends."""
        now_ns = self.network.now()
        for link in client.links:
            link.reply.rung = False
        status = self.library.expert_client_step(client.handle, now_ns)
        for link in (*client.links, *client.leaving):
            self._forward(client.endpoint, link.to_server)
        client.wake_ns = min(now_ns + WAKE_NS, client.deadline_ns)
        if status == PENDING:
            if now_ns >= client.deadline_ns:
                raise AssertionError(f"seed {self.network.seed}: a call hangs; {self.counts}")
            return
        self._judge(client, status, now_ns)
        client.ask = None
        client.wake_ns = now_ns + int(self.random.random() * 40_000)
        self._release_idle(client)

    def _judge(self, client: Client, status: int, now_ns: int) -> None:
        ask = client.ask
        assert ask is not None
        found = client.out.raw[: len(ask.before)]
        self.latest_ns = max(self.latest_ns, now_ns - client.deadline_ns)
        if status == OK and found == ask.after:
            self.counts["right"] += 1
        elif status == LOST and found == ask.before and now_ns >= client.deadline_ns:
            self.counts["lost"] += 1
        else:
            self.wrong.append(f"call {self.counts['begun']} of client {client.number}: status {status}")

    # Faults.

    def _disturb(self) -> None:
        faults = self.faults
        for rate, strike in (
            (faults.freeze_server, self._freeze_server),
            (faults.freeze_client, self._freeze_client),
            (faults.restart_server, self._restart_server),
            (faults.restart_client, self._restart_client),
            (faults.relink, self._relink_any),
        ):
            if rate and self.random.random() < rate:
                # Not only where a call begins.
                self._later(int(self.random.random() * 60_000), lambda strike=strike: self._strike(strike))

    def _strike(self, strike: Callable[[], None]) -> None:
        if not (self.one_at_a_time and self._down):
            strike()

    def _later(self, ns: int, chore: Callable[[], None]) -> None:
        heapq.heappush(self._chores, (self.network.now() + ns, self.counts["chores"], chore))
        self.counts["chores"] += 1

    def _between(self, times_ns: tuple[int, int]) -> int:
        # Short ones as likely as long ones, by order of magnitude.
        shortest, longest = times_ns
        return int(max(1, shortest) * (max(1, longest) / max(1, shortest)) ** self.random.random())

    def _freeze_server(self) -> None:
        self._freeze(self.random.choice(self.servers), "servers frozen")

    def _freeze_client(self) -> None:
        self._freeze(self.random.choice(self.clients), "clients frozen")

    def _freeze(self, host: Host, count: str) -> None:
        if host.endpoint.frozen or host.endpoint.dead:
            return
        self.counts[count] += 1
        self._down += 1
        host.endpoint.freeze()
        self._later(self._between(self.faults.freeze_ns), lambda: self._thaw(host))

    def _thaw(self, host: Host) -> None:
        self._down -= 1
        if host.endpoint.dead:
            return
        host.endpoint.thaw()
        for link in host.links:
            (link.request if isinstance(host, Server) else link.reply).rung = True
        # What it held back lands first.
        for chore in host.on_thaw:
            self._later(self.network.adversary.notice_ns, chore)
        host.on_thaw.clear()

    def _when_awake(self, host: Host, chore: Callable[[], None]) -> None:
        if host.endpoint.frozen:
            host.on_thaw.append(lambda: self._when_awake(host, chore))
        elif not host.endpoint.dead:
            chore()

    def _restart_server(self) -> None:
        server = self.random.choice(self.servers)
        if server.endpoint.dead:
            return
        self.counts["servers restarted"] += 1
        self._down += 1
        server.endpoint.kill()
        self.library.expert_server_free(server.handle)
        for link in server.links:
            self._later(self.network.adversary.notice_ns, link.life[1].close)
        self._later(self._between(self.faults.absent_ns), lambda: self._succeed(server))

    def _succeed(self, server: Server) -> None:
        self._down -= 1
        successor = self._new_server(server.number)
        self.servers[server.number] = successor
        for client in self.clients:
            self._when_awake(client, lambda client=client: self._join(client, successor))

    def _join(self, client: Client, server: Server) -> None:
        if not server.endpoint.dead and client in self.clients:
            self._attach(client, server)

    def _restart_client(self) -> None:
        client = self.random.choice(self.clients)
        self.counts["clients restarted"] += 1
        self.counts["cut short"] += client.ask is not None
        client.endpoint.kill()
        self.library.expert_client_free(client.handle)
        for link in (*client.links, *client.leaving):
            link.life[0].close()
            if link.server.endpoint.dead:
                continue
            # The server lets go at once, and whoever comes next is given the same memory. What the server itself
            # wrote for the dead still travels, longest where it is frozen.
            link.request.close()
            self._when_awake(link.server, lambda link=link: self._dismiss(link))
        self.clients[client.number] = self._new_client(client.number)

    def _dismiss(self, link: Link) -> None:
        server = link.server
        if link in server.links:
            server.links.remove(link)
            self.library.expert_server_remove_client(server.handle, link.place)
        late = 2 * self.network.adversary.notice_ns
        self._later(late, lambda: self._when_awake(server, lambda: server.endpoint.disconnect(link.to_client)))

    def _replace_full_links(self) -> None:
        """What is left to do where every slot waits for a reply that was lost: tear the link down."""
        stats = native.ServerStats()
        for client in self.clients:
            for link in list(client.links):
                self.library.expert_client_stats(client.handle, link.index, stats)
                if stats.held_slots == LAYOUT.slots:
                    self._relink(link)

    def _relink_any(self) -> None:
        if links := [link for client in self.clients for link in client.links]:
            self._relink(self.random.choice(links))

    def _relink(self, link: Link) -> None:
        ends = link.server.endpoint, link.client.endpoint
        if not any(end.dead or end.frozen for end in ends):
            self.counts["links made anew"] += 1
            self._attach(link.client, link.server)

    # Links.

    def _new_server(self, number: int) -> Server:
        incarnation = next(self._lives)
        s = SHAPE
        cores = (ctypes.c_int32 * 1)(-1)
        handle = self.library.expert_server_new(
            *(s.layers, s.experts, s.hidden, s.intermediate, s.top_k, self.dtype, MODEL_HASH, incarnation),
            *(1, cores, None, LAYOUT.payload_bytes, None),
        )
        for layer in range(s.layers):
            for expert in range(s.experts):
                gate_up, down = self.weights.gate_up[layer, expert], self.weights.down[layer, expert]
                addresses = gate_up.ctypes.data, down.ctypes.data
                self.library.expert_server_set_expert(handle, 0, layer, expert, *addresses)
        endpoint = self.network.endpoint(f"server-{number}", incarnation)
        return Server(endpoint=endpoint, handle=handle, number=number)

    def _new_client(self, number: int) -> Client:
        incarnation = next(self._lives)
        s = SHAPE
        handle = self.library.expert_client_new(
            *(s.layers, s.experts, s.hidden, s.top_k, self.dtype, MODEL_HASH, incarnation, LANES, None),
            MOST_TOKENS,
        )
        endpoint = self.network.endpoint(f"client-{number}", incarnation)
        client = Client(endpoint=endpoint, handle=handle, number=number, wake_ns=self.network.now())
        for server in self.servers:
            if not server.endpoint.dead:
                self._attach(client, server)
        return client

    def _attach(self, client: Client, server: Server) -> None:
        """Exchange windows; routes name the new link from now on, and the one before it leaves."""
        library, slots = self.library, (LAYOUT.slots, LAYOUT.payload_bytes)
        reply = client.endpoint.export_window(LAYOUT.nbytes)
        request = server.endpoint.export_window(LAYOUT.nbytes)
        for window in (reply, request):
            p2p_native.load().p2p_window_init(window.address, window.nbytes, window.incarnation, *slots)
        to_server = client.endpoint.connect(request.descriptor)
        to_client = server.endpoint.connect(reply.descriptor)
        link = Link(client, server, request, reply, to_server, to_client, socket.socketpair())
        theirs = native.ClientLink(
            rx=request.address,
            rx_bytes=request.nbytes,
            tx=to_client.address,
            tx_bytes=to_client.nbytes,
            client_incarnation=client.endpoint.incarnation,
            client_lanes=LANES,
            bell_lanes=LANES,
            weight=1,
            slots=LAYOUT.slots,
            slot_bytes=LAYOUT.payload_bytes,
        )
        ours = native.ServerLink(
            tx=to_server.address,
            tx_bytes=to_server.nbytes,
            rx=reply.address,
            rx_bytes=reply.nbytes,
            server_incarnation=server.endpoint.incarnation,
            liveness_fd=link.life[0].fileno(),
            slots=LAYOUT.slots,
            slot_bytes=LAYOUT.payload_bytes,
            lane=server.number % LANES,
            lanes=1,
        )
        link.place = library.expert_server_add_client(server.handle, theirs)
        link.index = library.expert_client_add_server(client.handle, ours)
        if link.place < 0 or link.index < 0:
            raise AssertionError(f"attach refused with {link.place} and {link.index}")
        before = [old for old in client.links if old.server.number == server.number]
        server.links.append(link)
        client.links = [old for old in client.links if old not in before] + [link]
        self._publish(client)
        for old in before:
            library.expert_client_remove_server(client.handle, old.index)
            client.leaving.append(old)
        self._release_idle(client)

    def _publish(self, client: Client) -> None:
        table = np.full((SHAPE.layers, SHAPE.experts, REPLICAS), NO_SERVER, np.uint8)
        indexes = {link.server.number: link.index for link in client.links}
        for layer in range(SHAPE.layers):
            for expert in range(SHAPE.experts):
                able = [(layer + expert + copy) % len(self.servers) for copy in range(self.replicas)]
                named = [indexes[number] for number in able if number in indexes]
                table[layer, expert, : len(named)] = named
        client.epoch += 1
        self.library.expert_client_publish_routes(client.handle, client.epoch, table.ctypes.data)

    def _release_idle(self, client: Client) -> None:
        for link in list(client.leaving):
            if not self.library.expert_client_server_idle(client.handle, link.index):
                continue
            client.leaving.remove(link)
            client.endpoint.disconnect(link.to_server)
            if link.server.endpoint.dead:
                link.reply.close()
                _hang_up(link)
                continue
            # A living server's link is torn down before its memory may be anybody else's.
            notice_ns = self.network.adversary.notice_ns
            self._later(notice_ns, lambda link=link: self._when_awake(link.server, lambda: self._part(link)))

    def _part(self, link: Link) -> None:
        if link in link.server.links:
            link.server.links.remove(link)
            self.library.expert_server_remove_client(link.server.handle, link.place)
        link.server.endpoint.disconnect(link.to_client)
        for window in (link.request, link.reply):
            window.close()
        _hang_up(link)


def _hang_up(link: Link) -> None:
    for end in link.life:
        end.close()
