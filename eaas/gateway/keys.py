"""API keys: a file of hashes with their budgets, read again when it changes.

    {"keys": [{"name": "alice", "sha256": "<64 hexadecimal digits>", "requests_per_minute": 60,
               "tokens_per_minute": 100000, "weight": 1,
               "expires": "2027-01-01T00:00:00Z", "operator": false}]}

Only "name" and "sha256" are needed. Two entries may have one name: an old key and its successor, which then share that
name's budgets and share; each name's budgets and weight are those of its last entry.

SHA-256 without salt is enough, and a slow hash would be a mistake. A key holds 256 random bits, so no guess is better
than another, no two users chose the same, and there is no table to look it up in. What slow hashes buy for passwords is
not needed here, while their cost, paid for each request before its key is known to be right, would be an attacker's.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from experts.config import MOST_WEIGHT

log = logging.getLogger(__name__)

PREFIX = "eaas-"
_KEY_BYTES = 32
# A request's key is compared with every one: 1,024 take about 0.2 ms.
MOST_KEYS = 1024
_LARGEST_FILE = 1 << 20
# Keys of other makers may be longer or shorter; this is for what is not worth hashing.
_LONGEST_KEY = 512

_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
_PerMinute = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
_Expires = Annotated[datetime.datetime, msgspec.Meta(tz=True)]


class KeysInvalid(ValueError):
    """A keys file cannot be used: what was found, what is needed."""


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of the file; never the key itself.

    Attributes:
        name: Whose it is; what the log and the metrics may say.
        sha256: Of the key, in hexadecimal digits.
        requests_per_minute, tokens_per_minute: Budgets of its name; None: no bound.
        weight: Of its name: where keys together want more than there is, each has its weight's part.
        expires: From when on it is refused; None: never.
        operator: Whether it may look at the cluster and everybody's load too.
    """

    name: _Name
    sha256: _Digest
    requests_per_minute: _PerMinute | None = None
    tokens_per_minute: _PerMinute | None = None
    weight: Annotated[int, msgspec.Meta(ge=1, le=MOST_WEIGHT)] = 1
    expires: _Expires | None = None
    operator: bool = False

    def expired(self, now_s: float) -> bool:
        """Args: now_s: since 1970."""
        return self.expires is not None and self.expires.timestamp() <= now_s


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Key]


def new_key() -> str:
    """A key that nobody can guess."""
    return PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest_of(key: str) -> str:
    """What the file holds of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def keys_of(digests: Sequence[str]) -> list[Key]:
    """Entries of keys that are all that there is: each may do whatever can be asked for."""
    return [Key(name=f"key-{n}", sha256=digest, operator=True) for n, digest in enumerate(digests, start=1)]


def read_keys(path: Path) -> list[Key]:
    """The entries of a file. Raises KeysInvalid: it cannot be read, or makes no sense; the text never quotes what is in
    it."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise KeysInvalid(f"--keys-file {path} cannot be read: {error.strerror}") from error
    if len(content) > _LARGEST_FILE:
        raise KeysInvalid(f"--keys-file {path} has over {_LARGEST_FILE} bytes; give at most {MOST_KEYS} keys")
    try:
        keys = msgspec.json.decode(content, type=_File).keys
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec names the place and the rule; but a key put where a name belongs would be a value.
        raise KeysInvalid(f"--keys-file {path} is no file of `eaas keys`: {_without_values(error)}") from None
    if len(keys) > MOST_KEYS:
        raise KeysInvalid(f"--keys-file {path} has {len(keys)} keys; at most {MOST_KEYS} are looked through")
    return keys


def _without_values(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    text = str(error)
    return text if "contains unknown field" not in text else "it contains an unknown field"


def read_secret(path: Path) -> bytes:
    """What a file's bytes come down to, for sealing with. Raises KeysInvalid: it cannot be read, others may read it, or
    it is too short to be a secret."""
    try:
        with path.open("rb") as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read(_LARGEST_FILE)
    except OSError as error:
        raise KeysInvalid(f"--resume-key-file {path} cannot be read: {error.strerror}") from error
    if mode & 0o007:
        raise KeysInvalid(f"--resume-key-file {path} may be read by everybody; chmod 600 it, or make another")
    if len(content) < _KEY_BYTES:
        raise KeysInvalid(
            f"--resume-key-file {path} has {len(content)} bytes; at least {_KEY_BYTES} random ones are needed: "
            f"head -c {_KEY_BYTES} /dev/urandom > {path}"
        )
    return hashlib.sha256(content).digest()


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file at once: who reads it meanwhile finds the old or the new, never a part. Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_keys(path: Path, keys: Sequence[Key]) -> None:
    """Replace the file, for its owner's eyes only. Raises OSError."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(_File(list(keys))), indent=2) + b"\n")


@contextlib.contextmanager
def editing(path: Path) -> Iterator[list[Key]]:
    """The entries, to be changed in place; they are written when the block ends without an error.

    Two that edit at once wait for each other. Raises KeysInvalid and OSError.
    """
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = read_keys(path) if path.exists() else []
        yield keys
        write_keys(path, keys)


class FileStamp:
    """Says when files have been changed, by what the file system tells of them."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen = self._now()

    def changed(self) -> bool:
        """Whether they are others than at the last call."""
        before, self._seen = self._seen, self._now()
        return self._seen != before

    def _now(self) -> list[tuple[int, int, int]]:
        try:
            return [(s.st_mtime_ns, s.st_ino, s.st_size) for s in (path.stat() for path in self._paths)]
        except OSError:
            return []


class KeyRing:
    """The keys that are good now. For use from one thread."""

    def __init__(self, path: Path) -> None:
        """Raises KeysInvalid."""
        self._path, self._stamp = path, FileStamp(path)
        self.keys: list[Key] = []
        self._digests: list[tuple[bytes, Key]] = []
        self._take(read_keys(path))

    def find(self, key: str, now_s: float) -> Key | None:
        """The entry of a key; None: there is none, or it has expired. Args: now_s: since 1970.

        Every entry is compared, each in constant time: how long it takes tells how many there are and nothing else."""
        if len(key) > _LONGEST_KEY:
            return None
        given = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for digest, entry in self._digests:
            if hmac.compare_digest(given, digest):
                found = entry
        return None if found is None or found.expired(now_s) else found

    def refresh(self, *, anew: bool = False) -> bool:
        """Read the file again if it has changed; True if other keys are good now. Args: anew: though it looks the same.

        A file that cannot be used changes nothing, and the log says so: once."""
        if not self._stamp.changed() and not anew:
            return False
        try:
            self._take(read_keys(self._path))
        except KeysInvalid as error:
            log.error("keys_not_read kept=%d reason=%s", len(self.keys), error)
            return False
        log.info("keys_read count=%d", len(self.keys))
        return True

    def _take(self, keys: list[Key]) -> None:
        self.keys = keys
        self._digests = [(bytes.fromhex(key.sha256), key) for key in keys]
