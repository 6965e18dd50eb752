"""The cluster's state as the gateway tells it over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from typing import Any

# The key that verbs of the command line send to a gateway.
KEY_VARIABLE = "EAAS_API_KEY"


class GatewayUnreachable(RuntimeError):
    """No gateway answered at the address; the text says what to check."""


class GatewayRefused(GatewayUnreachable):
    """A gateway does not do what it was asked; the text is its own."""


class RouterUnknown(RuntimeError):
    """The gateway does not know its router; the text says what to do."""


def asking(url: str, body: bytes | None = None) -> urllib.request.Request:
    """A GET, or a POST of JSON, with the key of EAAS_API_KEY where there is one."""
    key = os.environ.get(KEY_VARIABLE, "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return urllib.request.Request(url, body, headers | ({"content-type": "application/json"} if body else {}))


def fetch_status(url: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """{"model", "epoch", "gateway": {...}, "members": [...]} from the gateway at `url`.

    Raises:
        GatewayUnreachable: nothing answers there, or something that is no EaaS gateway.
    """
    return ask_gateway(url, "/status", timeout_s=timeout_s)


def ask_gateway(url: str, path: str, method: str = "GET", body: Any = None, timeout_s: float = 5.0) -> dict[str, Any]:
    """What the gateway at `url` answers to an operator's request.

    Raises:
        GatewayRefused: it says why not.
        GatewayUnreachable: nothing answers there, or something that is no EaaS gateway.
    """
    base = url if "://" in url else f"http://{url}"
    base = base.rstrip("/").removesuffix("/v1")
    request = asking(base + path, None if body is None else json.dumps(body).encode())
    request.method = method
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403):
            said = said_by(error)
            if said:
                raise GatewayRefused(said) from None
            raise GatewayUnreachable(f"The gateway at {url} answers {error.code} to {path}.") from None
        raise GatewayUnreachable(
            f"The gateway at {url} asks for an operator's key (status {error.code}). Put one that "
            f"`eaas keys new FILE NAME --operator` made into {KEY_VARIABLE}."
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", None), ssl.SSLError):
            raise GatewayUnreachable(
                f"What answers at {url} is not trusted ({error}). If it is yours, name the CA that signed its "
                "certificate: SSL_CERT_FILE=certs/ca/ca.pem; and its certificate must be for that name."
            ) from None
        raise GatewayUnreachable(
            f"No EaaS gateway answers at {url} ({error}). Start one with `eaas serve`, or name it with --url."
        ) from None


def said_by(error: urllib.error.HTTPError) -> str:
    """The message of an error in OpenAI's form; empty where it has another."""
    try:
        return str(json.loads(error.read(1 << 16))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def router_address(url: str) -> str:
    """host:port of the router of the gateway at `url`; of several, all with commas between.

    Raises:
        GatewayUnreachable: no gateway there. RouterUnknown: one without a router.
    """
    members = fetch_status(url)["members"]
    address = ",".join(member["address"] for member in members if member["pool"] == "router")
    if not address:
        raise RouterUnknown(f"The gateway at {url} names no router; name it with --router HOST:PORT.")
    return address
