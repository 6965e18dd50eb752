"""API keys: kept as hashes, asked of everyone, with budgets, changed while the gateway runs, never written anywhere."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaas.gateway import keys as keys_module
from eaas.gateway.budgets import Account, Budget
from eaas.gateway.keys import MOST_KEYS, Key, KeyRing, KeysInvalid, digest_of, new_key, read_keys, write_keys
from eaas.gateway.protection import OPERATOR_PATHS
from tests.eaas.gateway_world import GatewayProcess, World, eventually

PLAIN = "/v1/completions"
PROMPT = "the-quick-brown-secret-prompt"


def eaas(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eaas.ops.cli", *arguments], capture_output=True, text=True, timeout=60
    )


def key_of(name: str, **more: Any) -> tuple[str, Key]:
    key = new_key()
    return key, Key(name=name, sha256=digest_of(key), **more)


def ask(url: str, key: str, tokens: int = 4, **more: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, **more}
    return httpx.post(url + PLAIN, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("model"))
    world.router.show(world.worker())
    yield world
    world.close()


class Guarded:
    """A gateway with a keys file."""

    def __init__(self, world: World, path: Path, keys: list[Key], *arguments: str) -> None:
        write_keys(path, keys)
        self.path = path
        self.gateway = GatewayProcess(
            world, "--keys-file", str(path), "--log-level", "debug", "--log-requests", *arguments
        )
        self.url = self.gateway.url
        eventually(lambda: httpx.get(self.url + "/health").status_code == 200, "the gateway is healthy")

    def metric(self, key: str, name: str) -> float:
        page = httpx.get(self.url + "/metrics", headers={"authorization": f"Bearer {key}"}).text
        found = [line for line in page.splitlines() if line.startswith(name)]
        return float(found[0].rpartition(" ")[2]) if found else 0.0


@pytest.fixture(scope="module")
def alice() -> tuple[str, Key]:
    return key_of("alice", operator=True)


@pytest.fixture(scope="module")
def guarded(world: World, tmp_path_factory: pytest.TempPathFactory, alice: tuple[str, Key]) -> Iterator[Guarded]:
    """One gateway for a file's tests, whose only key is Alice's when a test begins and when it ends."""
    guarded = Guarded(world, tmp_path_factory.mktemp("keys") / "keys.json", [alice[1]])
    yield guarded
    guarded.gateway.stop()


def test_a_key_is_printed_once_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made = eaas("keys", "new", str(path), "alice", "--rpm", "60", "--tpm", "1000", "--days", "30")
    key = made.stdout.strip()
    assert made.returncode == 0 and re.fullmatch(r"eaas-[A-Za-z0-9_-]{43}", key), made
    text = path.read_text()
    assert key not in text and key.removeprefix("eaas-") not in text
    assert hashlib.sha256(key.encode()).hexdigest() in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (entry,) = read_keys(path)
    assert (entry.name, entry.requests_per_minute, entry.tokens_per_minute) == ("alice", 60, 1000)
    listed = eaas("keys", "list", str(path)).stdout
    assert "alice" in listed and key not in listed and entry.sha256[:12] in listed


def test_a_successor_has_the_budgets_and_the_weight_of_the_key_before_unless_told_otherwise(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys.json"

    def newest(*given: str) -> tuple[int | None, int | None, int]:
        made = eaas("keys", "new", str(path), "alice", *given)
        assert made.returncode == 0, made.stderr
        key = read_keys(path)[-1]
        return key.requests_per_minute, key.tokens_per_minute, key.weight

    assert newest() == (None, None, 1)
    assert newest("--rpm", "60", "--weight", "3") == (60, None, 3)
    assert newest("--tpm", "1000") == (60, 1000, 3)
    assert newest("--rpm", "0", "--weight", "2") == (None, 1000, 2)
    assert newest() == (None, 1000, 2)


def test_keys_are_revoked_by_name_or_by_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = [eaas("keys", "new", str(path), name).stdout.strip() for name in ("a", "b", "b", "c")]
    assert eaas("keys", "revoke", str(path), "b").returncode == 0
    assert [key.name for key in read_keys(path)] == ["a", "c"]
    assert eaas("keys", "revoke", str(path), digest_of(keys[3])[:12]).returncode == 0
    assert [key.name for key in read_keys(path)] == ["a"]
    gone = eaas("keys", "revoke", str(path), "b")
    assert gone.returncode == 1 and "no key of the name 'b'" in gone.stderr
    assert [key.name for key in read_keys(path)] == ["a"], "a revocation that failed changed the file"


@pytest.mark.parametrize("name", ["", "two words", "x" * 65, "-dash", "a/b", "a\nb"])
def test_a_name_that_could_confuse_a_log_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "keys.json"
    refused = eaas("keys", "new", str(path), "--", name)
    assert refused.returncode == 1 and not path.exists(), refused


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "no file of `eaas keys`"),
        ("[]", "no file of `eaas keys`"),
        ('{"keys": [{"name": "a", "sha256": "12"}]}', "no file of `eaas keys`"),
        ('{"keys": [{"name": "a", "sha256": "%s", "key": "eaas-secret"}]}' % ("0" * 64), "unknown field"),
        (
            '{"keys": [{"name": "a", "sha256": "%s", "expires": "2027-01-01T00:00:00"}]}' % ("0" * 64),
            "no file",
        ),
        ('{"keys": [{"name": "a", "sha256": "%s", "requests_per_minute": 0}]}' % ("0" * 64), "no file"),
        ("[" * 100_000, "no file"),
        (
            '{"keys": ' + json.dumps([{"name": "a", "sha256": "0" * 64}] * (MOST_KEYS + 1)) + "}",
            "at most 1024",
        ),
        (" " * ((1 << 20) + 1), "over 1048576 bytes"),
    ],
    ids=["empty", "list", "short", "unknown", "no-zone", "zero", "deep", "many", "large"],
)
def test_a_file_that_makes_no_sense_is_refused_without_quoting_it(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(KeysInvalid, match=reason) as refused:
        read_keys(path)
    assert "secret" not in str(refused.value)
    with pytest.raises(KeysInvalid, match="cannot be read"):
        read_keys(tmp_path / "none")


@given(noise=st.binary(max_size=300), place=st.integers(0, 200))
@settings(max_examples=200, deadline=None)
def test_no_damaged_file_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, place: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    content = bytearray(json.dumps({"keys": [{"name": "a", "sha256": "0" * 64}]}).encode())
    content[place : place + len(noise) // 2] = noise
    path.write_bytes(content)
    try:
        assert all(isinstance(key, Key) for key in read_keys(path))
    except KeysInvalid:
        pass


def test_every_key_is_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever matches, all are compared, by a function that takes as long for any two of one length."""
    made = [key_of(f"k{number}") for number in range(5)]
    write_keys(tmp_path / "keys.json", [entry for _, entry in made])
    ring = KeyRing(tmp_path / "keys.json")
    compared: list[int] = []
    compare = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return compare(one, other)

    monkeypatch.setattr(keys_module.hmac, "compare_digest", counting)
    for key in (made[0][0], made[4][0], "eaas-other"):
        compared.clear()
        found = ring.find(key, time.time())
        assert compared == [32] * 5
        assert found == next((entry for given_key, entry in made if given_key == key), None)


