"""Grammars in the engine: outputs are of the language, end where it ends, and repeat wherever they are resumed."""

from __future__ import annotations

import json
import re
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from eaas.gateway.served_model import ServedModel
from eaas.gateway.tool_calls import call_grammar, tool_use
from eaas.model.tokenizer import Tokenizer
from eaas.worker import constraint as constraints
from eaas.worker.constraint import Grammars
from eaas.worker.engine import Engine, EngineConfig
from eaas.worker.grammar import (
    MAX_GRAMMAR_BYTES,
    MAX_SCHEMA_DEPTH,
    Grammar,
    GrammarInvalid,
    depth_of,
    of_choices,
    of_grammar,
    of_lark,
    of_schema,
)
from eaas.worker.protocol import Failed, PromptLogprobs, SamplingParams, Submit, Token
from eaas.worker.request import Request
from eaas.worker.runs import Runs
from eaas.worker.scheduler import SchedulerConfig
from tests.eaas.fake_decoder import BLOCK_TOKENS, FakeDecoder

MODEL = Path(__file__).parents[2] / "eaas" / "demo_model"
VOCAB, EOS = 1024, frozenset((0, 2))
SEED = 20261122
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def logits_of(history: Sequence[int]) -> np.ndarray:
    key = zlib.crc32(np.asarray(history, dtype=np.int32).tobytes()) ^ SEED
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(VOCAB, dtype=np.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


@pytest.fixture(scope="module")
def grammars() -> Any:
    found = Grammars.open(MODEL, VOCAB, sorted(EOS))
    assert found is not None
    yield found
    found.close()


class World:
    """An engine over a model without weights, and all that came out of it."""

    def __init__(self, grammars: Grammars | None, *, blocks: int = 512, step_tokens: int = 64) -> None:
        self.decoder = FakeDecoder(blocks)
        self.decoder.vocab, self.decoder.logits = VOCAB, logits_of
        self.woken = threading.Event()
        config = EngineConfig(
            max_model_len=512,
            step_tokens=step_tokens,
            kv_blocks=blocks,
            block_tokens=BLOCK_TOKENS,
            vocab=VOCAB,
            eos_ids=EOS,
        )
        self.engine = Engine(self.decoder, config, grammars=grammars, wake=self.woken.set)
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}
        self.failed: list[Failed] = []
        self.prompts: list[PromptLogprobs] = []
        self.chosen: list[Token] = []

    def submit(self, id: str, output: Sequence[int] = (), prompt: Sequence[int] = (5, 6, 7), **params: Any) -> None:
        given = SamplingParams(**{"max_tokens": 200, "temperature": 1.0, "seed": 7, **params})
        message = Submit(id=id, attempt=1, prompt=list(prompt), output=list(output), params=given)
        refusal = self.engine.submit(message)
        self.failed += [refusal] if refusal is not None else []
        self.tokens[id] = list(output)

    def step(self) -> None:
        if self.engine.compiling and not self.engine.has_work:
            assert self.woken.wait(60), "nothing was compiled within 60 s"
            self.woken.clear()
        outcome = self.engine.step()
        if outcome is None:
            return
        for token in outcome.tokens.get(0, []):
            assert token.index == len(self.tokens[token.id]), token
            self.tokens[token.id].append(token.token)
            self.chosen.append(token)
            if token.finish:
                self.finish[token.id] = token.finish
        self.failed += outcome.failed.get(0, [])
        self.prompts += outcome.prompts.get(0, [])

    def run(self) -> None:
        for _ in range(20_000):
            if not self.engine.has_work and not self.engine.compiling:
                break
            self.step()
        assert self.engine.load()["kv_use"] == 0.0


def run_one(grammars: Grammars, **params: Any) -> World:
    world = World(grammars)
    world.submit("a", **params)
    world.run()
    return world


