"""Descriptors: what a peer needs to find a window and prove that it was invited. Bytes, never code.

Layout, little-endian::

    offset  size  field
         0     4  magic "P2PD"
         4     1  version (1)
         5     1  transport: 1 shm, 2 sim, 3 nixl, 4 cuda
         6     2  length A of the address
         8     2  length N of the name, UTF-8
        10     2  zero
        12     4  CRC-32 of everything but these four bytes
        16     8  incarnation of the window's owner
        24     8  nbytes of the window
        32    32  token: whoever shows it may write to the window
        64     A  address, as the transport understands it: 1 to 107 bytes, nixl's 1 to 16384
      64+A     N  name of the owner's endpoint

A descriptor is a secret: it holds the token.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from p2p.endpoint import NAME_LIMIT, DescriptorInvalid

TOKEN_BYTES: Final = 32
ADDRESS_LIMIT: Final = 107
NIXL_ADDRESS_LIMIT: Final = 16384
WINDOW_LIMIT_BYTES: Final = 1 << 40

_MAGIC: Final = b"P2PD"
_VERSION: Final = 1
_FIXED: Final = struct.Struct("<4sBBHHHIQQ32s")
_CRC_OFFSET: Final = 12


class Transport(IntEnum):
    """Which transport a descriptor belongs to."""

    SHM = 1
    SIM = 2
    NIXL = 3
    CUDA = 4

    @property
    def address_limit(self) -> int:
        """Bytes that an address of this transport may have."""
        return NIXL_ADDRESS_LIMIT if self is Transport.NIXL else ADDRESS_LIMIT


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """One window's invitation."""

    transport: Transport
    incarnation: int
    nbytes: int
    address: bytes
    name: str
    token: bytes = field(repr=False)

    def encode(self) -> bytes:
        """The bytes to hand out.

        Raises:
            ValueError: a field is out of its bounds.
        """
        name = self.name.encode()
        _check_bounds(self.transport, self.nbytes, len(self.address), len(name), ValueError)
        if len(self.token) != TOKEN_BYTES:
            raise ValueError(f"the token has {len(self.token)} bytes; it needs {TOKEN_BYTES}.")
        kind, a, n = int(self.transport), len(self.address), len(name)
        fixed = _FIXED.pack(_MAGIC, _VERSION, kind, a, n, 0, 0, self.incarnation, self.nbytes, self.token)
        raw = bytearray(fixed + self.address + name)
        struct.pack_into("<I", raw, _CRC_OFFSET, zlib.crc32(raw))
        return bytes(raw)


def decode(raw: bytes) -> Descriptor:
    """Read a descriptor.

    Raises:
        DescriptorInvalid: truncated, too long, corrupt, or of another version.
    """
    if not _FIXED.size <= len(raw) <= _FIXED.size + NIXL_ADDRESS_LIMIT + NAME_LIMIT:
        raise DescriptorInvalid(f"{len(raw)} bytes are no descriptor; ask its owner for a new one.")
    magic, version, kind, a, n, zero, crc, incarnation, nbytes, token = _FIXED.unpack_from(raw)
    if magic != _MAGIC or version != _VERSION:
        raise DescriptorInvalid(f"magic {magic!r} version {version} found, {_MAGIC!r} version {_VERSION} needed.")
    unsummed = raw[:_CRC_OFFSET] + bytes(4) + raw[_CRC_OFFSET + 4 :]
    if zero or len(raw) != _FIXED.size + a + n or crc != zlib.crc32(unsummed):
        raise DescriptorInvalid("the descriptor is corrupt; ask its owner for a new one.")
    try:
        transport = Transport(kind)
        name = raw[_FIXED.size + a :].decode()
    except ValueError as error:
        raise DescriptorInvalid(f"the descriptor's transport or name makes no sense: {error}.") from error
    _check_bounds(transport, nbytes, a, n, DescriptorInvalid)
    address = raw[_FIXED.size : _FIXED.size + a]
    return Descriptor(
        transport=transport, incarnation=incarnation, nbytes=nbytes, address=address, name=name, token=token
    )


def _check_bounds(transport: Transport, nbytes: int, address: int, name: int, error: type[ValueError]) -> None:
    if not 1 <= nbytes <= WINDOW_LIMIT_BYTES:
        raise error(f"a window of {nbytes} bytes; 1 to {WINDOW_LIMIT_BYTES} needed.")
    if not 1 <= address <= transport.address_limit:
        raise error(f"an address of {address} bytes; 1 to {transport.address_limit} needed.")
    if name > NAME_LIMIT:
        raise error(f"a name of {name} bytes; at most {NAME_LIMIT} fit.")
