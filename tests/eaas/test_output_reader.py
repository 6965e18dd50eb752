"""What models of each family write is told apart however it is cut: thoughts, words, calls; and nothing is lost.

The transcripts are written as the families' own chat templates show them.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from eaas.gateway.output_reader import (
    CallArguments,
    CallBegun,
    OutputReader,
    Reading,
    Thought,
    read_output,
    types_in,
)
from eaas.gateway.output_styles import (
    ANALYSIS,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM_45,
    HARMONY,
    HERMES,
    KIMI_K2,
    MINIMAX_M2,
    MISTRAL,
    QWEN3_CODER,
    THINK,
    CallStyle,
    style_of,
    thoughts_of,
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {
                    "at": {"type": "string"},
                    "far": {"type": "integer"},
                    "how": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "all": {"type": ["array", "object"]},
                },
                "required": ["at"],
            },
        },
    },
    {"type": "function", "function": {"name": "jump"}},
]
LOOK = {"at": 'a "b"\n<c> é</', "far": 3}
V3 = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{0}\n```json\n{1}\n```<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>{0}\n{1}<｜tool▁calls▁end｜>",
)
V31 = (
    "<｜tool▁call▁begin｜>{0}<｜tool▁sep｜>{1}<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>{0}{1}<｜tool▁calls▁end｜>",
)
KIMI = (
    "<|tool_call_begin|>functions.{0}:{2}<|tool_call_argument_begin|>{1}<|tool_call_end|>",
    "<|tool_calls_section_begin|>{0}{1}<|tool_calls_section_end|>",
)
MISTRAL_FORM = ('{{"name": "{0}", "arguments": {1}}}', "[{0}, {1}]")
HERMES_FORM = ('<tool_call>\n{{"name": "{0}", "arguments": {1}}}\n</tool_call>', "{0}\n{1}")
GLM_LOOK = (
    '<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>a "b"\n<c> é</</arg_value>\n'
    "<arg_key>far</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
CODER_LOOK = (
    '<tool_call>\n<function=look>\n<parameter=at>\na "b"\n<c> é</\n</parameter>\n'
    "<parameter=far>\n3\n</parameter>\n</function>\n</tool_call>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">a "b"\n<c> é</</parameter>\n'
    '<parameter name="far">3</parameter>\n</invoke>\n<invoke name="jump">\n</invoke>\n</minimax:tool_call>'
)


def both(form: tuple[str, str]) -> str:
    """The two calls in a form of its own for each, and for both together."""
    one, together = form
    look = one.format("look", json.dumps(LOOK, ensure_ascii=False), 0)
    return together.format(look, one.format("jump", "{}", 1))


# What a model of each family writes for the two calls.
WRITTEN: list[tuple[CallStyle, str]] = [
    (HERMES, both(HERMES_FORM)),
    (MISTRAL, "[TOOL_CALLS]" + both(MISTRAL_FORM)),
    (DEEPSEEK_V3, both(V3)),
    (DEEPSEEK_V31, both(V31)),
    (KIMI_K2, both(KIMI)),
    (GLM_45, GLM_LOOK + "\n<tool_call>jump\n</tool_call>"),
    (GLM_45, GLM_LOOK.replace("\n<arg", "<arg").replace(">\n</", "></") + "<tool_call>jump</tool_call>"),
    (QWEN3_CODER, CODER_LOOK + "\n<tool_call>\n<function=jump>\n</function>\n</tool_call>"),
    (MINIMAX_M2, MINIMAX),
]  # fmt: skip


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def heard(reading: Reading, pieces: list[str], *, cut: bool = False) -> tuple[str, str, list[tuple[str, ...]]]:
    """Words, thoughts, and name, arguments and id of each call, as a client puts them together."""
    reader = OutputReader(reading)
    words, thoughts = "", ""
    calls: list[list[str]] = []
    for part in [part for piece in pieces for part in reader.push(piece)] + reader.flush(cut=cut):
        if isinstance(part, str):
            words += part
        elif isinstance(part, Thought):
            thoughts += part.text
        elif isinstance(part, CallBegun):
            assert part.number == len(calls)
            calls.append([part.name, "", part.id])
        else:
            assert isinstance(part, CallArguments) and part.number == len(calls) - 1
            calls[part.number][1] += part.text
    assert reader.calls == len(calls)
    return words, thoughts, [tuple(call) for call in calls]


def agree_however_cut(reading: Reading, text: str, *, cut: bool = False) -> tuple[str, str, list[tuple[str, ...]]]:
    """What is heard of a text, which must be the same in two pieces, in many and in single characters."""
    whole = heard(reading, [text], cut=cut)
    for at in range(len(text) + 1):
        assert heard(reading, pieces_of(text, [at]), cut=cut) == whole, f"cut at {at}: {text[at:]!r}"
    assert heard(reading, list(text), cut=cut) == whole
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    for _ in range(20):
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(1, 12)))
        assert heard(reading, pieces_of(text, cuts), cut=cut) == whole, f"seed {seed}: {cuts}"
    output = read_output(reading, text, cut=cut)
    assert (
        output[0],
        output[1],
        [(begun.name, arguments, begun.id) for begun, arguments in output[2]],
    ) == whole
    return whole


@pytest.mark.parametrize(("style", "text"), WRITTEN, ids=[f"{s.shown}-{n}" for n, (s, _) in enumerate(WRITTEN)])
@pytest.mark.parametrize("thinks", [False, True])
def test_calls_of_each_family_are_found_however_they_are_cut(style: CallStyle, text: str, thinks: bool) -> None:
    reading = Reading(calls=style, tools=TOOLS, thoughts=THINK if thinks else None)
    before = "<think>\nWell: 1 < 2.\n</think>\n\n" if thinks else ""
    words, thoughts, calls = agree_however_cut(reading, before + "So:" + text + "\ndone")
    assert (words, thoughts) == ("So:done", "Well: 1 < 2." if thinks else "")
    assert [(name, json.loads(arguments)) for name, arguments, _ in calls] == [("look", LOOK), ("jump", {})]
    ids = ["functions.look:0", "functions.jump:1"] if style is KIMI_K2 else ["", ""]
    assert [id for _, _, id in calls] == ids


MESSAGES = [
    ("<|channel|>analysis<|message|>Four.<|end|><|start|>assistant<|channel|>final<|message|>It is 4<", "It is 4<",
     "Four.", []),
    ("<|channel|>final<|message|>4<|return|>", "4", "", []),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", "", "a\nb", []),
    ('<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>'
     '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "x"}<|call|>',
     "I look.", "Look.", [("look", '{"at": "x"}', "")]),
    (' to=functions.look<|channel|>commentary json<|message|>{}', "", "", [("look", "{}", "")]),
    ("<|channel|>analysis to=browser.open<|message|>{}<|call|>", "", "{}", []),
    # No messages after all.
    ("Just words.", "Just words.", "", []),
    ("<|channel|>final", "<|channel|>final", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words", "thoughts", "calls"), MESSAGES)
def test_messages_of_the_harmony_format_are_told_apart(text: str, words: str, thoughts: str, calls: Any) -> None:
    reading = Reading(calls=HARMONY, thoughts=ANALYSIS)
    assert agree_however_cut(reading, text) == (words, thoughts, calls)


THOUGHTS = [
    (False, "<think>\nhm\n\n</think>\n\nYes", "Yes", "hm\n"),
    (False, "\n<think>hm</think>Yes", "Yes", "hm"),
    (False, "<think>\n\n</think>\n\nYes", "Yes", ""),
    (False, " Yes <think>no</think>", " Yes <think>no</think>", ""),
    (False, "<thin", "<thin", ""),
    (True, "hm </thin k> <think>\n</think> Yes", "Yes", "hm </thin k> <think>"),
    (True, "hm</thi", "", "hm</thi"),
]


@pytest.mark.parametrize(("begun", "text", "words", "thoughts"), THOUGHTS)
def test_thoughts_are_told_apart_from_the_answer(begun: bool, text: str, words: str, thoughts: str) -> None:
    for calls in (None, HERMES):
        reading = Reading(calls=calls, thoughts=THINK, thinking=begun)
        assert agree_however_cut(reading, text) == (words, thoughts, [])
    hidden = Reading(thoughts=THINK, thinking=begun, shown=False)
    assert agree_however_cut(hidden, text) == (words, "", [])


def test_a_thought_that_was_not_ended_ends_where_calls_begin() -> None:
    reading = Reading(calls=KIMI_K2, thoughts=THINK, thinking=True)
    words, thoughts, calls = agree_however_cut(reading, "hm " + both(KIMI))
    assert (words, thoughts, [call[0] for call in calls]) == ("", "hm ", ["look", "jump"])


MALFORMED = [
    (DEEPSEEK_V3, "<｜tool▁calls▁begin｜>none"),
    (DEEPSEEK_V3, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\nno json"),
    (DEEPSEEK_V31, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"),
    (KIMI_K2, "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0 {}"),
    (KIMI_K2, "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
    (GLM_45, "<tool_call>two words</tool_call>"),
    (GLM_45, "<tool_call>f\n<arg_key>at</arg_key>\nx"),
    (GLM_45, "<tool_call>" + "f" * 300 + "</tool_call>"),
    (QWEN3_CODER, "<tool_call>\n<function=f>\nno parameter"),
    (QWEN3_CODER, '<tool_call>\n{"name": "f", "arguments": {}}'),
    (MINIMAX_M2, '<minimax:tool_call>\n<invoke name="f"> what'),
]


@pytest.mark.parametrize(("style", "text"), MALFORMED)
def test_what_is_no_call_after_all_is_words(style: CallStyle, text: str) -> None:
    assert agree_however_cut(Reading(calls=style), "So: " + text) == ("So: " + text, "", [])


@pytest.mark.parametrize(("style", "text"), WRITTEN, ids=[f"{s.shown}-{n}" for n, (s, _) in enumerate(WRITTEN)])
def test_whatever_is_damaged_is_words_or_calls_however_it_is_cut(style: CallStyle, text: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    for _ in range(40):
        a, b = sorted(chance.randrange(len(text)) for _ in range(2))
        other = chance.choice(["", "}", "<", "x y", "\n", text[: b - a]])
        damaged = text[:a] + other + text[b:]
        reading = Reading(calls=style, tools=TOOLS, thoughts=chance.choice([None, THINK, ANALYSIS]))
        for cut in (False, True):
            whole = heard(reading, [damaged], cut=cut)
            for size in (1, 2, 7):
                cuts = list(range(size, len(damaged), size))
                assert heard(reading, pieces_of(damaged, cuts), cut=cut) == whole, f"seed {seed}: {damaged!r}"


@pytest.mark.parametrize(
    ("style", "text", "calls"),
    [
        (GLM_45, '<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>a "b', ['{"at": "a \\"b']),
        (GLM_45, "<tool_call>look\n<arg_key>far</arg_key>\n<arg_value>12</arg", ['{"far": 12']),
        (GLM_45, "<tool_call>look\n<arg_key>far</arg_key>\n<arg_value>1</arg_value>\n<arg_k", ['{"far": 1']),
        (GLM_45, "<tool_call>loo", []),
        (KIMI_K2, "<|tool_calls_section_begin|><|tool_call_begin|>functions.lo", []),
        (KIMI_K2, both(KIMI)[:150], ['{"at": "a \\"b\\"\\n<c> é</", "far": 3}']),
        (DEEPSEEK_V31, both(V31)[:64], ['{"at": "a']),
    ],
)  # fmt: skip
def test_what_a_limit_cut_off_while_it_became_a_call_is_left_out(style: CallStyle, text: str, calls: list[str]) -> None:
    words, _, found = agree_however_cut(Reading(calls=style, tools=TOOLS), "Hm " + text, cut=True)
    assert (words, [arguments for _, arguments, _ in found]) == ("Hm ", calls)


def test_arguments_that_a_stop_string_ended_are_closed() -> None:
    reading = Reading(calls=GLM_45, tools=TOOLS)
    text = GLM_LOOK.removesuffix("</tool_call>")
    for ending, at in ((text, LOOK["at"]), (text.partition("</arg_value>")[0], LOOK["at"])):
        _, _, ((_, arguments, _),) = agree_however_cut(reading, ending)
        assert json.loads(arguments)["at"] == at


def test_arguments_come_as_they_are_written() -> None:
    reader = OutputReader(Reading(calls=QWEN3_CODER, tools=TOOLS))
    reader.push("<tool_call>\n<function=look>\n<parameter=at>\n")
    assert reader.push("long\n") == [CallArguments(0, "long")]
    assert reader.push("er") == [CallArguments(0, "\\ner")]
    assert reader.push("\n</parameter>\n") == [CallArguments(0, '"')]


def test_a_name_without_end_takes_no_longer_the_longer_it_is() -> None:
    reader, begun = OutputReader(Reading(calls=HERMES)), time.process_time()
    for piece in ['<tool_call>\n{"name": "', *["abcd"] * 16_000]:
        assert reader.push(piece) == []
    assert time.process_time() - begun < 5
    name = "abcd" * 16_000
    assert reader.push('", "arguments": {"at": 1}}</tool_call>') == [
        CallBegun(0, name),
        CallArguments(0, '{"at": 1}'),
    ]


@pytest.mark.parametrize("count", [1000, 1005, 1050])
def test_names_about_as_long_as_one_is_looked_for_are_read_however_they_are_cut(count: int) -> None:
    text = f'<tool_call>{{"name": "{"f" * count}", "arguments":{{"at":1}}}}</tool_call>'
    whole = heard(Reading(calls=HERMES), [text])
    assert whole[2][0][0] == "f" * count
    for size in (1, 2, 7, 500):
        cuts = list(range(size, len(text), size))
        assert heard(Reading(calls=HERMES), pieces_of(text, cuts)) == whole


SURROGATES = [
    ('{"name": "\\ud800", "arguments": {"at": "\\ud800"}}', "\\ud800"),
    ('{"arguments": {"at": "\\ud800"}, "name": "f"}', "f"),
    ('{"arguments": "{\\"at\\": \\"\\ud800\\"}", "name": "f"}', "f"),
]


@pytest.mark.parametrize(("call", "name"), SURROGATES)
def test_lone_surrogates_of_a_call_stay_escapes(call: str, name: str) -> None:
    _, _, ((found, arguments, _),) = agree_however_cut(Reading(calls=HERMES), f"<tool_call>{call}</tool_call>")
    assert (found, arguments) == (name, '{"at": "\\ud800"}')


@pytest.mark.parametrize("properties", [["at"], "at", None, {"at": True}, {"at": False}])
def test_of_a_schema_that_says_nothing_of_an_argument_its_type_is_that_of_its_value(properties: Any) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": properties}}}
    text = "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    assert read_output(Reading(calls=GLM_45, tools=[tool]), text)[2][0][1] == '{"at": 3}'


VALUES = [
    ("at", "3", '"3"'), ("at", " x ", '" x "'), ("far", "3", "3"), ("far", " 3\n", "3"), ("far", "three", '"three"'),
    ("how", "null", "null"), ("how", "None", "null"), ("how", "5", '"5"'), ("how", '"x"', '"\\"x\\""'),
    ("all", "[1, {}]", "[1, {}]"), ("all", "True", "true"), ("free", "x", '"x"'), ("free", "1.50", "1.50"),
    ("free", "NaN", '"NaN"'), ("free", "False", "false"), ("free", "[" * 9999, '"' + "[" * 9999 + '"'),
]  # fmt: skip


@pytest.mark.parametrize(("key", "text", "value"), VALUES, ids=[f"{k}-{t[:9]!r}" for k, t, _ in VALUES])
def test_values_written_as_text_are_of_the_schemas_types(key: str, text: str, value: str) -> None:
    written = f"<tool_call>look\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    output = read_output(Reading(calls=GLM_45, tools=TOOLS), written)
    assert [arguments for _, arguments in output[2]] == [f'{{"{key}": {value}}}']
    json.loads(output[2][0][1])


def test_types_are_those_that_a_schema_names() -> None:
    assert types_in({"type": "string"}) == {"string"}
    assert types_in({"anyOf": [{"type": "string"}, {"$ref": "#"}]}) == types_in(True) == set()


TEMPLATES = [
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '\\n' + '```json'", DEEPSEEK_V3),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'", DEEPSEEK_V31),
    ("<|tool_calls_section_begin|>", KIMI_K2),
    ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", GLM_45),
    ("<tool_call>\n<function=example_function_name>", QWEN3_CODER),
    ("<minimax:tool_call>", MINIMAX_M2),
    ("<|start|>assistant<|channel|>", HARMONY),
    ('```json <tool_call>\n{"name": <function-name>', HERMES),
]  # fmt: skip


@pytest.mark.parametrize(("template", "style"), TEMPLATES, ids=[t[:30] for t, _ in TEMPLATES])
def test_a_template_shows_its_familys_style(template: str, style: CallStyle) -> None:
    assert style_of(template) is style
    assert thoughts_of(template) is (ANALYSIS if style is HARMONY else None)
    assert thoughts_of("{{ content.split('</think>')[-1] }}") is THINK
