"""Several models on one pool: options, what a launcher tells and starts, and what a worker or a client of one sees."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from benchmarks.make_model import make_model
from eaas import placement as placements
from eaas import pool as pools
from eaas.cluster import local
from eaas.cluster.config import ClusterConfig, LaunchContext, PoolConfig, ServedModel, child_options
from eaas.cluster.local import LocalCluster, entries_of
from eaas.ops.running import Roll
from eaas.ops.starting import prepare_model, with_model
from eaas.placement import Placement, StartFailed
from eaas.pool import ConnectFailed
from experts.checkpoint import Checkpoint
from experts.formats import experts_dtype
from experts.model import ConfigInvalid, ExpertShape
from experts.pack import cache_directory, layout_of
from router import bitmap
from router.client import OrderRefused
from router.events import StartProcess
from router.host import host_id
from router.launcher import Launcher
from router.options import OptionsInvalid, arguments, read
from router.view import Member, Model, Retirement, View, of_model

CLASS, OTHER_CLASS = "cpu-bf16-fma-1", "cpu-bf16-avx512-1"


def serve(*words: str, **environment: str) -> ClusterConfig:
    return read(ClusterConfig, "serve", words, environment)


# -- options


def test_each_model_has_a_name_a_folder_a_weight_and_workers() -> None:
    config = serve("--model", "a=/x=1,y", "--model=b/2=~/y,attention=0,weight=1000", "--attention", "3")
    assert config.served == (
        ServedModel(name="a", path=Path("/x=1,y"), attention=3),
        ServedModel(name="b/2", path=Path("~/y"), weight=1000, attention=0),
    )
    assert config.wanted == {"expert": 2, "attention": 3, "attention:b/2": 0}
    assert replace(config, models=tuple(map(str, config.served))).served == config.served
    assert serve(EAAS_SERVE_MODELS="a=/x b=/y,attention=2").wanted["attention:b"] == 2
    alone = serve("/m", "--attention", "2", "--served-model-name", "n")
    assert alone.served == (ServedModel(name="n", path=Path("/m"), attention=2),)
    assert alone.wanted == {"expert": 2, "attention": 2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "a"], "--model a: NAME=PATH is needed, no = found. Give it a name: --model NAME=a."),
        (["--model", "a="], "--model a=: NAME=PATH is needed, no path found behind the =. Give a folder"),
        (
            ["--model", "a=,weight=2"],
            "no path found behind the =. Give a folder, a hub id or demo: --model a=PATH,weight=2.",
        ),
        (
            ["--model", "=/x"],
            "--model =/x: NAME=PATH is needed, no name found before the =. Give it one: --model NAME=/x.",
        ),
        (
            ["--model", "a:b=/x"],
            "--model a:b=/x: NAME=PATH is needed, 'a:b' found as its name. Give one of up to 64 letters",
        ),
        (["--model", "a b=/x"], "'a b' found as its name. Give one of up to 64 letters, digits and ._/-"),
        (["--model", f"{'a' * 65}=/x"], "found as its name. Give one of up to 64 letters"),
        (["--model", "a=/x,weight=0"], "weight=0 found behind it. Give ,weight=1 to 1000, or leave it out."),
        (["--model", "a=/x,weight=1001"], "weight=1001 found behind it. Give ,weight=1 to 1000"),
        (
            ["--model", "a=/x,weight=x"],
            "--model a=/x,weight=x: NAME=PATH is needed, weight=x found behind it. Give ,weight=1",
        ),
        (["--model", "a=/x,attention=1,weight="], "weight= found behind it. Give ,weight=1 to 1000"),
        (
            ["--model", "a=/x,attention=-1"],
            "attention=-1 found behind it. Give ,attention=0 to 64, or leave it out.",
        ),
        (
            ["--model", "a=/x", "--model", "b=/y", "--model", "a=/z"],
            "--model a=/x --model b=/y --model a=/z: 2 have one name, a. Give each its own.",
        ),
        (["--model", "a=/x", "--model", "b=/y", "--device", "cuda:0"], "GPUs serve one model in a pool"),
        (["/m", "--model", "a=/x"], "leave MODEL and --served-model-name out"),
        (["--model", "a=/x", "--served-model-name", "b"], "leave MODEL and --served-model-name out"),
    ],
)
def test_models_that_cannot_be_served_together_or_by_that_name_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(OptionsInvalid, match=re.escape(said)):
        serve(*words)


def test_one_named_model_may_be_on_gpus() -> None:
    assert serve("--model", "a=/x", "--device", "cuda:0").served[0].name == "a"


def test_a_bare_pool_takes_models_without_workers() -> None:
    def pool(*words: str) -> ClusterConfig:
        return read(PoolConfig, "pool", words, {}).cluster()

    assert pool("--model", "a=/x", "--model", "b=/y").wanted == {
        "expert": 2,
        "attention": 0,
        "attention:b": 0,
    }
    assert pool("/m").served == (ServedModel(name="", path=Path("/m"), attention=0),)
    for words, said in (
        (["--model", "a=/x,attention=1"], "A bare pool has no attention workers: leave ,attention=N out"),
        ([], "MODEL, or --model NAME=PATH for each of several, must be given"),
    ):
        with pytest.raises(OptionsInvalid, match=re.escape(said)):
            pool(*words)


def test_every_process_is_started_with_the_first_model_but_workers_of_another() -> None:
    config = serve("--model", "a=/x,attention=2", "--model", "b=/y", "--tls-dir", "/tls")
    host = LaunchContext(
        state_dir=Path("/s"), router_address="127.0.0.1:7", experts_wanted=2, listen_fd=5, admin_address=""
    )

    def told(pool: str, model: Path | None = None) -> list[str]:
        return arguments(child_options(config, replace(host, model=model), pool, 0, port=0))

    assert "--attention=2" in told("router")
    assert {"--model=/x", "--served-model-name=a"} <= set(told("gateway"))
    for pool in ("expert", "attention"):
        assert {"--model=/x", f"--tls-dir=/tls/{pool}"} <= set(told(pool))
    assert {"--model=/y", "--tls-dir=/tls/attention"} <= set(told("attention:b", Path("/y")))


def test_folders_are_found_for_each_model(tmp_path: Path) -> None:
    folder = make_model("tiny", "qwen3_moe", tmp_path / "m", seed=0)
    found = with_model(serve("--model", "d=demo", "--model", f"m={folder},weight=7")).served
    assert found[0].path.is_absolute() and (found[0].path / "config.json").is_file()
    assert found[1] == ServedModel(name="m", path=folder.resolve(), weight=7, attention=1)


# -- what the router is told, and what is started


def test_the_router_is_told_what_is_in_the_folders(tmp_path: Path) -> None:
    seed = time.time_ns() % 2**31
    folders = [
        make_model("tiny", arch, tmp_path / arch, seed=seed + number)
        for number, arch in enumerate(("qwen3_moe", "mixtral"))
    ]
    config = serve("--model", f"a={folders[0]},weight=5", "--model", f"b={folders[1]},attention=2")
    for (model, workers, kernels), folder, given in zip(entries_of(config), folders, config.served, strict=True):
        checkpoint = Checkpoint.open(folder)
        shape = ExpertShape.from_config(checkpoint.config)
        layout = layout_of(shape, experts_dtype("auto", checkpoint.config, ()), checkpoint.fingerprint)
        assert (model.name, model.path, model.weight) == (given.name, str(folder), given.weight), seed
        assert (model.hash, model.layers, model.experts) == (
            checkpoint.fingerprint,
            shape.layers,
            shape.experts,
        )
        assert (model.expert_bytes, kernels) == (layout.blob_bytes, layout.numerics_class)
        assert workers == given.attention
    assert entries_of(serve(str(folders[0]))) == []
    again = tmp_path / "again"
    again.symlink_to(folders[0])
    with pytest.raises(ConfigInvalid) as refused:
        entries_of(serve("--model", f"a={folders[0]}", "--model", f"b={folders[1]}", "--model", f"c={again}"))
    assert str(refused.value).startswith(f"--model a={folders[0]} --model c={again}: these are one checkpoint")
    assert str(refused.value).endswith("Leave one of them out.")


def test_models_that_one_pool_cannot_serve_are_refused_before_anything_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    narrow = make_model("tiny", "qwen3_moe", tmp_path / "n", seed=1)
    wide = make_model("tiny", "qwen3_moe", tmp_path / "w", seed=2, dtype="float32")
    with pytest.raises(ConfigInvalid, match=r"one pool computes in one format of numbers; found a as .*, b as "):
        LocalCluster(serve("--model", f"a={narrow}", "--model", f"b={wide}"))
    entries_of(serve("--model", f"a={narrow}", "--model", f"b={wide}", "--dtype", "float32"))
    with pytest.raises(typer.Exit):
        prepare_model(serve("--model", f"a={narrow}", "--model", f"b={wide}"))
    assert not list(cache_directory().glob("*"))


class Router:
    """In place of the router's client: notes what it is told, and orders what it was made with."""

    def __init__(self, orders: list[StartProcess], models: list[Model], refuses: str = "") -> None:
        self.orders, self.models, self.refuses = orders, models, refuses
        self.acts: list[str] = []
        self.view: View | None = None

    def start(self, **_: object) -> None:
        """Nothing is heard."""

    def add_model(self, model: Model, attention: int, numerics_class: str, timeout_s: float) -> None:
        if self.refuses:
            raise OrderRefused(self.refuses)
        self.acts.append(f"add {model.name} {attention}")

    def status(self, timeout_s: float) -> SimpleNamespace:
        pools = {"expert": SimpleNamespace(wanted=3)}
        return SimpleNamespace(pools=pools, view=SimpleNamespace(models=self.models))

    def launches(self, host: str, starting: Callable[[], Any]) -> list[StartProcess]:
        self.acts.append("launches")
        return self.orders

    def report_exit(self, host: str, pid: int, pool: str, timeout_s: float) -> None:
        self.acts.append(f"exit {pid} {pool}")

    def close(self) -> None:
        """Nothing is open."""


