"""The table of models in docs/pool.md says of each served family what tests hold of it, and of no other."""

from __future__ import annotations

import re
from pathlib import Path

from eaas.model.families import FAMILIES as WHOLE
from experts.model import FAMILIES
from tests import moe_families
from tests.vllm.servers import FAMILIES as VLLM

PAGE = Path(__file__).parents[1] / "docs" / "pool.md"
_ROW = r"^\| (?P<family>.+) \| `(?P<architecture>\w+)` \| (?P<own>.+) \| (?P<vllm>.+) \| (?P<transformers>.+) \|$"
LOGITS = "**logits**"


def table() -> dict[str, re.Match[str]]:
    """Rows by architecture."""
    return {row["architecture"]: row for row in re.finditer(_ROW, PAGE.read_text(), re.MULTILINE)}


def refused() -> set[str]:
    """Architectures that the page says are not served."""
    return set(re.findall(r"`(\w+)`", PAGE.read_text().partition("Not served")[2].partition("\n## ")[0]))


def test_every_served_family_has_a_row_and_no_other() -> None:
    assert set(table()) == set(FAMILIES)
    assert not refused() & set(FAMILIES)


def test_a_row_says_logits_where_a_test_compares_them() -> None:
    for architecture, row in table().items():
        family = architecture.removesuffix("ForCausalLM")
        assert (row["own"] == LOGITS) == (architecture in WHOLE), f"{architecture}: own engine"
        assert (row["vllm"] == LOGITS) == (family in VLLM), f"{architecture}: vLLM"
        assert (row["transformers"] == LOGITS) == (family in moe_families.FAMILIES), f"{architecture}: transformers"
