"""A checkpoint's tokenizer: text to token ids and back, whole or token by token. Needs no torch."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as RustTokenizer

from eaas.model.chat import ChatTemplate, TemplateRefused
from eaas.model.loader import read_object
from experts.checkpoint import CheckpointInvalid

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def _alphabet() -> dict[int, str]:
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


# The byte-level alphabet of GPT-2: each byte has one printable character.
BYTE_TO_CHAR = _alphabet()
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}


class TokenizerInvalid(ValueError):
    """The tokenizer's files are missing or malformed; the text names the file."""


class Detokenizer(Protocol):
    """Token ids of one sequence in, text out; what is not yet a whole character is kept back."""

    def push(self, token: int) -> str:
        """Take one token; returns the text that became certain, perhaps none."""
        ...

    def flush(self) -> str:
        """End of the sequence: the text that was still kept back."""
        ...


class Tokenizer:
    """Encodes and decodes for one model; safe to share between threads.

    Attributes:
        vocab: Token ids are below it.
        most_bytes: Bytes of text that one token stands for, at most; None where it may be any number.
        config: What tokenizer_config.json says.
    """

    def __init__(self, rust: RustTokenizer, template: ChatTemplate | None, config: Mapping[str, Any] = {}) -> None:
        self._rust = rust
        self.config = config
        special_tokens = _special_tokens(config)
        self._template = template
        # Clients have few of them, and each costs some milliseconds.
        self._others = lru_cache(8)(lambda source: ChatTemplate(source, special_tokens))
        self.vocab = max(rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = rust.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        pipeline = json.loads(rust.to_str())
        decoder = pipeline.get("decoder") or {}
        self._byte_level = decoder.get("type") == "ByteLevel"
        self._byte_fallback = '"ByteFallback"' in json.dumps(decoder)
        self._known: dict[int, str | bytes] = {}
        self.most_bytes: int | None = None
        # It takes any number of spaces around it.
        strips = any(entry.lstrip or entry.rstrip for entry in added.values())
        if self._byte_level and pipeline.get("normalizer") is None and not strips:
            names = rust.get_vocab(with_added_tokens=True)
            # A byte is a character in the names of byte-level tokens; the names of added ones are their texts.
            self.most_bytes = max((len(name.encode()) for name in names), default=1)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the chat template of a model folder.

        Raises:
            TokenizerInvalid: tokenizer.json is missing, or a file is malformed.
            TemplateRefused: the chat template is no Jinja template.
        """
        root = Path(folder)
        path = root / "tokenizer.json"
        if not path.is_file():
            raise TokenizerInvalid(
                f"{path} is missing. Save the tokenizer with transformers' save_pretrained to get it."
            )
        try:
            rust = RustTokenizer.from_buffer(path.read_bytes())
        except Exception as error:  # the Rust library raises plain Exception
            raise TokenizerInvalid(f"{path}: {error}.") from error
        # Both would silently cut or lengthen prompts.
        rust.no_truncation()
        rust.no_padding()
        config = _read_object(root / "tokenizer_config.json")
        source = _template_source(root, config)
        template = None if source is None else ChatTemplate(source, _special_tokens(config))
        return cls(rust, template, config)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, by default with what the model wants around it (such as a begin-of-text token).

        Other threads run meanwhile: `encode` of the library holds the interpreter's lock for the seconds that a long
        text takes, and its batches do not.
        """
        # Half a surrogate pair, which JSON can name, is no text: a question mark stands for it.
        text = text.encode(errors="replace").decode()
        return self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def template(self, source: str | None = None) -> ChatTemplate:
        """The model's own chat template, or another. Raises TemplateRefused: there is none, or it makes no sense."""
        template = self._template if source is None else self._others(source)
        if template is None:
            raise TemplateRefused("This model has no chat template. Use /v1/completions.")
        return template

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        return self._rust.decode(list(tokens), skip_special_tokens=skip_special)

    @property
    def chat_template(self) -> str | None:
        """The chat template's text; None where there is none."""
        return None if self._template is None else self._template.source

    def added_token(self, text: str) -> int | None:
        """The id of a token beside the vocabulary's own, special or not, which is all that ``text`` is encoded as;
        None where there is none."""
        token = self._rust.token_to_id(text)
        return token if token in self._added else None

    def is_special(self, token: int) -> bool:
        """Whether a token is no text of an answer."""
        return token in self._special

    def detokenizer(self, *, skip_special: bool = True, shown: frozenset[int] = frozenset()) -> Detokenizer:
        """For one sequence: all that it returns, joined, equals `decode` of the same tokens.

        Args:
            shown: Special tokens that appear in the text even so.
        """
        skipped = self._special - shown if skip_special else frozenset[int]()
        if self._byte_level:
            shared = self._known if skip_special and not shown else {}
            return _ByteLevelDetokenizer(self._rust, skipped, shared)
        return _WindowDetokenizer(self._rust, skipped, self._byte_fallback)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token on its own; none for ids without an entry."""
        name = self._rust.id_to_token(token)
        if name is None:
            return b""
        if token in self._special:
            return name.encode()
        if self._byte_level:
            return _bytes_of(name)
        byte = _BYTE_TOKEN.fullmatch(name) if self._byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode()

    def token_name(self, token: int) -> str:
        """The name of a token in the vocabulary, such as "Ġis" for " is"; empty where it has none."""
        return self._rust.id_to_token(token) or ""

    def token_text(self, token: int) -> str:
        """The text of one token on its own; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")


def _bytes_of(token: str) -> bytes:
    """The bytes of a vocabulary entry; one with characters outside the alphabet stands for itself."""
    if all(char in CHAR_TO_BYTE for char in token):
        return bytes(CHAR_TO_BYTE[char] for char in token)
    return token.encode()


class _ByteLevelDetokenizer:
    """Exact and cheap: each token is bytes, and Python keeps an incomplete character back.

    Tokens are looked up once and kept, for all sequences together: most are whole characters, the others bytes.
    """

    def __init__(self, rust: RustTokenizer, skipped: frozenset[int], known: dict[int, str | bytes]) -> None:
        self._rust = rust
        self._skipped = skipped
        self._known = known
        self._incomplete = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        known = self._known.get(token)
        if known is None:
            known = self._look_up(token)
        if isinstance(known, str):
            if not self._incomplete:
                return known
            known = known.encode()
        text = self._utf8.decode(known)
        self._incomplete = bool(self._utf8.getstate()[0])
        return text

    def _look_up(self, token: int) -> str | bytes:
        name = None if token in self._skipped else self._rust.id_to_token(token)
        if name is None:
            return ""
        raw = _bytes_of(name)
        try:
            known = raw.decode()
        except UnicodeDecodeError:
            known = raw
        self._known[token] = known
        return known

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    """For any decoder: decode a short window twice and take the difference.

    The window begins with the tokens given out last, so that what a decoder does to the first token of a text (such as
    dropping its space) happens in both. A run of byte tokens is decoded as one, hence kept back until it ends.
    """

    def __init__(self, rust: RustTokenizer, skipped: frozenset[int], byte_fallback: bool) -> None:
        self._rust = rust
        self._skipped = skipped
        self._byte_fallback = byte_fallback
        self._given: list[int] = []
        self._kept: list[int] = []

    def push(self, token: int) -> str:
        name = None if token in self._skipped else self._rust.id_to_token(token)
        if name is None:
            return ""
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(name):
            self._kept.append(token)
            return ""
        text = self.flush() if self._kept else ""
        self._kept.append(token)
        return text + self.flush()

    def flush(self) -> str:
        if not self._kept:
            return ""
        before = self._decode(self._given)
        after = self._decode(self._given + self._kept)
        self._given, self._kept = self._kept, []
        return after[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._rust.decode(tokens, skip_special_tokens=False)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return read_object(path) or {}
    except CheckpointInvalid as error:
        raise TokenizerInvalid(str(error)) from error


def _template_source(root: Path, config: Mapping[str, Any]) -> str | None:
    beside = root / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    source = config.get("chat_template", _read_object(root / "chat_template.json").get("chat_template"))
    if isinstance(source, list):  # several by name; "default" is the one for plain chat
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise TokenizerInvalid(f"{root}: chat_template is {type(source).__name__}; text is needed.")
    return source


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens
