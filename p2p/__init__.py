"""One-sided messages between processes: windows, slots, frames, signals.

It knows nothing of what the bytes mean. README.md holds the promises and an example; native code uses the
headers under native/.
"""

from p2p.descriptor import Descriptor, Transport, decode
from p2p.endpoint import (
    ConnectRefused,
    DescriptorInvalid,
    Endpoint,
    EndpointClosed,
    P2PError,
    Peer,
    PeerGone,
    Status,
    Window,
)
from p2p.frame import Frame, FrameInvalid, Header, Reason, open_frame, seal_frame
from p2p.local import ShmEndpoint
from p2p.native import NativeMissing
from p2p.window import WindowLayout

__all__ = [
    "ConnectRefused",
    "Descriptor",
    "DescriptorInvalid",
    "Endpoint",
    "EndpointClosed",
    "Frame",
    "FrameInvalid",
    "Header",
    "NativeMissing",
    "P2PError",
    "Peer",
    "PeerGone",
    "Reason",
    "ShmEndpoint",
    "Status",
    "Transport",
    "Window",
    "WindowLayout",
    "decode",
    "open_frame",
    "seal_frame",
]