def test_an_expired_key_is_unknown(tmp_path: Path) -> None:
    key, entry = key_of("a", expires=datetime.now(UTC) + timedelta(seconds=100))
    write_keys(tmp_path / "keys.json", [entry])
    ring = KeyRing(tmp_path / "keys.json")
    assert ring.find(key, time.time()) == entry
    assert ring.find(key, time.time() + 101) is None


@pytest.mark.parametrize(
    "given_header",
    [
        None,
        "Bearer",
        "Bearer eaas-wrong",
        "Bearer " + "x" * 5000,
        "Bearer \xe9\xff",
        "Basic eaas-wrong",
        "Basic ====",
        "Token KEY",
        "KEY",
    ],
)
def test_a_request_without_the_key_is_a_401_in_openais_form(
    guarded: Guarded, alice: tuple[str, Key], given_header: str | None
) -> None:
    header = (given_header or "").replace("KEY", alice[0]).encode("latin-1")
    headers = {} if given_header is None else {b"authorization": header}
    for method, path in (("POST", PLAIN), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/status")):
        reply = httpx.request(method, guarded.url + path, headers=headers)
        assert reply.status_code == 401, f"{method} {path}: {reply.text}"
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert reply.headers["www-authenticate"].startswith("Bearer")
        assert reply.headers["x-request-id"]


def test_clients_of_messages_bring_their_key_and_read_refusals_in_their_own_form(
    guarded: Guarded, alice: tuple[str, Key]
) -> None:
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    asked = guarded.url + "/v1/messages"
    assert httpx.post(asked, json=body, headers={"x-api-key": alice[0]}).json()["type"] == "message"
    for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": alice[0], "authorization": "Bearer wrong"}):
        reply = httpx.post(asked, json=body, headers=headers)
        assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error"), headers


def test_two_keys_in_one_request_are_none(guarded: Guarded, alice: tuple[str, Key]) -> None:
    twice = [("authorization", "Bearer x"), ("authorization", f"Bearer {alice[0]}")]
    assert httpx.get(guarded.url + "/v1/models", headers=twice).status_code == 401


def test_health_and_version_are_open_and_metrics_if_asked_for(world: World, guarded: Guarded, tmp_path: Path) -> None:
    for path in ("/health", "/version"):
        assert httpx.get(guarded.url + path).status_code == 200, path
        # Open is the question whether it lives, not the path.
        assert httpx.post(guarded.url + path).status_code == 401, path
    assert httpx.get(guarded.url + "/metrics").status_code == 401
    other = Guarded(world, tmp_path / "other.json", [], "--open-metrics")
    try:
        assert httpx.get(other.url + "/metrics").status_code == 200
        assert httpx.get(other.url + "/status").status_code == 401
    finally:
        other.gateway.stop()


def test_openais_client_and_a_browser_are_let_in_with_the_key(guarded: Guarded, alice: tuple[str, Key]) -> None:
    client = openai.OpenAI(base_url=guarded.url + "/v1", api_key=alice[0], max_retries=0)
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=3, temperature=0)
    assert answer.choices[0].text == "abc"
    streamed = client.completions.create(model="tiny", prompt="abc", max_tokens=3, stream=True)
    assert "".join(event.choices[0].text for event in streamed) == "abc"
    refused = guarded.metric(alice[0], 'eaas_refused_total{model="tiny",reason="key"}')
    stranger = openai.OpenAI(base_url=guarded.url + "/v1", api_key="eaas-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    basic = base64.b64encode(f"anyone:{alice[0]}".encode()).decode()
    assert httpx.get(guarded.url + "/status", headers={"authorization": f"Basic {basic}"}).status_code == 200
    assert guarded.metric(alice[0], 'eaas_refused_total{model="tiny",reason="key"}') == refused + 1


def test_only_an_operators_key_looks_at_the_cluster(world: World, tmp_path: Path) -> None:
    made = [eaas("keys", "new", str(tmp_path / "keys.json"), *more) for more in (("a",), ("b", "--operator"))]
    asker, operator = (one.stdout.strip() for one in made)
    guarded = Guarded(world, tmp_path / "keys.json", read_keys(tmp_path / "keys.json"))
    try:
        for path in (
            "/metrics",
            "/status",
            "/dashboard",
            "/dashboard/events",
            "//metrics",
            "/metrics/",
            "/%6detrics",
            "/metrics%0A",
            "/status%0A",
            "/dashboard/events%0a",
            "/load",
            "/server_info",
            "/METRICS",
        ):
            for key, statuses in ((asker, (403, 404)), (operator, (200, 404))):
                with httpx.stream(
                    "GET",
                    guarded.url + path,
                    headers={"authorization": f"Bearer {key}"},
                    follow_redirects=True,
                ) as reply:
                    assert reply.status_code in statuses, f"{path}: {reply.status_code}"
                    if reply.status_code == 403:
                        error = json.loads(reply.read())["error"]
                        assert error["code"] == "operator_key_needed" and "--operator" in error["message"]
                        assert "insufficient_scope" in reply.headers["www-authenticate"]
                    elif reply.status_code == 404:
                        assert path not in OPERATOR_PATHS
        for path in ("/pause", "/resume", "/abort_requests", "/inference/v1/abort_requests", "/reset_prefix_cache",
                     "/scale_elastic_ep"):  # fmt: skip
            refused = httpx.post(guarded.url + path, headers={"authorization": f"Bearer {asker}"})
            assert refused.status_code == 403, path
        assert ask(guarded.url, asker).status_code == 200
    finally:
        guarded.gateway.stop()


def test_keys_change_without_a_restart(guarded: Guarded, alice: tuple[str, Key]) -> None:
    """A new key is good, then the old one is not; a file that makes no sense changes nothing."""
    key, entry = key_of("bob")
    assert ask(guarded.url, key).status_code == 401
    write_keys(guarded.path, [alice[1], entry])
    eventually(lambda: ask(guarded.url, key).status_code == 200, "the new key is good")
    assert ask(guarded.url, alice[0]).status_code == 200
    write_keys(guarded.path, [entry])
    eventually(lambda: ask(guarded.url, alice[0]).status_code == 401, "the old key is refused")
    guarded.path.write_text("{")
    time.sleep(1.5)
    assert ask(guarded.url, key).status_code == 200, "a broken file locked everybody out"
    guarded.path.unlink()
    time.sleep(1.5)
    assert ask(guarded.url, key).status_code == 200, "a missing file locked everybody out"
    write_keys(guarded.path, [alice[1]])
    guarded.gateway.process.send_signal(signal.SIGHUP)
    eventually(lambda: ask(guarded.url, key).status_code == 401, "after SIGHUP the revoked key is refused")
    assert ask(guarded.url, alice[0]).status_code == 200


def test_a_budget_of_requests_is_a_429_that_says_when(world: World, tmp_path: Path) -> None:
    alice, bob = key_of("alice", requests_per_minute=3), key_of("bob", operator=True)
    guarded = Guarded(world, tmp_path / "keys.json", [alice[1], bob[1]])
    try:
        answers = [ask(guarded.url, alice[0]) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert [int(a.headers["x-ratelimit-remaining-requests"]) for a in answers] == [2, 1, 0]
        refused = ask(guarded.url, alice[0])
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        # One of three a minute comes back every 20 s, of which a few have passed.
        assert 10 <= int(refused.headers["retry-after"]) <= 20
        client = openai.OpenAI(base_url=guarded.url + "/v1", api_key=alice[0], max_retries=0)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="tiny", prompt="abc", max_tokens=3)
        models = httpx.get(guarded.url + "/v1/models", headers={"authorization": f"Bearer {alice[0]}"})
        assert models.status_code == 200, "what only reads costs nothing"
        other = ask(guarded.url, bob[0])
        assert other.status_code == 200, "another's budget is another's"
        assert not [name for name in other.headers if name.startswith("x-ratelimit")]
        assert guarded.metric(bob[0], 'eaas_refused_total{model="tiny",reason="key_requests"}') == 2
    finally:
        guarded.gateway.stop()


def test_a_budget_of_tokens_counts_what_was_generated(world: World, tmp_path: Path) -> None:
    """A long answer is reckoned at 256 tokens and settled at what it was; whoever is in debt waits."""
    alice = key_of("alice", tokens_per_minute=600)
    guarded = Guarded(world, tmp_path / "keys.json", [alice[1]])
    try:
        first = ask(guarded.url, alice[0], tokens=10)
        used = first.json()["usage"]["total_tokens"]
        assert used == len(PROMPT) + 10
        again = httpx.get(guarded.url + "/v1/models", headers={"authorization": f"Bearer {alice[0]}"})
        left = int(again.headers["x-ratelimit-remaining-tokens"])
        assert 600 - used <= left <= 600 - used + 60, "the answer is settled at what it took"
        assert ask(guarded.url, alice[0], tokens=700, stream=True).status_code == 200
        refused = ask(guarded.url, alice[0])
        assert refused.status_code == 429, refused.text
        assert "600 tokens a minute" in refused.json()["error"]["message"]
        debt = 700 + 2 * len(PROMPT) + 10 - 600
        # It is a debt of some 170 tokens, at 10 a second.
        assert debt / 10 - 8 <= int(refused.headers["retry-after"]) <= debt / 10 + 8
    finally:
        guarded.gateway.stop()


@pytest.mark.parametrize("form", ["text", "json"])
def test_neither_key_nor_prompt_is_ever_logged(world: World, tmp_path: Path, form: str) -> None:
    """A live run at the finest level, good and bad requests, in both forms of the log."""
    key, entry = key_of("alice", requests_per_minute=6)
    path = tmp_path / f"{form}.json"
    guarded = Guarded(world, path, [entry], "--log-format", form)
    secrets = [PROMPT, key, "eaas-another-secret", base64.b64encode(f"x:{key}".encode()).decode()]
    ask(guarded.url, key)
    ask(guarded.url, key, stream=True)
    ask(guarded.url, "eaas-another-secret")
    ask(guarded.url, key, n=100_000)
    ask(guarded.url, key, stop=[PROMPT] * 100)
    httpx.post(
        guarded.url + PLAIN + f"?prompt={PROMPT}",
        content=PROMPT,
        headers={"authorization": f"Bearer {key}"},
    )
    chat = {"model": "tiny", "messages": [{"role": "bad", "content": PROMPT}]}
    httpx.post(guarded.url + "/v1/chat/completions", json=chat, headers={"authorization": f"Bearer {key}"})
    httpx.get(guarded.url + "/status", auth=("x", key))
    guarded.path.write_text(json.dumps({"keys": [{"name": key, "sha256": PROMPT}]}))
    guarded.gateway.process.send_signal(signal.SIGHUP)
    eventually(lambda: ask(guarded.url, key).status_code == 429, "the budget is spent")
    status, log = guarded.gateway.stop()
    assert status == 0
    found = [secret for secret in secrets if secret in log]
    assert not found, f"{form}: {found} in\n{log}"
    # It did log: each request's line, and that the file was not taken.
    assert log.count("/v1/completions") >= 6 and "keys_not_read" in log
    if form == "json":
        # gRPC's native part writes lines of its own: the router of this world has no health service.
        ours = [line for line in log.splitlines() if not re.match(r"[IWEF]\d{4} ", line)]
        lines = [json.loads(line) for line in ours]
        asked = [line for line in lines if line["event"] == "request"]
        assert {line["status"] for line in asked} >= {200, 400, 401, 429}
        assert {line["key"] for line in asked} == {"alice", "-"}
        assert all(line["request_id"] for line in asked)


def test_a_budget_comes_back_evenly_and_never_beyond_itself() -> None:
    budget = Budget(60, 0.0)
    assert budget.wait_s(60, 0.0) == 0
    budget.spend(60, 0.0)
    assert budget.wait_s(1, 0.0) == pytest.approx(1.0)
    assert budget.wait_s(30, 10.0) == pytest.approx(20.0)
    assert budget.left(10.0) == pytest.approx(10.0)
    assert budget.left(1e9) == 60
    # A clock that went backwards gives nothing.
    budget.spend(60, 1e9)
    assert budget.left(0.0) == 0
    # What is larger than the whole budget needs it full, and leaves a debt.
    assert budget.wait_s(1000, 1e9 + 30) == pytest.approx(30.0)
    budget.spend(1000, 1e9 + 60)
    assert budget.left(1e9 + 60) == -940


def test_a_change_of_the_file_forgives_nothing() -> None:
    account = Account("a")
    account.set(2, None, 0.0)
    assert account.spend(0.0, requests=1) is None and account.spend(0.0, requests=1) is None
    account.set(2, 100, 0.0)
    overdrawn = account.spend(0.0, requests=1)
    assert overdrawn is not None and (overdrawn.kind, overdrawn.retry_after_s) == ("requests", 30)
    account.set(None, 100, 0.0)
    assert account.spend(0.0, requests=1) is None
    assert account.spend(0.0, tokens=150) is None
    spent = account.spend(0.0, requests=1)
    assert spent is not None and spent.kind == "tokens"
    account.settle(150, 20, 0.0)
    assert account.spend(0.0, requests=1) is None


def test_editors_wait_for_each_other(tmp_path: Path) -> None:
    """Four at once: no key is lost."""
    path = tmp_path / "keys.json"
    command = [sys.executable, "-m", "eaas.ops.cli", "keys", "new", str(path)]
    running = [subprocess.Popen([*command, f"n{number}"], stdout=subprocess.PIPE) for number in range(4)]
    assert [process.wait(60) for process in running] == [0] * 4
    assert sorted(key.name for key in read_keys(path)) == [f"n{number}" for number in range(4)]
    assert not list(tmp_path.glob(".*partial"))
