"""`eaas models` as an operator types it, with a router that a test plays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from benchmarks.make_model import make_model
from eaas.gateway.status import cluster_status, replicas_min
from eaas.ops import running
from eaas.ops.cli import app
from eaas.ops.terminal import failing_on
from experts import pack
from experts.checkpoint import Checkpoint
from experts.kernels import numerics_class
from experts.model import Dtype, ExpertShape
from experts.pack import layout_of
from router.client import OrderRefused, RouterUnavailable
from router.view import Member, Model, View

FIRST = Model(hash="a" * 64, layers=2, experts=3, expert_bytes=1000, path="/models/first")
BFLOAT16 = Dtype.BFLOAT16


class Router:
    """Serves what it is told to after it has been looked at a few times."""

    def __init__(self) -> None:
        self.numerics_class = numerics_class(BFLOAT16)
        self.models, self.told = [FIRST], list[tuple[Model, int, str]]()
        self.workers: list[str] = []
        self.gateway: dict[str, float] | None = {"model:1": 1.0}  # what a gateway says, where there is one
        self.launches = True
        self.pools: dict[str, SimpleNamespace] = {}
        self.served = 0  # bitmap of the whole pool
        self.later: list[Callable[[], None]] = []
        self.away = 0

    def status(self, **_: object) -> SimpleNamespace:
        if self.away:
            self.away -= 1
            raise RouterUnavailable("the router did not answer")
        if self.later:
            self.later.pop(0)()
        return SimpleNamespace(view=self.view(), pools=self.pools)

    def view(self) -> View:
        fields = {"state": "serving", "incarnation": 1, "address": "", "pid": 1, "host": ""}
        members = [
            Member(
                name="expert/1", pool="expert", **fields, numerics_class=self.numerics_class,
                serving=self.served.to_bytes(64, "little"),
            ),
            *(
                Member(name=f"attention/{n}", pool="attention", **fields, model=model)
                for n, model in enumerate(self.workers)
            ),
        ]  # fmt: skip
        if self.gateway is not None:
            members.append(Member(name="gateway/1", pool="gateway", **fields, load=self.gateway))
        return View(
            term=1, epoch=1, replicas_wanted=1, layers=FIRST.layers, experts=FIRST.experts, model_hash=FIRST.hash,
            members=tuple(members), models=tuple(self.models),
        )  # fmt: skip

    def add_model(self, model: Model, attention: int = 1, numerics_class: str = "") -> Model:
        self.told.append((model, attention, numerics_class))
        added = replace(model, number=1, base=100)
        self.models = [*(known for known in self.models if known.hash != model.hash), added]
        size = self.pools[f"attention:{model.name}"] = SimpleNamespace(wanted=attention, live=0, starting=0)

        def start() -> None:
            size.starting = attention if self.launches else 0

        def work() -> None:
            if size.starting:
                self.workers += [model.hash] * size.starting
                size.starting, size.live = 0, attention

        every = added.put((1 << model.layers * model.experts) - 1)
        self.later += [lambda: None, lambda: self.serve(every & every >> 1), start, lambda: self.serve(every)]
        self.later += [lambda: None, lambda: None, work]
        return added

    def remove_model(self, name: str) -> Model:
        found = next((model for model in self.models if model.name == name), None)
        if found is None:
            raise OrderRefused(f"no model is called {name!r}")
        self.models[self.models.index(found)] = gone = replace(found, leaving=True)
        self.later += [lambda: None, lambda: self.models.remove(gone)]
        return gone

    def serve(self, bits: int) -> None:
        self.served = bits


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Router:
    made = Router()

    @contextmanager
    def client(*_: object) -> Iterator[Router]:
        with failing_on(OrderRefused, RouterUnavailable):
            yield made

    monkeypatch.setattr(running, "_client_of_router", client)
    monkeypatch.setattr(running, "_ROLL_LOOK_S", 0.01)
    monkeypatch.setattr(running, "_ORDERED_S", 0.05)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    return make_model("tiny", "qwen3_moe", root / "b", seed=time.time_ns() % (1 << 31), dtype="bfloat16")


def models(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["models", *words], env={"COLUMNS": "300"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_a_model_is_packed_here_then_added_and_awaited_until_every_expert_is_served(
    router: Router, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(folder)
    add = router.add_model

    def packed_first(model: Model, *said: object) -> Model:
        assert (pack.cache_directory() / layout_of(shape, BFLOAT16, model.hash).file_name).exists()
        router.away = 3
        return add(model, *said)  # type: ignore[arg-type]

    shape = ExpertShape.from_config(checkpoint.config)
    monkeypatch.setattr(router, "add_model", packed_first)
    monkeypatch.chdir(folder.parent)
    code, said = models("add", "tuned=b", "--weight", "3", "--attention", "2")
    assert code == 0 and f"tuned: {shape.layers * shape.experts} experts served after" in said
    ((model, attention, kernels),) = router.told
    layout = layout_of(shape, BFLOAT16, checkpoint.fingerprint)
    assert model == Model(
        hash=checkpoint.fingerprint, name="tuned", path=str(folder), layers=shape.layers, experts=shape.experts,
        expert_bytes=layout.blob_bytes, weight=3,
    )  # fmt: skip
    assert (attention, kernels) == (2, layout.numerics_class)
    assert not router.later, "it returned before every expert was served, and a worker"
    assert "tuned: answers after" in said


def test_it_waits_until_a_worker_serves_and_each_gateway_takes_requests_for_it(
    router: Router, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_SAY_S", 0.0)
    load = router.gateway = {"model:0": 1.0}
    add = router.add_model

    def added(model: Model, attention: int = 1, numerics_class: str = "") -> Model:
        made = add(model, attention, numerics_class)
        router.later += [lambda: None, lambda: load.update({"model:1": 1.0})]
        return made

    monkeypatch.setattr(router, "add_model", added)
    code, said = models("add", f"b={folder}", "--attention", "2")
    assert code == 0 and not router.later, said
    lines = [line.partition(",")[0] for line in said.splitlines()]
    told = sorted(set(lines), key=lines.index)
    pairs = router.models[1].layers * router.models[1].experts
    assert told[:2] == [f"b: 0 of {pairs} experts served", f"b: {pairs - 1} of {pairs} experts served"]
    assert "b: no worker of pool attention:b serves" in told[3:] and "b: gateway/1 without it" in told[4:]
    assert "answers after" in lines[-1]


def test_it_says_who_is_to_start_a_worker_where_no_launcher_does(router: Router, folder: Path) -> None:
    router.launches = False
    code, said = models("add", f"b={folder}", "--router", "h:7000")
    assert code == 0 and "nothing has begun to start an attention worker of it" in said
    assert f"start one by hand: eaas attention --router h:7000 --model {folder}" in said
    code, said = models("add", f"b={folder}", "--attention", "0")
    assert code == 0 and "by hand" not in said
    assert "b: programs that ask the pool have it; gateways list it, and requests there wait until `eaas scale" in said
    assert "attention:b 1`" in said


def test_a_pool_without_a_gateway_is_asked_for_no_worker_unless_somebody_says_so(router: Router, folder: Path) -> None:
    router.gateway = None
    code, said = models("add", f"b={folder}", "--router", "h:7000")
    assert code == 0 and router.told[-1][1] == 0 and said.splitlines()[-1] == "b: programs that ask the pool have it"
    router.models, router.pools, router.served = [FIRST], {}, 0
    code, said = models("add", f"b={folder}", "--attention", "1")
    assert code == 0 and router.told[-1][1] == 1, said
    assert "b: has workers, and no gateway that could ask them, after" in said and "answers" not in said


def test_one_for_the_pools_own_clients_needs_no_tokenizer(router: Router, folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(folder / name)
    code, said = models("add", f"b={bare}")
    assert code == 1 and "tokenizer" in said and not router.told
    code, _ = models("add", f"b={bare}", "--attention", "0")
    assert code == 0 and router.told[0][1] == 0


def test_what_the_pool_cannot_serve_is_refused_before_anything_is_packed(router: Router, folder: Path) -> None:
    def refused(*words: str) -> str:
        code, said = models("add", *words)
        assert code == 1 and not router.told and not (pack.cache_directory()).exists()
        return said

    assert "is no NAME=PATH. Give one, such as tuned=./tuned" in refused(str(folder))
    assert "is no NAME=PATH" in refused(f"={folder}")
    assert "is neither a model folder" in refused(f"b={folder}-away")
    router.numerics_class = "cpu-other-1"
    assert "the pool's servers compute in cpu-other-1 alone" in refused(f"b={folder}")
    router.numerics_class = numerics_class(BFLOAT16)
    assert "Give the --dtype" in refused(f"b={folder}", "--dtype", "float32")


def test_the_same_model_may_move_or_get_another_name(router: Router, folder: Path) -> None:
    shown = Model(hash=Checkpoint.open(folder).fingerprint, number=1, base=100, path="/old", name="tuned")
    for known in (shown, replace(shown, name="old", path=str(folder)), replace(shown, name="", path="")):
        router.models = [FIRST, known]
        code, said = models("add", f"tuned={folder}")
        assert code == 0 and (f"folder was {known.path}, is {folder} now" in said) == (known.path != str(folder)), said
    assert [workers for _, workers, _ in router.told] == [1, 1, 1]
    router.pools["attention:tuned"] = SimpleNamespace(wanted=4)
    code, said = models("add", f"tuned={folder}", "--weight", "3")
    assert code == 0 and [router.told[-1][0].weight, router.told[-1][1]] == [3, 4], "only the weight has changed"
    assert "tuned: it was served here already; weight was 1, is 3 now\n" in said
    code, said = models("add", f"tuned={folder}")
    assert code == 0 and router.told[-1][0].weight == 3, "what nobody gives stays"
    assert "tuned: it was served here already; nothing has changed" in said
    code, said = models("add", f"tuned={folder}", "--attention", "2")
    assert code == 0 and "it was served here already; attention:tuned was 4, is 2 now" in said
    router.models = [replace(shown, number=0, base=0)]
    router.pools["attention"] = SimpleNamespace(wanted=5, live=5, starting=0)
    models("add", f"tuned={folder}", "--weight", "3", "--wait-s", "0")
    assert router.told[-1][1] == 5, "the workers of the first have a pool by another name"


def test_it_says_when_a_model_is_not_served_or_gone_in_time(router: Router, folder: Path) -> None:
    router.gateway = {}
    code, said = models("add", f"b={folder}", "--wait-s", "0.5")
    assert code == 1 and "b does not answer after 0.5 s: gateway/1 without it. It may yet; see `eaas" in said
    router.served = 0
    router.serve = lambda bits: None  # type: ignore[method-assign]
    code, said = models("add", f"b={folder}", "--wait-s", "0.05")
    assert code == 1 and "not every expert of b is served after 0.05 s" in said and "model_not_opened" in said
    router.later = [lambda: None] * 1000
    code, said = models("remove", "b", "--wait-s", "0.05")
    assert code == 1 and "b still has work after 0.05 s" in said


def test_a_model_is_removed_when_the_view_lists_it_no_more(router: Router) -> None:
    router.models.append(Model(hash="b" * 64, name="b", number=1, base=6))
    code, said = models("remove", "b")
    assert code == 0 and "b: removed after" in said and router.models == [FIRST] and not router.later
    code, said = models("remove", "c")
    assert code == 1 and "no model is called 'c'" in said
    router.models[0] = replace(FIRST, name="a")
    code, said = models("remove", "a")
    assert code == 1 and "a is the model with which every process of this cluster is started" in said


def test_models_are_listed_with_their_own_replicas_and_workers(router: Router) -> None:
    b = Model(hash="b" * 64, name="b", number=1, base=9, layers=3, experts=4, expert_bytes=10**9, weight=7)
    router.models += [b, Model(hash="c" * 64, name="c", number=2, base=32, layers=1, experts=1, leaving=True)]
    router.served = FIRST.put(0b11111) | b.put((1 << 12) - 1)
    router.workers = [FIRST.hash, b.hash, b.hash]
    code, said = models("list")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if "│" in line]
    assert code == 0 and cells == [
        ["a" * 16, "loading", "2 x 3", "6.0 kB", "1", "0", "1", "/models/first"],
        ["b", "serving", "3 x 4", "12.0 GB", "7", "1", "2", ""],
        ["c", "leaving", "1 x 1", "0 bytes", "1", "0", "0", ""],
    ]


def test_status_names_every_model_with_how_it_does(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    b = Model(hash="b" * 64, name="b", number=1, base=9, layers=3, experts=4, weight=7, asleep=True)
    router.models = [replace(FIRST, name="a"), b]
    router.served, router.workers = FIRST.put(0b111111), [FIRST.hash, b.hash, b.hash]
    gateway = {
        "name": "gateway/9",
        "ready": True,
        "running": 0,
        "waiting": 0,
        "pid": 1,
        "address": "127.0.0.1:1",
    }

    def shown() -> str:
        state = cluster_status(model="a", view=router.view(), gateway=gateway, routers=())
        monkeypatch.setattr(running, "fetch_status", lambda url: state)
        done = CliRunner().invoke(app, ["status"], env={"COLUMNS": "300"})
        assert done.exit_code == 0, done.exception
        return done.output

    said = shown()
    assert "2 models (1 asleep): whole, 1 expert server serving, every expert of those awake on 1 of " in " ".join(
        said.split()
    )
    lines = {line.split("│")[1].strip(): line.split("│")[1:-1] for line in said.splitlines() if "│" in line}
    assert [cell.strip() for cell in lines["a"]] == [
        "a", "serving", "2 x 3", "6.0 kB", "1", "1", "1", "/models/first",
    ]  # fmt: skip
    assert [cell.strip() for cell in lines["b"]] == ["b", "asleep", "3 x 4", "0 bytes", "7", "0", "2", ""]
    assert [lines[name][1].strip() for name in ("attention/0", "attention/1", "expert/1")] == ["a", "b", ""]
    router.models[0] = replace(router.models[0], asleep=True)
    assert "2 models (asleep): whole, 1 expert server serving ┏" in " ".join(shown().split())
    router.workers = [FIRST.hash]
    lacks = "2 models (asleep): DEGRADED, 1 expert server serving; b has no attention worker ┏"
    assert lacks in " ".join(shown().split())
    gateway |= {"ready": False, "reason": "none serves"}
    assert "1 expert server serving; gateway/9 waits: none serves ┏" in " ".join(shown().split())
    gateway["ready"] = True
    router.models = [replace(FIRST, name="a")]
    said = shown()
    assert "a: whole, 1 expert server serving, every expert on 1 of " in said and "layers x experts" not in said
    assert "model" not in said


def test_models_that_sleep_are_no_loss(router: Router) -> None:
    """A roll goes on while nothing is to be held."""
    assert replicas_min(router.view()) == 0
    router.models = [replace(FIRST, asleep=True)]
    view = router.view()
    assert replicas_min(view) == view.replicas_wanted > 0
    _, said = models("list")
    assert "asleep" in said
