"""Tool calls are found in a model's text however it is cut, and nothing else is."""

from __future__ import annotations

import random

import pytest

from eaas.gateway.output_reader import CallArguments, CallBegun, OutputReader, Reading, read_output
from eaas.gateway.output_styles import HERMES, MISTRAL, CallStyle, style_of

Calls = list[tuple[str, str]]

CASES: list[tuple[CallStyle, str, str, Calls]] = [
    (HERMES, "just text < tool", "just text < tool", []),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, 'So:\n<tool_call>{"name":"f","arguments":{}}</tool_call>', "So:\n", [("f", "{}")]),
    (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"s": "}</tool_call>\\"{", "l": [{}, []]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"b": {"c": 2}}}\n</tool_call> done',
        "done",
        [("f", '{"s": "}</tool_call>\\"{", "l": [{}, []]}'), ("g", '{"b": {"c": 2}}')],
    ),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "\\u0066\\n", "arguments": []}', "", [("f\n", "[]")]),
    # No calls after all.
    (HERMES, "<tool_call>maybe</tool_call>", "<tool_call>maybe</tool_call>", []),
    (HERMES, '<tool_call> {"nome": 1}</tool_call>', '<tool_call> {"nome": 1}</tool_call>', []),
    (HERMES, '<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
    (HERMES, "<tool_call>{]", "<tool_call>{]", []),
    (HERMES, '<tool_call>{"name"', '<tool_call>{"name"', []),
    (HERMES, "<tool_call>\n", "<tool_call>\n", []),
    # Cut off at the limit of tokens: what there is of the arguments.
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1, ', "", [("f", '{"a": [1, ')]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', "",
     [("f", '{"a": 1}'), ("g", "{}")]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}]', "", [("f", '{"a": [1]}')]),
    (MISTRAL, 'Hm [TOOL_CALLS]f{"a": {"b": 1}}[TOOL_CALLS]g[ARGS]{}', "Hm ", [("f", '{"a": {"b": 1}}'), ("g", "{}")]),
    (MISTRAL, "[TOOL_CALLS]nothing of it", "[TOOL_CALLS]nothing of it", []),
    (MISTRAL, "[TOOL_CALLS]", "[TOOL_CALLS]", []),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text", "words", "calls"), CASES, ids=[text[:40] for _, text, _, _ in CASES])
def test_calls_and_words_are_told_apart(style: CallStyle, text: str, words: str, calls: Calls) -> None:
    output = read_output(Reading(calls=style), text)
    assert (output[0], [(begun.name, arguments) for begun, arguments in output[2]]) == (words, calls)


@pytest.mark.parametrize(("style", "text", "words", "calls"), CASES, ids=[text[:40] for _, text, _, _ in CASES])
def test_the_cut_of_the_text_changes_nothing(style: CallStyle, text: str, words: str, calls: Calls) -> None:
    for seed in range(50):
        chance = random.Random(seed)
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(1, len(text) + 1)))
        reader = OutputReader(Reading(calls=style))
        found: list[list[str]] = []
        heard = ""
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        for part in [part for piece in pieces for part in reader.push(piece)] + reader.flush():
            if isinstance(part, str):
                heard += part
            elif isinstance(part, CallBegun):
                assert part.number == len(found), f"seed {seed}"
                found.append([part.name, ""])
            elif isinstance(part, CallArguments):
                found[part.number][1] += part.text
        assert (heard, [(name, arguments) for name, arguments in found]) == (words, calls), f"seed {seed}"
        assert reader.calls == len(calls), f"seed {seed}"


def test_a_name_and_arguments_are_given_out_as_soon_as_they_are_certain() -> None:
    reader = OutputReader(Reading(calls=HERMES))
    assert reader.push('<tool_call>{"name": "f", "argu') == []
    assert reader.push('ments": {"a') == [CallBegun(0, "f"), CallArguments(0, '{"a')]
    assert reader.push('": 1}') == [CallArguments(0, '": 1}')]
    assert reader.push("}</tool_") == []
    assert reader.push("call> and on") == ["and on"]


def test_text_that_only_begins_like_a_call_waits_no_longer_than_it_must() -> None:
    reader = OutputReader(Reading(calls=HERMES))
    assert reader.push("a <tool") == ["a "]
    assert reader.push("box") == ["<toolbox"]


@pytest.mark.parametrize(
    ("style", "text", "words"),
    [
        (HERMES, 'So: <tool_call>{"na', "So: "),
        (HERMES, "<tool_call>\n", ""),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_', ""),
        (MISTRAL, "Hm [TOOL_CALLS] [", "Hm "),
        (MISTRAL, "[TOOL_CALLS]get_wea", ""),
        # It may become a call, or not: too little was said to leave it out.
        (HERMES, "1 <tool_", "1 <tool_"),
        (HERMES, "<tool_call>maybe", "<tool_call>maybe"),
    ],
)
def test_what_a_limit_cut_off_while_it_became_a_call_is_no_text(style: CallStyle, text: str, words: str) -> None:
    assert read_output(Reading(calls=style), text, cut=True)[0] == words


def test_the_style_is_the_one_that_the_template_shows() -> None:
    assert style_of("{{ '[TOOL_CALLS]' }}") is MISTRAL
    assert style_of("{{ '<tool_call>' }}") is HERMES
    assert style_of("nothing") is HERMES
