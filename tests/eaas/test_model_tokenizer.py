"""Text to tokens and back; chat templates."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from benchmarks.make_model import byte_tokenizer, make_model
from eaas.model.chat import ASKED_AT, ChatTemplate, TemplateRefused
from eaas.model.loader import resolve_model
from eaas.model.tokenizer import Tokenizer, TokenizerInvalid

TEXTS = [
    "To be, or not to be",
    " two  spaces, a\ttab\r\nand\n\nlines ",
    "naïve café — 漢字かな, עברית, हिन्दी",
    "emoji 👩‍👩‍👧‍👦🏳️‍🌈🎉 and \u0000 \ufffd",
    "<|im_start|>user\nhi<|im_end|>",
]


def folder_of(rust: RustTokenizer | dict[str, Any], path: Path, **config: Any) -> Path:
    text = json.dumps(rust) if isinstance(rust, dict) else rust.to_str()
    (path / "tokenizer.json").write_text(text)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def byte_fallback(tmp_path: Path) -> Tokenizer:
    """In the manner of Mixtral: pieces with U+2581 for spaces, bytes for the rest, first space dropped."""
    rust = RustTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=bytes_first, show_progress=False)
    rust.train_from_iterator(["to be or not to be that is the question"], trainer)
    fields = json.loads(rust.to_str())
    fields["added_tokens"] = [entry for entry in fields["added_tokens"] if not entry["content"].startswith("<0x")]
    return Tokenizer.load(folder_of(fields, tmp_path))


def pieces_of(tokenizer: Tokenizer, tokens: list[int], skip_special: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special=skip_special)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["demo", "random", "byte_fallback"])
def test_pieces_joined_equal_the_whole_and_no_character_is_halved(
    name: str, text: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if name == "byte_fallback":
        tokenizer: Tokenizer = request.getfixturevalue("byte_fallback")
    else:
        tokenizer = Tokenizer.load(
            resolve_model("demo") if name == "demo" else folder_of(byte_tokenizer(512), tmp_path)
        )
    tokens = tokenizer.encode(text)
    for skip in (True, False):
        pieces = pieces_of(tokenizer, tokens, skip)
        assert "".join(pieces) == tokenizer.decode(tokens, skip_special=skip)
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    if name != "byte_fallback":
        assert tokenizer.decode(tokens, skip_special=False) == text


@pytest.mark.parametrize("name", ["demo", "byte_fallback"])
@pytest.mark.parametrize("seed", range(20))
def test_pieces_joined_equal_the_whole_for_any_tokens(name: str, seed: int, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = (
        Tokenizer.load(resolve_model("demo")) if name == "demo" else request.getfixturevalue("byte_fallback")
    )
    rng = random.Random(seed)
    tokens = [rng.randrange(tokenizer.vocab) for _ in range(200)]
    for skip in (True, False):
        assert "".join(pieces_of(tokenizer, tokens, skip)) == tokenizer.decode(tokens, skip_special=skip), (
            f"seed {seed}"
        )


def test_a_character_of_several_tokens_comes_whole_with_its_last_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_of(byte_tokenizer(512), tmp_path))
    assert pieces_of(tokenizer, tokenizer.encode("a🎉b")) == ["a", "", "", "", "🎉", "b", ""]
    broken = tokenizer.encode("🎉")[:2]
    assert pieces_of(tokenizer, broken) == ["", "", "\ufffd"]


def test_half_a_surrogate_pair_is_read_as_a_question_mark(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_of(byte_tokenizer(512), tmp_path))
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a?b")


def test_single_tokens_have_text_and_bytes(byte_fallback: Tokenizer, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_of(byte_tokenizer(512), tmp_path))
    assert b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode("é x")) == "é x".encode()
    assert tokenizer.token_text(0) == "<|endoftext|>"
    assert tokenizer.token_text(300).startswith(" ")
    assert tokenizer.token_bytes(10_000) == b""
    assert byte_fallback.token_bytes(3 + 0xE9) == b"\xe9"
    assert byte_fallback.token_text(3 + 0xE9) == "\ufffd"


def test_ids_beyond_the_vocabulary_decode_to_nothing(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_of(byte_tokenizer(512), tmp_path))
    assert pieces_of(tokenizer, [600, *tokenizer.encode("ok")]) == ["", "o", "k", ""]


def test_every_entry_of_a_padded_vocabulary_is_another_word() -> None:
    vocab = byte_tokenizer(64_000)["model"]["vocab"]
    assert len(vocab) == 64_000
    assert sorted(vocab.values()) == list(range(64_000))
    with pytest.raises(ValueError, match=r"vocabulary of 200 is too small.*259"):
        byte_tokenizer(200)


def test_the_tokenizer_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who art thou? 🎉"},
        {"role": "assistant", "content": "A king."},
        {"role": "user", "content": '<b> & "q"'},
    ]
    for folder in (resolve_model("demo"), make_model("tiny", "olmoe", tmp_path, seed=1)):
        ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
        for text in TEXTS:
            assert ours.encode(text) == theirs(text).input_ids
            assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), skip_special_tokens=True)
        expected = theirs.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        assert ours.encode(ours.template().render(conversation), add_special_tokens=False) == expected


def test_templates_have_the_names_that_models_expect() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
        "{% if add_generation_prompt %}>{% endif %}{{ tools | length if tools else 0 }}{{ mood }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    messages = [{"role": "tool"}, {"role": "user", "content": "<é>"}]
    text = template.render(messages, tools=[{}], options={"mood": "!"})
    assert text == '<s>{"role": "user", "content": "<é>"}4>1!'
    assert template.render([], add_generation_prompt=False) == "<s>40"


def test_a_template_takes_the_time_of_its_request_for_the_present_in_every_time_zone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H') }}", {})
    asked = ASKED_AT.set(1_700_000_000)
    try:
        for zone in ("Pacific/Kiritimati", "Pacific/Pago_Pago"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            assert template.render([]) == "14 Nov 2023 22"
    finally:
        ASKED_AT.reset(asked)
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "fails on these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
        ("{% for x in range(10**9) %}{% endfor %}", "fails on these messages|refuses these messages"),
    ],
)
def test_what_a_template_does_not_accept_is_refused_with_its_reason(source: str, words: str) -> None:
    with pytest.raises(TemplateRefused, match=words):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(TemplateRefused, match="line 2"):
        ChatTemplate("fine\n{% if %}", {})


def test_a_model_without_template_says_what_to_use(tmp_path: Path) -> None:
    with pytest.raises(TemplateRefused, match="/v1/completions"):
        Tokenizer.load(folder_of(byte_tokenizer(300), tmp_path)).template().render([])


def test_the_template_is_found_wherever_it_is_kept(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    folder = folder_of(byte_tokenizer(300), tmp_path, chat_template=named)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.template().render([]) == "d"
    (folder / "chat_template.jinja").write_text("{{ eos_token }}j")
    folder_of(byte_tokenizer(300), tmp_path, eos_token={"content": "E"})
    assert Tokenizer.load(folder).template().render([]) == "Ej"


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerInvalid, match=r"tokenizer.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerInvalid, match=r"tokenizer.json"):
        Tokenizer.load(tmp_path)
    folder_of(byte_tokenizer(300), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerInvalid, match=r"tokenizer_config.json: an object is needed, found list"):
        Tokenizer.load(tmp_path)


def test_truncation_stored_with_a_tokenizer_is_ignored(tmp_path: Path) -> None:
    rust = RustTokenizer.from_str(json.dumps(byte_tokenizer(300)))
    rust.enable_truncation(4)
    rust.enable_padding(length=8)
    rust.add_special_tokens([AddedToken("<extra>", special=True)])
    tokenizer = Tokenizer.load(folder_of(rust, tmp_path))
    assert len(tokenizer.encode("abcdef")) == 6
    assert tokenizer.vocab == 301
