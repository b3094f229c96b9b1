"""The keys and certificates of a federation. They prove who the server is and who each client is.

A certificate authority (CA) is made for each federation and signs the server's certificate. Its private key is not
stored, so it can never sign another certificate. Each client has an EC P-384 key pair, and the server has the public
keys. Only the owner of a file may read it (mode 0600). Existing files are never overwritten.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
    ssh_key_fingerprint,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedcore import ConfigError

LOOPBACK = ("localhost", "127.0.0.1")
"""Each certificate is also valid for these hosts: the server's process connects to its own SuperLink."""

CA_DAYS, SERVER_DAYS = 3650, 825
"""Validity of the CA's certificate and of the server's certificate, in days."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RESERVED = ("ca", "server")


@dataclass(frozen=True)
class Tls:
    """The server's files for TLS, as PEM."""

    ca: Path
    """The CA's certificate."""
    certificate: Path
    """The server's certificate."""
    key: Path
    """The server's private key."""

    @classmethod
    def of(
        cls, folder: Path | None, ca: Path | None = None, certificate: Path | None = None, key: Path | None = None
    ) -> Tls:
        """Return the files; those without a path are taken from a folder of ``fedcore federate keys``.

        :raises ConfigError: a file has no path and there is no folder, or it does not exist.
        """
        files = []
        for flag, text, name in (
            ("--ca", ca, "ca.crt"),
            ("--certificate", certificate, "server.crt"),
            ("--key", key, "server.key"),
        ):
            path = text or (folder / name if folder else None)
            if path is None:
                raise ConfigError(f"{flag} is missing; give the file, or --keys DIR")
            if not path.is_file():
                raise ConfigError(
                    f"{flag}: there is no file {path}; fedcore federate keys makes the files of a federation"
                )
            files.append(path.resolve())
        return cls(*files)


@dataclass(frozen=True)
class PublicKey:
    """A client's public key."""

    pem: bytes
    """The key in the format that Flower registers."""
    fingerprint: str
    """The fingerprint as ssh-keygen shows it."""


def check_name(name: str) -> str:
    """Return a client's name if it is valid. The names of its key files begin with it.

    :raises ConfigError: it is not valid.
    """
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise ConfigError(
            f"client name {name!r}: use 1 to 64 letters, digits, '.', '_' or '-'; 'ca' and 'server' are reserved"
        )
    return name


def make_keys(folder: Path, hosts: Sequence[str], clients: Sequence[str]) -> list[Path]:
    """Write a CA's certificate, the server's certificate and key, and a key pair for each client. Return the files.

    :param hosts: the names and addresses that the server's certificate is valid for. If this is empty, only key pairs
        are written, to a folder that already has certificates.
    :raises ConfigError: a file already exists, a name is not valid, or nothing is to be written. Nothing has been
        written by then. Or the folder cannot be written.
    """
    names = [check_name(name) for name in clients]
    if len(set(names)) < len(names):
        raise ConfigError("--client: two clients have the same name")
    has_ca = (folder / "ca.crt").exists()
    if not hosts and not has_ca:
        raise ConfigError(
            f"--host is missing: give the names or addresses under which the clients reach the server; {folder} has no "
            "certificates yet"
        )
    if not hosts and not names:
        raise ConfigError("nothing to do: give --client for key pairs, or --host for the server's certificate")
    content: dict[str, bytes] = {}
    if hosts:
        content.update(_certificates(hosts))
    for name in names:
        content.update(_key_pair(name))
    for file in content:
        if (folder / file).exists():
            raise ConfigError(f"{folder / file} already exists and is not overwritten; choose another folder or name")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for file, data in content.items():
            (folder / file).touch(mode=0o600)
            (folder / file).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror or error}") from error
    return [folder / file for file in content]


def read_public_key(path: Path) -> PublicKey:
    """Read a client's public key.

    :raises ConfigError: the file cannot be read, or is not an EC key in the format of OpenSSH.
    """
    try:
        key = load_ssh_public_key(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"the public key {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not an OpenSSH public key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path} is not an EC key, which Flower requires; fedcore federate keys makes one")
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return PublicKey(pem, _fingerprint(key))


