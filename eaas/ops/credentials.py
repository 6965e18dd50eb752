"""What proves who somebody is: `eaas certs` makes a cluster's certificates, a CA of its own and one for each role;
`eaas keys` makes and edits the file with the API keys of a gateway's clients."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from eaas.gateway.keys import MOST_KEYS, Key, KeysInvalid, digest_of, editing, new_key, read_keys, replace_file
from eaas.ops.terminal import console, failing_on, table
from experts.config import MOST_WEIGHT
from router.access import CA, CERT, KEY, ROLES, role_uri, server_name

CA_FOLDER = "ca"
CA_DAYS = 3650
# Clocks of two machines differ.
_EARLIER = datetime.timedelta(minutes=5)


class CertsFailed(RuntimeError):
    """A certificate could not be made; the text says why and what to do."""


def make_certs(
    folder: Path, roles: Sequence[str] = ROLES, *, name: str = "", hosts: Sequence[str] = (), days: int = 90
) -> list[Path]:
    """Write FOLDER/ca, unless it is there, and FOLDER/ROLE/{ca,cert,key}.pem for each role, anew each time.

    Args:
        name: Which process of the role it is for; it becomes part of the URI, and nothing depends on it.
        hosts: DNS names and IP addresses that it is for beside the role's own name: those that clients of the gateway,
            Prometheus or KEDA call it by.
        days: Until it expires.

    Returns:
        The folders of the roles.

    Raises:
        CertsFailed: the library is missing, a role is unknown, or a file cannot be read or written.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID
    except ImportError as error:
        raise CertsFailed(
            "The package cryptography is needed to make certificates and is not installed: "
            "pip install 'eaas[certs]'. Serving with certificates from elsewhere does without it."
        ) from error
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise CertsFailed(f"{unknown[0]!r} is no role; give some of {', '.join(ROLES)}.")
    if not 1 <= days <= CA_DAYS:
        raise CertsFailed(f"{days} days asked for; give 1 to {CA_DAYS}.")
    now = datetime.datetime.now(datetime.UTC)

    def pem(key: ec.EllipticCurvePrivateKey) -> bytes:
        return key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def begun(subject: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, for_days: int):
        return (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _EARLIER)
            .not_valid_after(now + datetime.timedelta(days=for_days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )

    def usage(*, signs_certificates: bool) -> x509.KeyUsage:
        names = (
            *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
            *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
        )
        allowed = ("key_cert_sign", "crl_sign") if signs_certificates else ("digital_signature",)
        return x509.KeyUsage(**{name: name in allowed for name in names})

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def general_name(host: str) -> x509.GeneralName:
        try:
            return x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            return x509.DNSName(host)

    def new_authority() -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        made = (
            begun("EaaS CA", named("EaaS CA"), key, CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        _write(folder / CA_FOLDER / KEY, pem(key), secret=True)
        _write(folder / CA_FOLDER / CA, made.public_bytes(serialization.Encoding.PEM))

    def issue(role: str, signing_key: ec.EllipticCurvePrivateKey) -> Path:
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(role_uri(role, name)),
            x509.DNSName(server_name(role)),
            *(general_name(host) for host in hosts),
        ]
        identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        made = (
            begun(f"{role} {name}".strip(), authority.subject, key, days)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
            .sign(signing_key, hashes.SHA256())
        )
        at = folder / role / name if name else folder / role
        _write(at / CA, authority.public_bytes(serialization.Encoding.PEM))
        _write(at / KEY, pem(key), secret=True)
        _write(at / CERT, made.public_bytes(serialization.Encoding.PEM))
        return at

    try:
        if not (folder / CA_FOLDER / KEY).exists():
            new_authority()
        authority = x509.load_pem_x509_certificate((folder / CA_FOLDER / CA).read_bytes())
        authority_key = serialization.load_pem_private_key((folder / CA_FOLDER / KEY).read_bytes(), None)
        if not isinstance(authority_key, ec.EllipticCurvePrivateKey):
            raise CertsFailed(f"{folder / CA_FOLDER / KEY} is no key of an elliptic curve; this CA is not ours.")
        return [issue(role, authority_key) for role in roles]
    except (OSError, ValueError) as error:
        raise CertsFailed(f"{folder}: {error}") from error


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if secret else 0o755)
    replace_file(path, content, 0o600 if secret else 0o644)


def certs(
    folder: Annotated[Path, typer.Argument(help="Where they go; a CA that is there is used again.")],
    role: Annotated[list[str] | None, typer.Option(help=f"{', '.join(ROLES)}; default: all. Once for each.")] = None,
    name: Annotated[str, typer.Option(help="Which process of the role, such as 1; default: any.")] = "",
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address that others call it by, beside the role's own. Once for each."),
    ] = None,
    days: Annotated[int, typer.Option(help="Until they expire.")] = 90,
) -> None:
    """Make certificates for the processes of a cluster, signed by a CA that is made with them.

    Each process gets FOLDER/ROLE as its --tls-dir. Run it again to renew them: processes take the new ones up by
    themselves. FOLDER/ca/key.pem signs for the whole cluster: keep it away from the machines that serve.

    Examples:

      eaas certs ./certs

      eaas certs ./certs --role gateway --host api.example.org --days 30
    """
    with failing_on(CertsFailed):
        for at in make_certs(folder, role or ROLES, name=name, hosts=host or (), days=days):
            print(at)


