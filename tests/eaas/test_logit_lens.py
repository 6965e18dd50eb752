"""The logit lens: what it shows behind the last layer is what transformers' own model says."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from benchmarks.make_model import make_model
from eaas.gateway.dashboard.board import visible
from eaas.model.tokenizer import Tokenizer
from eaas.ops.logit_lens import LogitLensRefused, logit_lens
from experts.checkpoint import Checkpoint, CheckpointInvalid

LAYERS, EXPERTS = 4, 8
SEED = time.time_ns() % 1_000_000


class Tables(HTMLParser):
    """Rows of cells, as a browser would read them: text and title of each; and whatever tags there are."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[tuple[str, str]]] = []
        self.tags: set[str] = set()
        self._within = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._within = tag in ("td", "th", "small")
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append(("", dict(attrs).get("title") or ""))

    def handle_endtag(self, tag: str) -> None:
        self._within = self._within and tag != "table"

    def handle_data(self, data: str) -> None:
        if self._within:
            text, title = self.rows[-1][-1]
            self.rows[-1][-1] = (text + data, title)


def hold(path: Path, requests: Sequence[str], tensors: Mapping[str, np.ndarray], **told: str) -> None:
    """A file as the sink of an inspection writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = len(tensors["token"])
    metadata = {
        "inspection": "inspect-1",
        "worker": "attention/1",
        "keep": "rows",
        "requests": json.dumps(requests),
    }
    save_file({"sequence": np.arange(rows), **tensors}, path, {**metadata, **told})


def of_rows(request: int, tokens: Sequence[int], start: int = 0) -> dict[str, np.ndarray]:
    return {
        "request": np.full(len(tokens), request, np.int64),
        "position": np.arange(start, start + len(tokens), dtype=np.int32),
        "token": np.array(tokens, np.int32),
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of whose words two are no words that a page may take literally."""
    folder = make_model("tiny", "qwen3_moe", tmp_path_factory.mktemp("model") / "m", seed=5, dtype="float32")
    text = (folder / "tokenizer.json").read_text()
    told = json.loads(text)
    names = {token: name for name, token in told["model"]["vocab"].items()}
    for token, name in ((400, "<script>x</script>"), (401, '"onload=y')):
        told["model"]["vocab"][name] = told["model"]["vocab"].pop(names[token])
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return folder