def check_private_key(path: Path) -> str:
    """Return the fingerprint of a client's private key.

    :raises ConfigError: the file cannot be read, is not an EC key in the format of OpenSSH, has a password, or other
        users may read it.
    """
    try:
        mode = path.stat().st_mode
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise ConfigError(f"--key {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"--key {path} is not an OpenSSH private key without a password: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"--key {path} is not an EC key, which Flower requires; fedcore federate keys makes one")
    _check_mode(path, mode)
    return _fingerprint(key.public_key())


def _check_mode(path: Path, mode: int) -> None:
    if mode & 0o077:
        raise ConfigError(f"--key {path} can be read by other users; run chmod 600 {path}")


def public_keys(folder: Path | None, texts: Sequence[str]) -> dict[str, PublicKey]:
    """Return the clients' public keys by name. The order numbers the clients.

    :param folder: if ``texts`` is empty, all ``*.pub`` files of this folder are read, sorted by name.
    :param texts: the clients as ``NAME=FILE``, or as ``NAME`` for ``NAME.pub`` in the folder.
    :raises ConfigError: there are no keys, two clients have the same name or key, or a key cannot be read.
    """
    files: dict[str, Path] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        if not equals and folder is None:
            raise ConfigError(f"--client {text}: write NAME=FILE, or give --keys DIR, which holds {text}.pub")
        if check_name(name) in files:
            raise ConfigError(f"--client {name} is given twice")
        files[name] = Path(file).expanduser() if equals else Path(folder or "", f"{name}.pub")
    if not texts and folder is not None:
        files = {check_name(path.stem): path for path in sorted(folder.glob("*.pub"))}
    if not files:
        where = f"{folder} has no *.pub files" if folder else "--client and --keys are missing"
        raise ConfigError(f"a federation without clients: {where}; fedcore federate keys makes their keys")
    keys = {name: read_public_key(path) for name, path in files.items()}
    owners: dict[str, str] = {}
    for name, key in keys.items():
        other = owners.setdefault(key.fingerprint, name)
        if other != name:
            raise ConfigError(f"clients {other!r} and {name!r} have the same key; each needs a different one")
    return keys


def _certificates(hosts: Sequence[str]) -> Mapping[str, bytes]:
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedcore federation CA")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedcore federation server")])
    identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = (
        _certificate(authority, authority, ca_key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    names = [_general_name(host) for host in dict.fromkeys([*hosts, *LOOPBACK])]
    server = (
        _certificate(subject, authority, key.public_key(), SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return {
        "ca.crt": ca.public_bytes(Encoding.PEM),
        "server.crt": server.public_bytes(Encoding.PEM),
        "server.key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    }


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # a client's clock may be slow
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(**allowed: bool) -> x509.KeyUsage:
    names = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names})


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"--host {host!r} is neither a host name nor an IP address: {error}") from None


def _key_pair(name: str) -> Mapping[str, bytes]:
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return {
        f"{name}.key": key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()),
        f"{name}.pub": public + f" {name}\n".encode(),
    }


def _fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    return "SHA256:" + base64.b64encode(ssh_key_fingerprint(key, hashes.SHA256())).decode().rstrip("=")


def check_server_key(tls: Tls) -> None:
    """Check that the server's certificate belongs to its key and has not expired, and that the key is private.

    :raises ConfigError: it belongs to another key or has expired, other users may read the key, or a file is damaged.
    """
    try:
        mode = tls.key.stat().st_mode
        certificate = x509.load_pem_x509_certificate(tls.certificate.read_bytes())
        key = load_pem_private_key(tls.key.read_bytes(), None)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{tls.certificate} and {tls.key} are not a PEM certificate and a PEM key: {error}"
        ) from error
    spki = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if certificate.public_key().public_bytes(*spki) != key.public_key().public_bytes(*spki):
        raise ConfigError(f"{tls.certificate} is not the certificate of the key {tls.key}")
    _check_mode(tls.key, mode)
    if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"{tls.certificate} expired on {certificate.not_valid_after_utc:%Y-%m-%d}")