def launched(
    config: ClusterConfig, router: Router, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[str, str]], list[str], Any]:
    """(pool, folder) of what a cluster starts by those orders, what it says, and the cluster."""
    started: list[tuple[str, str]] = []

    def start(*, pool: str, arguments: list[str], log: Path, module: str, slot: int, **_: object) -> Any:
        folder = next((word for word in arguments if word.startswith("--model=")), "")
        started.append((pool, folder.removeprefix("--model=")))
        assert "/" not in log.name and ":" not in log.name
        assert module == {"attention": "eaas.worker", "expert": "experts"}[pool.partition(":")[0]]
        pid = 100 + len(started)
        return SimpleNamespace(
            pool=pool, slot=slot, pid=pid, pidfd=-1, ready_fd=-1, ready=None, replaced=False, name=f"{pool}/x"
        )

    monkeypatch.setattr(local.Child, "start", start)
    monkeypatch.setattr(local, "RouterClient", lambda *_: router)
    said: list[str] = []
    cluster: Any = LocalCluster(config, on_event=said.append)
    monkeypatch.setattr(cluster._selector, "register", lambda *_: None)
    cluster._router = router
    cluster._router_addresses[0] = "127.0.0.1:2"
    # What is done on threads, one after another.
    cluster._follow_launches()
    while not cluster._orders.empty():
        cluster._carry_out(cluster._orders.get())
    return started, said, cluster


