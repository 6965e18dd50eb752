"""How models of each family mark their tool calls and their thoughts: tables, from which outputs are read and grammars
of calls are written. A model's own chat template shows which family it is of. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Arguments as pairs of a name and a value, each with what stands before and behind it."""

    key: tuple[str, str]
    value: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class CallStyle:
    """How models of one family write their calls:
    ``begin  open NAME named ARGUMENTS close  between  open NAME named ARGUMENTS close  end``,
    each text with the white space that the family's templates show; other white space is read as well.

    Attributes:
        shown: What a template of the family has in it, and those of families further down the table have not.
        each: ``begin`` and ``end`` are around each call, ``between`` between them; else around all together.
        object: NAME and ARGUMENTS are the two members of one JSON object.
        listed: The calls are one JSON list of these, or, as newer models of the family have it, ``name{...}`` each.
        pairs: How arguments are written that are no JSON object.
        named_id: NAME is ``functions.NAME:NUMBER``, which is the call's id as well.
        id_letters: Length of a call's id, where the family's templates insist on one; 0: they do not.
    """

    shown: str
    begin: str
    open: str = ""
    named: str = ""
    close: str = ""
    between: str = ""
    end: str = ""
    each: bool = False
    object: bool = False
    listed: bool = False
    pairs: Pairs | None = None
    named_id: bool = False
    id_letters: int = 0


HERMES = CallStyle(  # Qwen3's, and of many others
    shown="<tool_call>", begin="<tool_call>\n", between="\n", end="\n</tool_call>", each=True, object=True,
)  # fmt: skip
MISTRAL = CallStyle(
    shown="[TOOL_CALLS]", begin="[TOOL_CALLS]", named="[ARGS]", object=True, listed=True, id_letters=9,
)  # fmt: skip
DEEPSEEK_V3 = CallStyle(
    shown="```json", begin="<｜tool▁calls▁begin｜>", open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    named="\n```json\n", close="\n```<｜tool▁call▁end｜>", between="\n", end="<｜tool▁calls▁end｜>",
)  # fmt: skip
DEEPSEEK_V31 = CallStyle(
    shown="<｜tool▁calls▁begin｜>", begin="<｜tool▁calls▁begin｜>", open="<｜tool▁call▁begin｜>",
    named="<｜tool▁sep｜>", close="<｜tool▁call▁end｜>", end="<｜tool▁calls▁end｜>",
)  # fmt: skip
KIMI_K2 = CallStyle(
    shown="<|tool_calls_section_begin|>", begin="<|tool_calls_section_begin|>", open="<|tool_call_begin|>",
    named="<|tool_call_argument_begin|>", close="<|tool_call_end|>", end="<|tool_calls_section_end|>", named_id=True,
)  # fmt: skip
GLM_45 = CallStyle(
    shown="<arg_key>", begin="<tool_call>", named="\n", between="\n", end="</tool_call>", each=True,
    pairs=Pairs(key=("<arg_key>", "</arg_key>\n"), value=("<arg_value>", "</arg_value>\n")),
)  # fmt: skip
QWEN3_CODER = CallStyle(
    shown="<function=", begin="<tool_call>\n", open="<function=", named=">\n", close="</function>\n", between="\n",
    end="</tool_call>", each=True, pairs=Pairs(key=("<parameter=", ">"), value=("\n", "\n</parameter>\n")),
)  # fmt: skip
MINIMAX_M2 = CallStyle(
    shown="<minimax:tool_call>", begin="<minimax:tool_call>\n", open='<invoke name="', named='">\n',
    close="</invoke>\n", end="</minimax:tool_call>",
    pairs=Pairs(key=('<parameter name="', '">'), value=("", "</parameter>\n")),
)  # fmt: skip
# GPT-OSS's. Calls, thoughts and answers are messages, which the reader reads in their own way.
HARMONY = CallStyle(
    shown="<|channel|>", begin="", open="<|channel|>commentary to=functions.",
    named=" <|constrain|>json<|message|>",
)  # fmt: skip
_STYLES = (MISTRAL, DEEPSEEK_V31, KIMI_K2, MINIMAX_M2, GLM_45, QWEN3_CODER, HARMONY, HERMES)


def style_of(template: str) -> CallStyle:
    """The style that a chat template shows to its model; Hermes's, the most common, where it shows none."""
    style = next((style for style in _STYLES if style.shown in template), HERMES)
    # Other templates may show JSON so, too.
    return DEEPSEEK_V3 if style is DEEPSEEK_V31 and DEEPSEEK_V3.shown in template else style


@dataclass(frozen=True, kw_only=True)
class ThoughtStyle:
    """What stands before and behind a model's thoughts; ``answer``: and before what it answers."""

    shown: str
    begin: str
    end: str
    answer: str = ""

    def may_follow(self, prompt: str) -> bool:
        """Whether there may be thoughts behind a prompt of this end: it has neither ended them nor begun an answer."""
        return prompt.endswith("<|start|>assistant") if self.answer else not prompt.endswith(self.end)


THINK = ThoughtStyle(shown="</think>", begin="<think>", end="</think>")
ANALYSIS = ThoughtStyle(
    shown="<|channel|>", begin="<|channel|>analysis<|message|>", end="<|end|><|start|>assistant",
    answer="<|channel|>final<|message|>",
)  # fmt: skip
_THOUGHTS = (ANALYSIS, THINK, ThoughtStyle(shown="[/THINK]", begin="[THINK]", end="[/THINK]"))


def thoughts_of(template: str) -> ThoughtStyle | None:
    """How a model thinks aloud, as far as its chat template shows it; None where it does not."""
    return next((style for style in _THOUGHTS if style.shown in template), None)


def marks_in(*styles: CallStyle | ThoughtStyle | None) -> frozenset[str]:
    """What may be tokens of their own in the texts of styles."""
    return frozenset(re.findall(r"<[^<>\s]*>|\[/?[A-Z_]+\]", repr(styles)))
