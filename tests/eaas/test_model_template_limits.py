"""A hostile chat template, or hostile messages, are refused in bounded time and memory."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest

from eaas.model.chat import MOST_CHARACTERS, MOST_SECONDS, ChatTemplate, TemplateRefused

DOUBLES = "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = DOUBLE %}{% endfor %}{{ ns.s }}"
HOSTILE = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that branches": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(90) }}",
    "a long string": "{{ 'x' * 10**10 }}",
    "a long string, turned": "{{ 10**10 * 'x' }}",
    "a long list": "{{ ([0] * 10**10)|length }}",
    "doubling by +": DOUBLES.replace("DOUBLE", "ns.s + ns.s"),
    "doubling by ~": DOUBLES.replace("DOUBLE", "ns.s ~ ns.s"),
    "doubling by join": DOUBLES.replace("DOUBLE", "[ns.s, ns.s]|join"),
    "doubling by a method": DOUBLES.replace("DOUBLE", "ns.s.join(['', ns.s, ''])"),
    "doubling by replace": DOUBLES.replace("DOUBLE", "ns.s|replace('x', 'xx')"),
    "doubling by a list": DOUBLES.replace("DOUBLE", "[ns.s, ns.s]"),
    "doubling by a list, as JSON": DOUBLES.replace("DOUBLE", "[ns.s, ns.s]").replace("{{ ns.s }}", "{{ ns.s|tojson }}"),
    "doubling by a block": "{% set ns = namespace(s='x') %}{% for i in range(60) %}"
    "{% set b %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = b %}{% endfor %}",
    "much output": "{% set s = 'x' * 9999999 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "much text": "{% for i in range(99999) %}" + "words " * 9999 + "{% endfor %}",
    "padding": "{{ 'x'.ljust(10**10) }}",
    "padding by a format": "{{ '{:>9999999999}'.format('x') }}",
    "padding by another": "{{ '%9999999999d' % 1 }}",
    "padding by a star": "{{ '%*d' % (999999999, 1) }}",
    "padding by a filter": "{{ '%9999999999d'|format(1) }}",
    "indenting": "{{ '\n'.join(['x'] * 60000)|indent(60000) }}",
    "indented JSON": "{{ messages|tojson(indent=999999999) }}",
    "a large number": "{{ 9 ** 99999 }}",
    "squaring": "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "lorem ipsum": "{{ lipsum(n=999999) }}",
    "a name of its own for the clock": "{% set step = 1 %}{% macro step() %}{% endmacro %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_is_refused(source: str) -> None:
    before_s, before_kib = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateRefused, match="template"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])
    # Generous: what is meant is that neither is without bound.
    assert time.process_time() - before_s < 10 * MOST_SECONDS
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < 16 * MOST_CHARACTERS / 1024, f"{grown_kib} KiB more"


SLOW = (
    "{% for m in messages %}{% for n in messages %}{% for o in messages %}{{ m.content[:0] }}{% endfor %}"
    "{% endfor %}{% endfor %}"
)
ECHO = "{% for m in messages %}{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "count", "size"), [(SLOW, 4096, 1), (ECHO, 4096, 1000)], ids=["cubic time", "quadratic text"]
)
def test_messages_that_a_template_takes_too_long_over_are_refused(source: str, count: int, size: int) -> None:
    messages = [{"role": "user", "content": "x" * size}] * count
    with pytest.raises(TemplateRefused, match="fewer or shorter"):
        ChatTemplate(source, {}).render(messages)


GRACEFUL = (
    "{% macro show(m) %}<{{ m.role }}>{{ m.content|trim }}{% endmacro %}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{{ show(m) ~ '|' }}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ '%d %s' % (ns.n, 'done') }} {{ [1, 'a', none]|join(',') }} {{ {'k': [1]}|tojson(indent=2) }}"
    "{{ 'a-b'.split('-')[0].upper() + 'x' * 3 }}{{ 'b\nc'|indent(2) }}{{ missing }}{{ none }}{{ true }}{{ 2 ** 10 }}"
)


def test_what_templates_do_is_done_as_before() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": " hi "},
        {"role": "assistant", "content": "ho"},
    ]
    assert ChatTemplate(GRACEFUL, {}).render(messages) == (
        '<user>hi|<assistant>ho|2 done 1,a,None {\n  "k": [\n    1\n  ]\n}AXXX'.replace("AXXX", "Axxx")
        + "b\n  cNoneTrue1024"
    )


def test_a_long_conversation_is_within_the_limits() -> None:
    source = "{% for m in messages %}{{ '<' ~ m.role ~ '>' + m.content | trim }}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 200}] * 4096
    assert len(ChatTemplate(source, {}).render(messages)) == 4096 * (6 + 999)
