"""What clients saw while nothing failed, and that they see the same whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from eaas.cluster.local import LocalCluster
from eaas.cluster.status import fetch_status
from tests.e2e.clients import Seen, stream_all
from tests.e2e.waiting import wait_for

CLIENTS, TOKENS = 12, 48
PROMPTS = [f"{'word ' * (number % 7)}client {number} asks" for number in range(CLIENTS)]


class Calm:
    """A cluster, and the texts of its clients' streams without a fault."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.wait_whole()
        self.texts = self._streams(lambda count: None)

    def _streams(self, on_token: Callable[[int], None]) -> list[list[str]]:
        seen: list[Seen] = stream_all(
            self.cluster.url, self.cluster.config.served_model_name, PROMPTS, TOKENS, on_token
        )
        errors = [repr(one.error) for one in seen if one.error]
        assert not errors, f"{errors}"
        ends = [(one.finish, len(one.texts)) for one in seen]
        assert ends == [(["length"], TOKENS)] * CLIENTS, f"{ends}"
        return [one.texts for one in seen]

    def check(self, what: str, act: Callable[[], None] = lambda: None, at: float = 0.3) -> None:
        """Stream again, and act when that share of all tokens has come: every token comes, once, unchanged."""
        moment = int(CLIENTS * TOKENS * at)

        def on_token(count: int) -> None:
            if count == moment:
                act()

        assert self._streams(on_token) == self.texts, f"{what}: tokens changed"

    def serving(self) -> list[str]:
        """Names of the expert servers that serve."""
        return [
            member["name"]
            for member in fetch_status(self.cluster.url)["members"]
            if member["pool"] == "expert" and member["state"] == "serving"
        ]

    def worker_pid(self) -> int:
        """Of an attention worker that serves, or that is suspect: on a busy host one may be for a moment."""
        members = fetch_status(self.cluster.url)["members"]
        found = [m for m in members if m["pool"] == "attention" and m["state"] in ("serving", "suspect")]
        assert found, f"no attention worker serves: {members}"
        return found[0]["pid"]

    def is_whole(self) -> bool:
        """Whether the expert pool has its size and every expert its replicas."""
        config, state = self.cluster.config, fetch_status(self.cluster.url)
        return len(self.serving()) == config.experts and state["replicas_min"] >= config.replicas

    def wait_whole(self) -> None:
        """Wait until the expert pool is as it was begun with."""
        wait_for("a whole pool", self.is_whole, self.cluster)
