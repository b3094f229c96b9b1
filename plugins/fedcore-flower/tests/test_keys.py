"""Keys and certificates: their content, their permissions, and that none is overwritten."""

from __future__ import annotations

import datetime
import ipaddress
import shutil
import ssl
import subprocess

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from typer.testing import CliRunner

from fedcore import ConfigError
from fedcore_flower.commands import app
from fedcore_flower.keys import Tls, check_private_key, check_server_key, make_keys, public_keys
from tests.sentences import raises


@pytest.fixture
def folder(tmp_path):
    make_keys(tmp_path / "keys", ["federation.example.org", "10.1.2.3"], ["birch", "alder"])
    return tmp_path / "keys"


def test_only_the_owner_may_read_the_files(folder):
    names = {"ca.crt", "server.crt", "server.key", "alder.key", "alder.pub", "birch.key", "birch.pub"}
    assert {path.name for path in folder.iterdir()} == names
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o600"}


def test_the_certificate_is_valid_for_the_server_s_addresses(folder):
    ca = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["federation.example.org", "localhost"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address("10.1.2.3"),
        ipaddress.ip_address("127.0.0.1"),
    ]
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    check_server_key(Tls.of(folder))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_verifies_the_certificate(folder):
    verify = ["openssl", "verify", "-x509_strict", "-CAfile", folder / "ca.crt", folder / "server.crt"]
    found = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_key_pairs_belong_together(folder):
    private = load_ssh_private_key((folder / "alder.key").read_bytes(), None)
    public = load_ssh_public_key((folder / "alder.pub").read_bytes())
    assert isinstance(private.curve, ec.SECP384R1)
    assert private.public_key() == public
    assert check_private_key(folder / "alder.key") == public_keys(folder, [])["alder"].fingerprint


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_fingerprints_are_those_of_ssh(folder):
    shown = subprocess.run(["ssh-keygen", "-lf", folder / "alder.pub"], capture_output=True, text=True, check=True)
    assert check_private_key(folder / "alder.key") in shown.stdout


def test_clients_are_numbered_by_name_or_as_given(folder):
    assert list(public_keys(folder, [])) == ["alder", "birch"]
    assert list(public_keys(folder, ["birch", f"a={folder / 'alder.pub'}"])) == ["birch", "a"]


def test_nothing_is_overwritten(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for hosts, clients in ((["localhost"], []), ([], ["alder"]), ([], ["new", "alder"])):
        with raises(ConfigError):
            make_keys(folder, hosts, clients)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_clients_may_be_added(folder):
    assert [path.name for path in make_keys(folder, [], ["cedar"])] == ["cedar.key", "cedar.pub"]
    assert list(public_keys(folder, [])) == ["alder", "birch", "cedar"]


@pytest.mark.parametrize(
    ("hosts", "clients", "named"),
    [
        ([], ["a"], ("--host",)),
        (["localhost"], ["a", "a"], ()),
        (["localhost"], ["../a"], ("'../a'",)),
        (["localhost"], ["ca"], ("'ca'",)),
        (["gr\u00fcn host"], [], ()),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path, hosts, clients, named):
    with raises(ConfigError, *named):
        make_keys(tmp_path / "keys", hosts, clients)
    assert not (tmp_path / "keys").exists()


def test_bad_keys_are_named(folder, tmp_path):
    (tmp_path / "junk.pub").write_text("ssh-rsa nonsense")
    with pytest.raises(ConfigError, match=r"junk\.pub is not an OpenSSH public key"):
        public_keys(tmp_path, [])
    with raises(ConfigError, "'alder'", "'other'"):
        public_keys(folder, ["alder", f"other={folder / 'alder.pub'}"])
    with raises(ConfigError, tmp_path / "keys" / "none"):
        public_keys(tmp_path / "keys" / "none", [])
    (folder / "alder.key").chmod(0o644)
    with raises(ConfigError, f"chmod 600 {folder / 'alder.key'}"):
        check_private_key(folder / "alder.key")
    (folder / "server.key").chmod(0o640)
    with raises(ConfigError, f"chmod 600 {folder / 'server.key'}"):
        check_server_key(Tls.of(folder))
    (folder / "server.key").chmod(0o600)
    check_server_key(Tls.of(folder))
    with pytest.raises(ConfigError, match="not an OpenSSH private key"):
        check_private_key(folder / "server.key")


def test_a_certificate_of_another_key_is_refused(folder, tmp_path):
    make_keys(tmp_path / "other", ["localhost"], [])
    with raises(ConfigError):
        check_server_key(Tls.of(folder, key=tmp_path / "other" / "server.key"))
    with raises(ConfigError):
        Tls.of(tmp_path)
    with raises(ConfigError, "--ca"):
        Tls.of(None)


def test_certificates_last(folder):
    server = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    left = server.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=800) < left < datetime.timedelta(days=826)


def test_the_command_says_which_file_goes_to_whom(tmp_path):
    result = CliRunner().invoke(app, ["keys", str(tmp_path / "k"), "--host", "h", "--client", "alder"])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert "to every client: ca.crt; for another --host make another folder" in words
    assert "to alder: alder.key" in words
    again = CliRunner().invoke(app, ["keys", str(tmp_path / "k"), "--host", "h"])
    assert again.exit_code == 2
