"""Calls that must be made are written as each family writes them, thoughts before them: llguidance accepts the
families' own transcripts."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from eaas.gateway.output_reader import Reading, read_output
from eaas.gateway.output_styles import ANALYSIS, GLM_45, HARMONY, THINK, CallStyle, ThoughtStyle, marks_in
from eaas.gateway.tool_calls import after_thoughts, call_grammar, tool_use
from eaas.model.tokenizer import BYTE_TO_CHAR
from eaas.worker.grammar import Grammar, of_choices, of_schema
from tests.eaas.test_output_reader import TOOLS, WRITTEN

CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "x"}'
STRICT = [(style, text) for style, text in WRITTEN if "<tool_call>look<arg_key>" not in text] + [(HARMONY, CALL)]


class Vocabulary:
    """A token for each byte, and some tokens beside."""

    def __init__(self, marks: list[str]) -> None:
        self.tokenizer = Tokenizer(models.BPE({char: byte for byte, char in BYTE_TO_CHAR.items()}, []))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens([AddedToken("<|end_of_text|>", special=True)])
        self.tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks])
        self.marks = {mark: self.tokenizer.token_to_id(mark) for mark in marks}
        self._for_matcher = LLTokenizer(self.tokenizer.to_str(), eos_token=256)

    def accepts(self, grammar: str, text: str) -> bool:
        """Whether a text is in the language, to its end."""
        matcher = LLMatcher(self._for_matcher, LLMatcher.grammar_from_lark(grammar))
        assert not matcher.is_error(), matcher.get_error()
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        return all(matcher.consume_token(token) for token in tokens) and matcher.is_accepting()


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("style", "text"), STRICT, ids=[style.shown for style, _ in STRICT])
def test_calls_that_must_be_made_are_those_that_the_family_writes(style: CallStyle, text: str, marked: bool) -> None:
    vocabulary = Vocabulary(sorted(marks_in(style, THINK)) if marked else [])
    use = tool_use(TOOLS, "required", None)
    grammar = call_grammar(use, style, vocabulary.marks)
    assert vocabulary.accepts(grammar, text)
    assert not vocabulary.accepts(grammar, "x" + text)
    assert not vocabulary.accepts(grammar, text.replace("look", "hide"))
    single = call_grammar(tool_use(TOOLS, "required", False), style, vocabulary.marks)
    assert vocabulary.accepts(single, text) == (style is HARMONY)
    thoughts = after_thoughts(Grammar("lark", grammar), THINK, vocabulary.marks, thinking=True, calls=True)
    assert (thoughts is not None) == marked, "where no token ends a thought, there is none"
    if thoughts is not None:
        assert vocabulary.accepts(thoughts.text, f"Well <x>.\n</think>\n\n{text}")
        assert not vocabulary.accepts(thoughts.text, "Well <x>.\n</think>\n\nno call")


ODD_SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"properties": ["at"]}, ""),
    ({"properties": "at", "required": True}, ""),
    ({"properties": {"at": True}, "required": None}, "<arg_key>at</arg_key>\n<arg_value>[3]</arg_value>\n"),
    ({"properties": {"at": False}}, ""),
    (
        {"properties": {"at": {"type": "string", "enum": ["x", None]}}, "required": ["at"]},
        "<arg_key>at</arg_key>\n<arg_value>x</arg_value>\n",
    ),
]


@pytest.mark.parametrize(("schema", "arguments"), ODD_SCHEMAS)
def test_schemas_that_are_no_objects_bind_no_arguments(schema: dict[str, Any], arguments: str) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    vocabulary = Vocabulary(sorted(marks_in(GLM_45)))
    grammar = call_grammar(tool_use([tool], "required", False), GLM_45, vocabulary.marks)
    assert vocabulary.accepts(grammar, f"<tool_call>look\n{arguments}</tool_call>")


@pytest.mark.parametrize("style", [THINK, ANALYSIS])
@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (of_schema({"type": "object", "properties": {"a": {"type": "integer"}}}), '{"a": 1}'),
        (Grammar("regex", r"a/b\/c\n?"), "a/b/c"),
        (of_choices(["yes", "no"]), "no"),
    ],
    ids=["schema", "regex", "choices"],
)
def test_thoughts_come_before_an_answer_in_a_language(style: ThoughtStyle, grammar: Grammar, text: str) -> None:
    vocabulary = Vocabulary(sorted(marks_in(style)))
    whole = after_thoughts(grammar, style, vocabulary.marks, thinking=False, calls=False)
    assert whole is not None
    answer = f"{style.begin}Well.\n{style.end}{style.answer}{text}"
    assert vocabulary.accepts(whole.text, answer)
    assert vocabulary.accepts(whole.text, style.answer + text), "a thought may be left out"
    assert not vocabulary.accepts(whole.text, f"{style.begin}Well.\n{style.end}{style.answer}maybe")
    for blank, allowed in (("\n\n", True), ("\x0c", False), ("\u2007", False)):
        said = f"{style.begin}Well.{style.end}{blank}{style.answer}{text}"
        assert vocabulary.accepts(whole.text, said) == allowed, f"{blank!r} before what is JSON"
    assert read_output(Reading(thoughts=style), answer)[0] == text
    ebnf = Grammar("gbnf", 'root ::= "x"')
    assert after_thoughts(ebnf, style, vocabulary.marks, thinking=False, calls=False) is None