@pytest.mark.parametrize("seed", range(5))
def test_a_schema_is_kept_whatever_the_model_says(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    world = run_one(grammars, grammar=of_schema(SCHEMA), seed=seed)
    assert world.finish == {"a": "complete"}, f"seed {seed}: {world.tokens}"
    text = tokenizer.decode(world.tokens["a"])
    Draft202012Validator(SCHEMA).validate(json.loads(text))


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        (Grammar("regex", "[0-9]{3}-[a-f]{2}"), lambda text: len(text) == 6 and text[3] == "-"),
        (of_choices(["yes", 'no "really"\n', "peut-être \x7f/\\"]), lambda text: text[0] in "ynp"),
        (
            Grammar("lark", 'start: "<" INNER ">"\nINNER: /[xyz]{1,9}/'),
            lambda text: text[0] + text[-1] == "<>",
        ),
        (of_schema({"type": "boolean"}), lambda text: text in ("true", "false")),
    ],
)
def test_every_kind_of_grammar_ends_by_itself(
    grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, fits: Any
) -> None:
    world = run_one(grammars, grammar=grammar)
    text = tokenizer.decode(world.tokens["a"], skip_special=False)
    assert world.finish == {"a": "complete"} and fits(text), text


@pytest.mark.parametrize("library", ["installed", "1.7.6"])
def test_json_has_no_second_blank_that_a_weak_model_could_go_on_with(
    library: str, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    if library != "installed":
        monkeypatch.setattr(constraints, "version", lambda name: library)
    grammars = Grammars.open(MODEL, VOCAB, sorted(EOS))
    assert grammars is not None
    schema = of_schema({"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}})
    blank, break_ = (tokenizer.encode(text)[-1] for text in (" ", "\n"))
    for text in ('{"a":', '{"a": 1,'):
        for first in (blank, break_):
            output = [token for letter in text for token in tokenizer.encode(letter)]
            spaced = grammars.begin(schema, [*output, first], [], 0).result()
            allowed = [bool(spaced.mask[token // 32] >> (token % 32) & 1) for token in (blank, break_)]
            # A new line may be followed by its indentation.
            assert allowed == [first == break_, False], f"{text!r}, {first}"
    grammars.close()


def test_choices_are_given_letter_by_letter(grammars: Grammars, tokenizer: Tokenizer) -> None:
    wanted = ["yes", 'no "really"\n', "peut-être \x7f/\\", "{{a}}", "\U0001f600"]
    found = set()
    for seed in range(60):
        world = run_one(grammars, grammar=of_choices(wanted), seed=seed, temperature=3.0)
        found.add(tokenizer.decode(world.tokens["a"], skip_special=False))
    assert found == set(wanted), f"seeds 0 to 59: {found}"


def test_an_end_token_ends_only_what_the_grammar_accepts(grammars: Grammars, tokenizer: Tokenizer) -> None:
    endless = Grammar("regex", "(ab)*")
    for seed in range(30):
        world = run_one(grammars, grammar=endless, seed=seed, max_tokens=40, logit_bias=((0, 2.0), (2, 2.0)))
        text = tokenizer.decode(world.tokens["a"])
        assert text == "ab" * (len(text) // 2) or world.finish["a"] == "length", f"seed {seed}: {text!r}"
        assert (world.tokens["a"][-1] in EOS) == (world.finish["a"] == "stop"), f"seed {seed}"


def test_min_tokens_keeps_the_end_back_as_long_as_something_else_is_possible(grammars: Grammars) -> None:
    pushed = {"logit_bias": ((0, 100.0), (2, 100.0))}
    long = run_one(grammars, grammar=Grammar("regex", "(ab)*"), min_tokens=9, **pushed)
    assert len(long.tokens["a"]) >= 9 and long.finish["a"] == "stop"
    short = run_one(grammars, grammar=of_choices(["yes"]), min_tokens=9, **pushed)
    assert short.finish == {"a": "complete"} and not short.failed


def test_resumed_after_every_token_it_goes_on_as_it_would_have(grammars: Grammars) -> None:
    whole = run_one(grammars, grammar=of_schema(SCHEMA))
    for cut in range(len(whole.tokens["a"])):
        world = World(grammars)
        world.submit("a", output=whole.tokens["a"][:cut], grammar=of_schema(SCHEMA))
        world.run()
        assert world.tokens == whole.tokens and world.finish == whole.finish, f"resumed after {cut} tokens"


def test_preempted_or_beside_others_it_is_as_alone(grammars: Grammars) -> None:
    alone = {seed: run_one(grammars, grammar=of_schema(SCHEMA), seed=seed).tokens["a"] for seed in range(12)}
    world = World(grammars, blocks=60, step_tokens=24)
    for seed in range(12):
        world.submit(f"s{seed}", grammar=of_schema(SCHEMA), seed=seed)
        world.submit(f"free{seed}", seed=seed, max_tokens=20, ignore_eos=True)
    world.run()
    assert world.engine.scheduler.preemptions > 0, "the pool was too large to preempt anything"
    for seed, tokens in alone.items():
        assert world.tokens[f"s{seed}"] == tokens, f"seed {seed}"


class Slow:
    """A constraint whose mask is late: ready at every third asking."""

    def __init__(self) -> None:
        self.mask, self.fault, self.asked = np.full(VOCAB // 32, 0xFFFFFFFF, np.uint32), "", 0
        self.made = 1

    def ready(self, timeout_s: float) -> bool:
        self.asked += 1
        return self.asked % 6 == 0

    def advance(self, token: int) -> bool:
        return False

    def forced(self) -> list[int]:
        return []

    def look(self, drafts: Sequence[int]) -> list[int]:
        return list(drafts)


def test_a_late_mask_holds_up_its_own_request_and_changes_no_token(grammars: Grammars) -> None:
    free = World(grammars)
    for id in ("a", "b"):
        free.submit(id, seed=ord(id), max_tokens=12, ignore_eos=True, prompt=list(range(3, 20)))
    free.run()
    world = World(grammars, step_tokens=8)
    for id in ("a", "b"):
        world.submit(id, seed=ord(id), max_tokens=12, ignore_eos=True, prompt=list(range(3, 20)))
    late = world.engine.scheduler.get(0, "a")
    assert late is not None
    late.constraint = Slow()
    world.run()
    assert world.tokens == free.tokens
    ids = [token.id for token in world.chosen]
    assert ids.index("a") > 0 and ids[::-1].index("b") > ids[::-1].index("a"), f"who waited for whom: {ids}"


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (of_schema({"type": "text"}), "text"),
        (of_schema({"if": {"type": "integer"}}), "if"),
        (of_schema({"$ref": "http://127.0.0.1:1/x.json"}), "127.0.0.1"),
        (Grammar("regex", "a(b"), "unclosed group"),
        (Grammar("lark", "start: nothing"), "nothing"),
        (Grammar("lark", "begin"), "expected"),
    ],
)
def test_a_grammar_that_makes_no_sense_is_refused_before_any_token(
    grammars: Grammars, grammar: Grammar, says: str
) -> None:
    world = run_one(grammars, grammar=grammar)
    (failed,) = world.failed
    assert failed.code == "bad_request" and not failed.retryable and not world.tokens["a"]
    assert says in failed.message.lower()


def test_a_grammar_that_becomes_too_much_fails_its_own_request(grammars: Grammars) -> None:
    much = {f"p{number}": {"type": "integer", "multipleOf": 7} for number in range(1000)}
    world = World(grammars)
    world.submit("a", grammar=of_schema({"type": "object", "properties": much}))
    world.submit("b", max_tokens=5, ignore_eos=True)
    world.run()
    (failed,) = world.failed
    assert failed.id == "a" and failed.code == "no_token" and "2000" in failed.message
    assert len(world.tokens["b"]) == 5


def test_without_a_tokenizer_grammars_are_refused() -> None:
    world = World(None)
    world.submit("a", grammar=of_schema(SCHEMA))
    assert world.failed[0].code == "bad_request" and "tokenizer" in world.failed[0].message


def test_a_cancelled_request_never_runs_however_its_grammar_comes_out(grammars: Grammars) -> None:
    world = World(grammars)
    world.submit("a", grammar=of_schema(SCHEMA))
    world.submit("b", grammar=Grammar("regex", "("))
    assert world.engine.cancel("a") and Runs(world.engine).leave(0, 0.0) == 1
    world.run()
    assert not world.failed and not world.tokens["a"] and not world.engine.compiling


def test_a_grammar_that_takes_too_long_is_refused_and_others_go_on() -> None:
    now_s = [0.0]
    stuck = threading.Event()
    begun: list[int] = []

    class Stuck(Grammars):
        def _begin(self, *arguments: Any) -> Any:
            begun.append(1)
            stuck.wait(60)
            return super()._begin(*arguments)

    held = Stuck.open(MODEL, VOCAB, sorted(EOS))
    world = World(held)
    world.engine.compiling._clock = lambda: now_s[0]
    for number in range(3):
        world.submit(f"g{number}", grammar=of_choices([f"c{number}"]))
    world.submit("free", max_tokens=3, ignore_eos=True)
    world.step()
    # Two are compiled at a time; each takes too long only from when it was begun.
    end_s = time.monotonic() + 60
    while len(begun) < 2:
        assert time.monotonic() < end_s, "they were not begun"
        time.sleep(0.001)
    now_s[0] = 11.0
    while world.engine.has_work:
        world.step()
    stuck.set()
    assert held is not None
    held.close()
    assert len(world.tokens["free"]) == 3 and [f.id for f in world.failed] == ["g0", "g1", "g2"]
    assert [f.retryable for f in world.failed] == [False, False, True]


class Panic(BaseException):
    """As those of a library in Rust, which are no Exception."""


@pytest.mark.parametrize("where", ["compiling", "following"])
def test_a_library_that_breaks_ends_its_own_request_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> Any:
        raise Panic("index out of bounds")

    held = Grammars.open(MODEL, VOCAB, sorted(EOS))
    assert held is not None
    if where == "compiling":
        monkeypatch.setattr(held, "_compiled", breaks)
    else:
        begun = held._begun

        def begin(*arguments: Any) -> Any:
            constraint = begun(*arguments)
            setattr(constraint, "_matcher", SimpleNamespace(consume_token=breaks))  # noqa: B010
            return constraint

        monkeypatch.setattr(held, "_begun", begin)
    world = World(held)
    world.submit("a", grammar=of_choices(["yes", "no"]))
    world.submit("b", max_tokens=5, ignore_eos=True)
    world.run()
    held.close()
    (failed,) = world.failed
    assert failed.id == "a" and failed.code in ("bad_request", "no_token") and not failed.retryable, failed
    assert "index out of bounds" in failed.message and len(world.tokens["b"]) == 5


def test_a_request_is_found_while_its_grammar_is_compiled(grammars: Grammars) -> None:
    world = World(grammars)
    world.submit("a", grammar=of_choices(["yes", "no"]))
    found = world.engine.find(0, "a")
    assert found is not None and world.engine.scheduler.get(0, "a") is None
    while world.engine.scheduler.get(0, "a") is None:
        world.step()
    assert world.engine.find(0, "a") is found
    world.run()
    assert world.engine.find(0, "a") is None


def test_schemas_within_a_grammar_keep_the_limits_too() -> None:
    assert of_lark('start: %json {"multipleOf": 7} | "x"').kind == "lark"
    assert of_lark('start: %json\n  {"type": "integer"} %json true').kind == "lark"
    fits = '{"multipleOf": 997}'
    for text, says in (
        ('start: %json {"multipleOf": 99999989}', "multiple"),
        ('start: %json {"\\u006dultipleOf": 1e8}', "multiple"),
        ('start: %json {"multipleOf": ' + "9" * 5000 + "}", "multiple"),
        (f"start: %json {fits} a\na: %json " + fits.replace("997", "991"), "multiple"),
        ("start: %json " + "[" * 40 + "]" * 40, "no schema"),
        ("start: %json " + '{"items": ' * 40 + "{}" + "}" * 40, "deep"),
        ('start: "%json " %json {"type": "integer"}', "no schema"),
        ("start: %json // behind a remark\n{}", "no schema"),
    ):
        with pytest.raises(GrammarInvalid, match=says):
            of_lark(text)


def test_what_is_no_number_is_no_multiple() -> None:
    for step in (True, "7", None, 0, -3, 10**399):
        if step == 10**399:
            with pytest.raises(GrammarInvalid, match="multiple"):
                of_schema({"multipleOf": step})
        else:
            assert of_schema({"multipleOf": step}).kind == "json_schema"


def test_limits_come_before_compiling() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(MAX_SCHEMA_DEPTH):
        deep = {"items": deep}
    assert depth_of(deep) == MAX_SCHEMA_DEPTH + 1 and depth_of([[], {}]) == 2 and depth_of("x") == 0
    for make in (
        lambda: of_schema(deep),
        lambda: of_schema({"enum": ["x" * MAX_GRAMMAR_BYTES]}),
        lambda: Grammar("regex", "a" * 4097),
        lambda: Grammar("lark", ""),
        lambda: of_choices([]),
        lambda: of_schema({"multipleOf": 1_000_003}),
        lambda: of_schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 0.1}, {"multipleOf": 991}]}),
        lambda: of_choices(["a", ""]),
    ):
        with pytest.raises(GrammarInvalid):
            make()
    of_schema({"allOf": [{"multipleOf": 100}, {"multipleOf": 0.01}, {"multipleOf": 7.5}]})


def test_a_grammar_in_ebnf_is_followed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    text = 'root ::= "yes " digits | "no"\ndigits ::= [0-9] [0-9]'
    world = run_one(grammars, grammar=of_grammar(text), max_tokens=20)
    assert re.fullmatch("yes [0-9][0-9]|no", tokenizer.decode(world.tokens["a"]))


@pytest.mark.parametrize("text", ["root ::= (", "root ::= missing", "root ::= " + "(" * 5000])
def test_what_is_no_ebnf_is_refused(grammars: Grammars, text: str) -> None:
    world = run_one(grammars, grammar=of_grammar(text), max_tokens=20)
    assert [failed.code for failed in world.failed] == ["bad_request"]


def test_a_grammar_over_the_limit_is_refused_before_it_is_read() -> None:
    for text in ("\n" * 2_000_000, "\n" * 60_000, " " * 60_000):
        began_s = time.process_time()
        try:
            of_grammar(text)
        except GrammarInvalid:
            assert len(text) > MAX_GRAMMAR_BYTES
        # Each line that was looked through to the end took 0.1 ms, and minutes together.
        assert time.process_time() - began_s < 1


def test_allowed_tokens_and_biases_hold(grammars: Grammars) -> None:
    allowed = (11, 12, 500, 1023)
    world = run_one(grammars, allowed_token_ids=allowed, max_tokens=60, temperature=2.0)
    assert set(world.tokens["a"]) == set(allowed)
    biased = run_one(grammars, logit_bias=((77, 100.0),), max_tokens=9)
    assert biased.tokens["a"] == [77] * 9
    never = run_one(grammars, allowed_token_ids=allowed, logit_bias=((11, -100.0), (12, -100.0)), max_tokens=60)
    assert set(never.tokens["a"]) == {500, 1023}


def test_where_grammar_and_allowed_tokens_leave_nothing_the_client_is_told(grammars: Grammars) -> None:
    world = run_one(grammars, grammar=Grammar("regex", "[0-9]+"), allowed_token_ids=(500, 501))
    assert [f.code for f in world.failed] == ["no_token"] and "no" in world.failed[0].message.lower()


@pytest.mark.parametrize("step_tokens", [3, 7, 64])
def test_the_log_probabilities_of_a_prompt_are_those_of_its_tokens(grammars: Grammars, step_tokens: int) -> None:
    prompt = np.random.default_rng(SEED).integers(0, VOCAB, 50).tolist()
    world = World(grammars, blocks=60, step_tokens=step_tokens)
    for id in ("a", "b"):  # the second may not reuse what the first computed
        world.submit(id, prompt=prompt, prompt_logprobs=2, max_tokens=2)
    world.submit("other", prompt=prompt[:20], max_tokens=30, ignore_eos=True)
    world.run()
    for id in ("a", "b"):
        told = [entry for piece in world.prompts if piece.id == id for entry in piece.tokens]
        starts = [piece.start for piece in world.prompts if piece.id == id]
        assert starts[0] == 1 and len(told) == len(prompt) - 1, f"{step_tokens} rows a step: {starts}"
        for place, (logprob, rank, top) in enumerate(told, start=1):
            logits = logits_of(prompt[:place]).astype(np.float64)
            chances = logits - np.log(np.exp(logits).sum())
            assert logprob == pytest.approx(chances[prompt[place]], abs=1e-5), place
            best = np.argsort(-chances)[:2]
            assert [token for token, _ in top] == best.tolist(), place
            assert rank == 1 + np.count_nonzero(logits > logits[prompt[place]]), place


def test_prompts_are_judged_few_at_a_time(grammars: Grammars) -> None:
    world = World(grammars, step_tokens=64)
    world.engine.scheduler.config = SchedulerConfig(max_model_len=512, step_tokens=64, prompt_logprobs_rows=5)
    for id in ("a", "b"):
        world.submit(id, prompt=range(2, 32), prompt_logprobs=0, max_tokens=1)
    most = 0
    real = world.decoder.step

    def step(plan: Any, deadline_s: float) -> np.ndarray:
        nonlocal most
        most = max(most, len(plan.logits_rows))
        return real(plan, deadline_s)

    world.decoder.step = step  # type: ignore[method-assign]
    world.run()
    assert most <= 7, "each may have one row beyond what one step judges"
    assert sum(len(piece.tokens) for piece in world.prompts) == 58


def test_a_request_that_has_tokens_is_not_judged_again() -> None:
    params = SamplingParams(max_tokens=5, prompt_logprobs=0)
    request = Request(owner=0, id="a", attempt=2, prompt=np.array([1, 2, 3], dtype=np.int32), output=[4], params=params)
    assert request.prompt_scored == 3


def test_masks_are_made_while_the_engine_does_something_else(grammars: Grammars) -> None:
    constraint = grammars.begin(of_schema(SCHEMA), [], sorted(EOS), 0).result(60)
    assert constraint.ready(0)
    first = int(np.flatnonzero(np.unpackbits(constraint.mask.view(np.uint8), bitorder="little"))[0])
    assert not constraint.advance(first)
    constraint.look([])
    end_s = time.monotonic() + 60
    while not constraint.ready(0):
        assert time.monotonic() < end_s, "no thread made the mask"
    assert constraint.mask.any() and not constraint.fault


@pytest.mark.parametrize("special", [False, True])
def test_a_call_that_must_be_made_is_marked_with_the_models_own_tokens(special: bool, tmp_path: Path) -> None:
    # Qwen's tokenizers have such tokens, and do not call them special; llguidance does.
    source = json.loads((MODEL / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    marks = {"<tool_call>": VOCAB, "</tool_call>": VOCAB + 1}
    source["added_tokens"] += [{"id": token, "content": mark, **flags} for mark, token in marks.items()]
    (tmp_path / "tokenizer.json").write_text(json.dumps(source))
    model = ServedModel(
        name="m",
        tokenizer=Tokenizer.load(tmp_path),
        max_model_len=512,
        vocab=VOCAB + 2,
        path="",
        shape=(1, 1),
        created=0,
    )
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    use = tool_use(tools, "required", None)
    reading = model.reading([5], use, thinks=True, shown=True)
    shown = model.shown_tokens(reading)
    assert (model.marks, shown) == (marks, frozenset(marks.values()) if special else frozenset())
    grammar = Grammar("lark", call_grammar(use, model.call_style, model.marks))
    text = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    tokens = model.tokenizer.encode(text)
    assert tokens[0] == marks["<tool_call>"] and tokens[-1] == marks["</tool_call>"]
    grammars = Grammars.open(tmp_path, VOCAB + 2, sorted(EOS))
    assert grammars is not None
    constraint = grammars.begin(grammar, tokens, sorted(EOS), 0).result(30)
    assert constraint.ready(30) and constraint.fault == ""
    grammars.close()