def test_workers_of_each_model_get_its_folder_also_of_one_that_was_added_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [make_model("tiny", "qwen3_moe", tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    config = replace(
        serve("--model", f"a={folders[0]}", "--model", f"b={folders[1]},attention=2"),
        state_dir=tmp_path / "s",
        endpoint=False,
    )
    pools = ["expert", "attention", "attention:b", "attention:b", "attention:c", "attention:d"]
    models = [
        Model(hash="1", name="a", path=str(folders[0])),
        Model(hash="2", name="b", path=str(folders[1]), number=1),
        Model(hash="3", name="c", path="/c", number=2),
        Model(hash="4", name="d", number=3),
    ]
    router = Router([StartProcess(host=host_id(), pool=pool) for pool in pools], models)
    started, said, cluster = launched(config, router, monkeypatch)
    try:
        assert router.acts == ["add a 1", "add b 2", "launches"]
        first, second = map(str, folders)
        assert started == [
            ("expert", first),
            ("attention", first),
            ("attention:b", second),
            ("attention:b", second),
            ("attention:c", "/c"),
        ]
        slots = [(child.pool, child.slot) for child in cluster._children.values()]
        assert slots[2:] == [("attention:b", 0), ("attention:b", 1), ("attention:c", 0)]
        # A worker whose folder nobody knows would serve another model's: it is not started, and the router hears so.
        assert cluster._exits.get_nowait() == (0, "attention:d")
        assert "nobody said where the checkpoint of d is" in str(cluster._failure or said)
        assert cluster._starting() == {"expert": 1, "attention": 1, "attention:b": 2, "attention:c": 1}
        for child in cluster._children.values():
            assert cluster._missing(), f"{child.pool} is not ready"
            child.ready = {}
        assert cluster._missing() == "1 x router, 1 x expert", "each pool by itself"
    finally:
        cluster._children.clear()
        cluster.stop()


def test_nothing_is_ordered_where_the_router_refuses_a_model_and_one_model_alone_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("tiny", "qwen3_moe", tmp_path / "a", seed=0)
    named = replace(serve("--model", f"a={folder}"), state_dir=tmp_path / "s", endpoint=False)
    router = Router([], [], refuses="no bits are left")
    _, _, cluster = launched(named, router, monkeypatch)
    cluster.stop()
    assert "the router does not serve the models: no bits are left" in str(cluster._failure)
    assert router.acts == []
    alone = replace(serve(str(folder)), state_dir=tmp_path / "s", endpoint=False)
    router = Router([], [])
    _, _, cluster = launched(alone, router, monkeypatch)
    cluster.stop()
    assert router.acts == ["launches"] and cluster._failure is None


def test_a_worker_of_another_model_that_has_joined_is_none_that_starts() -> None:
    launcher: Any = Launcher("127.0.0.1:1", "h", lambda order: 0, None)
    now_s = time.monotonic()
    launcher._starting = {"1": ("attention", now_s), "2": ("attention:b", now_s), "3": ("attention:b", now_s)}
    models = (Model(hash="A", name="a"), Model(hash="B", name="b", number=1))
    worker = Member(
        name="attention/7", pool="attention", state="joining", incarnation=1, address="", pid=1, host="h", model="B"
    )  # fmt: skip
    view = View(term=1, epoch=1, replicas_wanted=1, layers=1, experts=1, models=models, members=(worker,))
    try:
        launcher._see(view)
        assert launcher._present_starts() == {"attention": 1, "attention:b": 1}
        launcher._see(replace(view, members=(worker, replace(worker, name="attention/8", model="A"))))
        assert launcher._present_starts() == {"attention:b": 1}
    finally:
        launcher.close()


# -- what one model's workers and clients see


class Client:
    """In place of an expert client: what it was given last."""

    covers = False
    adopted_epoch = 0

    def __init__(self, model_hash: str, weight: int = 1) -> None:
        self.model_hash, self.weight = model_hash, weight
        self.view: View | None = None

    def apply_view(self, view: View) -> None:
        self.view = view


class World:
    """A View of a pool of two to four models with servers, workers and clients of each, and who serves what in it."""

    def __init__(self, rng: Random) -> None:
        base, models = rng.choice((0, 0, 5)), list[Model]()
        for number in range(rng.randint(2, 4)):
            layers, experts = rng.randint(1, 3), rng.randint(1, 9)
            models.append(
                Model(
                    hash=f"hash-{number}", name=f"m{number}", number=number, base=base, layers=layers,
                    experts=experts, weight=rng.randint(1, 1000),
                )
            )  # fmt: skip
            # Bits of one that was removed may lie between.
            base += layers * experts + rng.choice((0, 3))
        self.models, self.serves = models, dict[str, set[tuple[int, int, int]]]()
        everything = [
            (model.number, layer, expert, model.base + layer * model.experts + expert)
            for model in models
            for layer in range(model.layers)
            for expert in range(model.experts)
        ]
        members = list[Member]()

        def member(pool: str, **more: Any) -> Member:
            number = len(members) + 1
            members.append(
                Member(
                    name=f"{pool}/{number}", pool=pool, state="serving", incarnation=number, address="",
                    pid=number, host="h", numerics_class=CLASS, **more,
                )
            )  # fmt: skip
            return members[-1]

        for _ in range(rng.randint(1, 3)):
            held = rng.sample(everything, rng.randint(0, len(everything)))
            bits = sum(1 << bit for *_, bit in held).to_bytes(-(-base // 8), "little")
            # Who asks nothing may have joined with any of them.
            one = member("expert", serving=bits, target=bits, model=rng.choice((*models, Model(hash=""))).hash)
            self.serves[one.name] = {(number, layer, expert) for number, layer, expert, _ in held}
        for model in models:
            for pool in ("attention", "client"):
                member(pool, model=model.hash)
        member("gateway", model=models[0].hash)
        first = models[0]
        self.view = View(
            term=1, epoch=7, replicas_wanted=1, layers=first.layers, experts=first.experts,
            model_hash=first.hash, models=tuple(models), members=tuple(members),
        )  # fmt: skip


def follow(seed: int) -> None:
    """A worker of a model that is not the first follows that alone."""
    rng = Random(seed)
    world = World(rng)
    mine, own = rng.choice(world.models[1:]), rng.choice((1, 3))
    client = Client(mine.hash, own)
    router: Any = SimpleNamespace(view=world.view, ack=lambda epoch: None)
    placement = Placement(router, client, CLASS)  # type: ignore[arg-type]
    placement.apply(world.view)
    view = client.view
    assert view is not None and view.epoch == 7
    assert (view.layers, view.experts, view.model_hash) == (mine.layers, mine.experts, mine.hash), seed
    shown = {
        (name, layer, expert)
        for layer in range(mine.layers)
        for expert in range(mine.experts)
        for name in (member.name for member in view.replicas(layer, expert))
    }
    needed = {(name, *pair[1:]) for name, held in world.serves.items() for pair in held if pair[0] == mine.number}
    assert shown == needed, seed
    assert sum(member.serving_count for member in view.members) == len(needed), f"{seed}: beyond its own"
    seen = {member.name for member in view.members}
    assert {it.name for it in world.view.members if it.pool in ("expert", "gateway")} <= seen, seed
    asking = {member.model for member in view.members if member.pool in ("attention", "client")}
    assert asking == {mine.hash}, seed
    assert client.weight == min(1000, own * mine.weight), seed
    with pytest.raises(StartFailed, match=f"some of {mine.layers} x {mine.experts} experts are on no server"):
        placement.wait(0.0, threading.Event())


def test_a_worker_of_one_model_sees_nothing_of_another() -> None:
    for seed in range(first := time.time_ns() % 2**31, first + 50):
        follow(seed)


@pytest.mark.parametrize(
    "mutant",
    [
        lambda view, hash: view,
        lambda view, hash: of_model(view, view.models[0].hash),
        lambda view, hash: of_model(
            replace(view, models=tuple(replace(model, base=model.base + 1) for model in view.models)), hash
        ),
        lambda view, hash: replace(of_model(view, hash), members=view.members),
        lambda view, hash: replace(of_model(view, hash), models=()),
    ],
)
def test_a_worker_that_sees_something_of_another_model_is_noticed(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements, "of_model", mutant)
    with pytest.raises(AssertionError):
        for seed in range(40):
            follow(seed)


def test_requests_are_not_sent_on_to_workers_of_another_model() -> None:
    first = Model(hash="A", name="a", layers=1, experts=2, weight=3)
    second = Model(hash="B", name="b", number=1, base=2, layers=1, experts=2)

    def member(name: str, kernels: str, bits: int = 0, model: str = "") -> Member:
        return Member(
            name=name, pool=name.partition("/")[0], state="serving", incarnation=1, address="", pid=1, host="h",
            numerics_class=kernels, serving=bitmap.to_bytes(bits, 1, 4), model=model,
        )  # fmt: skip

    lacking = member("expert/1", CLASS, 0b1101), member("expert/2", OTHER_CLASS, 0b1111)
    view = View(
        term=1, epoch=1, replicas_wanted=1, layers=1, experts=2, model_hash="A", models=(first, second),
        members=(*lacking, member("attention/3", OTHER_CLASS, model="B")),
    )  # fmt: skip
    router: Any = SimpleNamespace(view=view, ack=lambda epoch: None)
    placement = Placement(router, Client("A"), CLASS)  # type: ignore[arg-type]
    placement.apply(view)
    assert not placement.elsewhere, "the only worker of the other class has another model"
    placement.apply(replace(view, members=(*view.members, member("attention/4", OTHER_CLASS, model="A"))))
    assert "attention/4 asks another class" in placement.elsewhere
    other = Placement(router, Client("B"), CLASS)  # type: ignore[arg-type]
    other.apply(replace(view, members=(*view.members, member("attention/5", OTHER_CLASS, model="B"))))
    assert not other.elsewhere, "of its model nothing lacks"


def picked(view: View, name: str = "", fingerprint: str = "", shape: tuple[int, int] | None = None) -> str:
    sized: Any = SimpleNamespace(layers=shape[0], experts=shape[1]) if shape else None
    return pools._of_model(view, "router:1", name, fingerprint, sized).model_hash


def test_a_client_is_given_the_model_of_its_name_its_checkpoint_or_its_shape() -> None:
    seed = time.time_ns() % 2**31
    world = World(Random(seed))
    models = [replace(model, layers=2, experts=number + 2) for number, model in enumerate(world.models)]
    view = replace(world.view, models=tuple(models), layers=2, experts=2)
    for model in models:
        assert picked(view, name=model.name) == model.hash, seed
        assert picked(view, fingerprint=model.hash) == model.hash, seed
        assert picked(view, shape=(model.layers, model.experts)) == model.hash, seed
    twins = replace(view, models=(models[0], replace(models[1], layers=2, experts=2), *models[2:]))
    assert picked(twins, shape=(2, 2), fingerprint=models[1].hash) == models[1].hash
    served = ", ".join(f"{model.name} (checkpoint {model.hash})" for model in models)
    for asked, count, word in (
        ({}, len(models), ""),
        ({"shape": (2, 2)}, 2, ""),
        ({"name": "gone"}, 0, ", gone"),
        ({"name": "m0", "fingerprint": "hash-1"}, 0, ", m0"),
        ({"fingerprint": "unknown"}, 0, ""),
    ):
        with pytest.raises(ConnectFailed) as refused:
            picked(twins, **asked)  # type: ignore[arg-type]
        assert str(refused.value) == (
            f"The pool at router:1 serves {served}; {count} of these fit what is asked for{word}. Give the name, or"
            " the checkpoint's folder, of one of them."
        )


def test_of_one_model_a_client_is_given_that_and_its_own_check_says_what_differs() -> None:
    view = View(term=1, epoch=1, replicas_wanted=1, layers=2, experts=4, model_hash="A")
    assert pools._of_model(view, "r", "", "other", None) is view
    one = replace(view, models=(Model(hash="A", layers=2, experts=4),))
    assert pools._of_model(one, "r", "", "other", None) is one
    with pytest.raises(ConnectFailed, match="serves one without a name"):
        picked(one, name="b")


def test_a_roll_scales_and_awaits_the_workers_of_each_model_by_themselves() -> None:
    models = (Model(hash="A", name="a", layers=1, experts=1), Model(hash="B", name="b", number=1, base=1))

    def worker(number: int, model: str) -> Member:
        return Member(
            name=f"attention/{number}", pool="attention", state="serving", incarnation=1, address="", pid=1,
            host="h", model=model,
        )  # fmt: skip

    before = View(
        term=1, epoch=1, replicas_wanted=1, layers=1, experts=1, models=models,
        members=(worker(1, "A"), worker(2, "B")),
    )  # fmt: skip
    # The second worker of the first model, which takes no place of the other's, is there before that is.
    late = replace(before, members=(worker(3, "A"), worker(4, "A")))
    whole = replace(before, members=(worker(3, "A"), worker(4, "A"), worker(5, "B")))
    views = {"attention/1": [late], "attention/2": [late, late, whole]}
    pools = {"attention": SimpleNamespace(wanted=1), "attention:b": SimpleNamespace(wanted=1)}
    shown, scaled = [before], list[tuple[str, int]]()

    def status(**_: float) -> SimpleNamespace:
        view = shown[0]
        if len(shown) > 1:
            shown.pop(0)
        return SimpleNamespace(view=view, pools=pools)

    def retire(name: str, operation: str, **_: float) -> Retirement:
        shown[:] = views.pop(name)
        return Retirement(name=name, operation="o", state="gone", safe_to_terminate=True, asked_unix_s=1.0, running=0)

    client: Any = SimpleNamespace(
        status=status, retire=retire, scale=lambda pool, wanted, drain_s: scaled.append((pool, wanted))
    )
    Roll("", client, wait_s=9, drain_s=9, show=lambda line: None).roll(["attention"])
    assert scaled == [("attention", 1), ("attention:b", 1)]
    assert shown == [whole], "it waited for the other model's worker"