def peer_run(model: Path, tokens: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
    """The residual stream behind each layer, and the logits, by transformers."""
    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    behind: list[np.ndarray] = []
    for layer in peer.model.layers:
        layer.register_forward_hook(lambda _, __, out: behind.append(out[0].reshape(len(tokens), -1).numpy()))
    with torch.inference_mode():
        logits = peer(torch.tensor([tokens])).logits[0].numpy()
    return behind, logits


def test_behind_the_last_layer_it_says_what_the_model_says(model: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(SEED)
    words = Tokenizer.load(model)
    wanted: dict[str, np.ndarray] = {}
    sent: dict[str, list[int]] = {}
    for number in range(3):
        request = f"cmpl-{number}"
        sent[request] = tokens = [400, 401, *rng.integers(0, 512, 30).tolist()]
        behind, wanted[request] = peer_run(model, tokens)
        # In two files, the later one first, of two workers; each has other requests in its list.
        for part in (slice(20, None), slice(0, 20)):
            taps = {f"layers.{n}.residual": x[part] for n, x in enumerate(behind) if n in (0, 2, 3)}
            path = tmp_path / f"in/worker-{part.start}" / f"part-{number}.safetensors"
            hold(path, ["other", request], {**of_rows(1, tokens[part], part.start or 0), **taps})
    out = tmp_path / "lens.html"
    out.write_text("of before")
    out.chmod(0o644)
    logit_lens(tmp_path / "in", model, out, most_rows=1000)
    page = Tables(out.read_text())
    assert "script" not in page.tags and "onload" not in out.read_text().replace("&quot;onload", "")
    rows = iter(page.rows)
    for logits, tokens in zip(wanted.values(), sent.values(), strict=True):
        assert [text.strip() for text, _ in next(rows)] == [
            "position",
            "token",
            "layer 0",
            "layer 2",
            "layer 3",
        ]
        share = np.exp(logits - logits.max(axis=1, keepdims=True))
        share /= share.sum(axis=1, keepdims=True)
        for place, token in enumerate(tokens):
            position, name, *cells = next(rows)
            assert (position[0], name[0].strip()) == (str(place), visible(words.token_text(token)))
            best = np.argsort(-logits[place])[:5]
            rank = (
                "" if place + 1 == len(tokens) else f" #{1 + (logits[place] > logits[place, tokens[place + 1]]).sum()}"
            )
            text, title = cells[-1]
            shown = f"{visible(words.token_text(best[0]))} {100 * share[place, best[0]]:.0f}%{rank}"
            assert text.strip() == shown, f"seed {SEED}, position {place}"
            listed = [f"{visible(words.token_text(token))} {share[place, token]:.2%}" for token in best]
            assert title.split("\n") == listed, f"seed {SEED}, position {place}"
    assert "96 of 96 recorded rows" in out.read_text()
    assert out.stat().st_mode & 0o777 == 0o600, "what was asked is in it"


def test_a_row_that_was_computed_twice_is_there_once_and_no_more_than_asked_for(model: Path, tmp_path: Path) -> None:
    residual = {"layers.1.residual": np.ones((6, 64), np.float32)}
    for part in range(2):
        hold(tmp_path / f"part-{part}.safetensors", ["<b>a"], {**of_rows(0, [1, 2, 3, 4, 5, 6]), **residual})
    out = tmp_path / "lens.html"
    logit_lens(tmp_path, model, out, most_rows=4)
    page = Tables(out.read_text())
    assert [row[0][0] for row in page.rows[1:]] == ["0", "1", "2", "3"]
    assert page.rows[-1][-1][0].strip().split("#")[1].isdigit(), "the row that follows was recorded, though not shown"
    assert "b" not in page.tags and "4 of 6 recorded rows" in out.read_text()


def test_gates_have_their_entropy_by_position_and_its_drift(model: Path, tmp_path: Path) -> None:
    # Layer 1: from one expert alone to all alike. Layer 3: the same everywhere, and once no number.
    sharp = np.linspace(60, 0, 40, dtype=np.float32)[:, None] * np.eye(1, EXPERTS, dtype=np.float32)
    flat = np.zeros((40, EXPERTS), np.float32)
    flat[7, 0] = np.nan
    order = np.random.default_rng(SEED).permutation(40)
    rows = {name: column[order] for name, column in of_rows(0, range(40)).items()}
    gates = {"layers.1.gate": sharp[order], "layers.3.gate": flat[order], "layers.2.gate": flat * np.nan}
    hold(tmp_path / "part-0.safetensors", ["a"], {**rows, **gates})
    out = tmp_path / "lens.html"
    logit_lens(tmp_path, model, out, most_rows=100)
    head, first, spoiled, second = [[text.strip() for text, _ in row] for row in Tables(out.read_text()).rows]
    assert head == ["layer", "by position", "mean", "drift"]
    share = np.exp(sharp.astype(np.float64)) / np.exp(sharp.astype(np.float64)).sum(axis=1, keepdims=True)
    entropy = -(share * np.log(share)).sum(axis=1) / np.log(EXPERTS)
    assert first[0] == "1" and re.fullmatch("▁+[▂▃▄▅▆▇]+█+", first[1]) and len(first[1]) == 40
    assert first[2] == f"{100 * entropy.mean():.0f}%"
    assert first[3] == f"{100 * (entropy[-10:].mean() - entropy[:10].mean()):+.1f} points"
    assert spoiled == ["2", "", "–", "–"]
    assert second == ["3", "█" * 39, "100%", "+0.0 points"]


@pytest.mark.parametrize(
    ("tensors", "told", "said"),
    [
        (
            {},
            {"keep": "statistics"},
            "holds statistics of rows; the rows themselves are needed. Record again and keep",
        ),
        (
            {"layers.0.attention": np.zeros((3, 64), np.float32)},
            {},
            "residuals or gates are needed. Record again with",
        ),
        (
            {"layers.0.residual": np.zeros((3, 5), np.float32)},
            {},
            "is 5 wide, the model 64. Give the one that was",
        ),
    ],
)
def test_what_is_no_use_says_what_is_needed(
    tensors: dict[str, np.ndarray], told: dict[str, str], said: str, model: Path, tmp_path: Path
) -> None:
    hold(tmp_path / "part-0.safetensors", ["a"], {**of_rows(0, [1, 2, 3]), **tensors}, **told)
    with pytest.raises(LogitLensRefused, match=said):
        logit_lens(tmp_path, model, tmp_path / "lens.html", most_rows=10)
    assert not (tmp_path / "lens.html").exists()


def test_rows_of_another_checkpoint_are_refused(model: Path, tmp_path: Path) -> None:
    tensors = {**of_rows(0, [1, 2, 3]), "layers.0.residual": np.ones((3, 64), np.float32)}
    mine, out = Checkpoint.open(model).fingerprint, tmp_path / "lens.html"
    hold(tmp_path / "part-0.safetensors", ["a"], tensors, model="other", checkpoint="f00d" * 16)
    said = f"is of the model other, checkpoint {'f00d' * 4}; {model} is checkpoint {mine[:16]}. Give the one that"
    with pytest.raises(LogitLensRefused, match=re.escape(said)):
        logit_lens(tmp_path, model, out, most_rows=10)
    hold(tmp_path / "part-0.safetensors", ["a"], tensors, model="mine", checkpoint=mine)
    logit_lens(tmp_path, model, out, most_rows=10)


def test_other_files_are_refused(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "lens.html"
    with pytest.raises(LogitLensRefused, match="There is no folder"):
        logit_lens(tmp_path / "nope", model, out, most_rows=10)
    for place in (tmp_path / "nope" / "lens.html", tmp_path):
        with pytest.raises(LogitLensRefused, match=f"{place} cannot be written. Give --out a file in a folder that"):
            logit_lens(tmp_path, model, place, most_rows=10)
    with pytest.raises(LogitLensRefused, match="holds no rows in files part-"):
        logit_lens(tmp_path, model, out, most_rows=10)
    (tmp_path / "part-0.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointInvalid, match="1 bytes"):
        logit_lens(tmp_path, model, out, most_rows=10)
    save_file({"token": np.zeros(1, np.int32)}, tmp_path / "part-0.safetensors")
    with pytest.raises(LogitLensRefused, match="lacks position, request: no inspection wrote it"):
        logit_lens(tmp_path, model, out, most_rows=10)
