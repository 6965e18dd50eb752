"""Each model of vLLM's that has routed experts is one that docs/pool.md speaks of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_models_table import refused, table
from tests.vllm.servers import environment

pytestmark = pytest.mark.full(seconds=1)

# It has experts in its other class alone.
DENSE = {"PanguEmbeddedForCausalLM"}


def test_every_model_with_experts_is_served_or_refused_by_name(newest: str) -> None:
    (package,) = environment(newest).parent.glob("lib/python3*/site-packages/vllm")
    models = package / "model_executor" / "models"
    text = (models / "registry.py").read_text()
    listed = text[text.index("_TEXT_GENERATION_MODELS") : text.index("_EMBEDDING_MODELS =")]
    sources = {path.stem: path.read_text() for path in models.glob("*.py")}
    with_experts = "|".join(name for name, source in sources.items() if "FusedMoEFactory(" in source)
    makes = rf"FusedMoEFactory\(|RoutedExperts|(\.|models\.)({with_experts}) import[^)]*MoE"
    found: set[str] = set()
    for architecture, module in re.findall(r'"(\w+ForCausalLM)":\s*\(\s*"([\w.]+)"', listed):
        folder = package / Path(*module.split(".")[1:])
        files = folder.rglob("*.py") if module.startswith("vllm.") else [models / f"{module}.py"]
        if any(re.search(makes, path.read_text()) for path in files):
            found.add(architecture)
    assert len(found) > 40
    assert not found - set(table()) - refused() - DENSE