keys_app = typer.Typer(
    no_args_is_help=True,
    help="Make, list and revoke API keys of a gateway: the file that it gets as --keys-file.\n\n"
    "The file holds hashes. A gateway reads it again within two seconds of a change; answers that have begun go on.",
)

_File = Annotated[Path, typer.Argument(help="Keys file; `new` creates it.")]
_REFUSED = (KeysInvalid, OSError, msgspec.ValidationError)


@keys_app.command("new")
def new(
    file: _File,
    name: Annotated[str, typer.Argument(help="Whose key it is; logs and metrics show this name.")],
    rpm: Annotated[int | None, typer.Option(min=0, help="Requests a minute; 0: no bound.")] = None,
    tpm: Annotated[
        int | None, typer.Option(min=0, help="Tokens a minute, of prompts and answers; 0: no bound.")
    ] = None,
    weight: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_WEIGHT, help="Part that its name has where keys want more than there is."),
    ] = None,
    days: Annotated[float | None, typer.Option(min=0, help="Until it expires; default: never.")] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="May look at the cluster too: /metrics, /status, /dashboard ...")
    ] = False,
) -> None:
    """Make a key and print it, this once: only its hash is kept.

    A second key under the same name is its successor: give it out, then revoke the first. Budgets and weights go by
    name, and are those of the newest key, which has its predecessor's where none are given; of a new name they are no
    bounds and weight 1.

    `eaas status`, `top`, `scale`, `retire`, `roll` and Prometheus need a key made with --operator; programs that ask
    for tokens do not.

    Example: eaas keys new ./keys.json alice --rpm 60 --tpm 100000 --days 90
    """
    key = new_key()
    expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days) if days is not None else None
    given = {"requests_per_minute": rpm, "tokens_per_minute": tpm, "weight": weight}
    with failing_on(*_REFUSED), editing(file) as keys:
        if len(keys) >= MOST_KEYS:
            raise KeysInvalid(f"{file} has {len(keys)} keys, the most it may have: revoke some")
        before = next((key for key in reversed(keys) if key.name == name), None)
        held = {} if before is None else {word: getattr(before, word) for word in given}
        held |= {word: value or None for word, value in given.items() if value is not None}
        entry = {"name": name, "sha256": digest_of(key), "expires": expires, "operator": operator, **held}
        keys.append(msgspec.convert(entry, Key))
    print(key)


@keys_app.command("list")
def list_keys(file: _File) -> None:
    """Show whose keys there are, by name and the first digits of each hash; never a key."""
    with failing_on(*_REFUSED):
        keys = read_keys(file)
    now_s = datetime.datetime.now(datetime.UTC).timestamp()
    rows = [
        (
            key.name,
            key.sha256[:12],
            "ask, operate" if key.operator else "ask",
            str(key.requests_per_minute or "no bound"),
            str(key.tokens_per_minute or "no bound"),
            str(key.weight),
            (f"{key.expires.astimezone(datetime.UTC):%Y-%m-%d %H:%M}" if key.expires else "never")
            + (" (expired)" if key.expired(now_s) else ""),
        )
        for key in keys
    ]
    console.print(table(("name", "hash", "may", "req/min", "tokens/min", "weight", "expires, UTC"), rows))


@keys_app.command("revoke")
def revoke(
    file: _File, which: Annotated[str, typer.Argument(help="A name: all its keys; or the first digits of one hash.")]
) -> None:
    """Take keys away: the gateway refuses them within two seconds."""
    with failing_on(*_REFUSED), editing(file) as keys:
        gone = [key for key in keys if key.name == which]
        if not gone and len(which) >= 8:
            gone = [key for key in keys if key.sha256.startswith(which)]
        if not gone:
            raise KeysInvalid(f"{file} has no key of the name {which!r}, nor a hash that begins so (8 digits needed)")
        keys[:] = [key for key in keys if key not in gone]
    for key in gone:
        print(f"revoked {key.name} {key.sha256[:12]}")
