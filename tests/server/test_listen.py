"""Addresses: ports, TLS and Unix sockets, and clear errors where one cannot be had."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.config.engine import ServerConfig
from jaxllm.errors import ConfigError
from jaxllm.server.listen import bind, tls_context
from tests.helpers.scripted_engine import scripted
from tests.server.harness import events_of, running

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="makes certificates with openssl")


def _certificate(folder: Path, name: str) -> tuple[str, str]:
    """(certificate, key), signed by itself."""
    files = str(folder / f"{name}.crt"), str(folder / f"{name}.key")
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = [str(OPENSSL), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run(
        [*made, "-days", "2", "-out", files[0], "-keyout", files[1], *subject], check=True, capture_output=True
    )
    return files


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, str]]]:
    folder = tmp_path_factory.mktemp("tls")
    yield {name: _certificate(folder, name) for name in ("server", "client", "stranger")}


def _client(ca: str, own: tuple[str, str] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    if own is not None:
        context.load_cert_chain(*own)
    return context


@needs_openssl
def test_tls_serves_and_streams_to_a_client_that_checks_the_certificate(
    certificates: dict[str, tuple[str, str]],
) -> None:
    certificate, key = certificates["server"]
    with running(scripted(), ssl_certfile=certificate, ssl_keyfile=key) as served:
        assert served.url.startswith("https://127.0.0.1:")
        with httpx.Client(base_url=served.url, verify=_client(certificate)) as http:
            assert http.get("/health").status_code == 200
            streamed = http.post("/v1/completions", json={"prompt": "hi", "stream": True})
            *chunks, done = events_of(streamed.text)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello"
            assert done == "[DONE]"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(served.url + "/health", verify=_client(certificates["stranger"][0]))
        with pytest.raises(httpx.HTTPError):
            httpx.get(served.url.replace("https", "http") + "/health")
        assert served.get("/health").status_code == 200


@needs_openssl
def test_tls_can_ask_clients_for_a_certificate(certificates: dict[str, tuple[str, str]]) -> None:
    certificate, key = certificates["server"]
    asked: dict[str, Any] = {"ssl_ca_certs": certificates["client"][0], "ssl_cert_reqs": "required"}
    with running(scripted(), ssl_certfile=certificate, ssl_keyfile=key, **asked) as served:
        known = _client(certificate, certificates["client"])
        assert httpx.get(served.url + "/health", verify=known).status_code == 200
        for own in (None, certificates["stranger"]):
            with pytest.raises(httpx.HTTPError):
                httpx.get(served.url + "/health", verify=_client(certificate, own))


@needs_openssl
def test_tls_files_that_cannot_be_used_are_named(certificates: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    certificate, key = certificates["server"]
    encrypted = tmp_path / "encrypted.key"
    pem = [str(OPENSSL), "pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", str(encrypted)]
    subprocess.run(pem, check=True, capture_output=True)
    noise = tmp_path / "noise.pem"
    noise.write_text("no certificate")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ssl_certfile": str(tmp_path / "none.pem")}, "ssl_certfile.*No such file"),
        ({"ssl_certfile": str(noise), "ssl_keyfile": key}, "ssl_certfile"),
        ({"ssl_certfile": certificate, "ssl_keyfile": certificates["client"][1]}, "(?i)mismatch"),
        ({"ssl_certfile": certificate, "ssl_keyfile": str(encrypted)}, "encrypted"),
        ({"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": str(noise)}, "ssl_ca_certs"),
    ]
    for fields, expected in wrong:
        with pytest.raises(ConfigError, match=expected):
            tls_context(ServerConfig(**fields))
    assert tls_context(ServerConfig()) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"ssl_keyfile": "k"},
        {"ssl_ca_certs": "c"},
        {"ssl_cert_reqs": "required"},
        {"uds": ""},
        {"uds": "a\0b"},
        {"ssl_cert_reqs": "2"},
    ],
    ids=str,
)
def test_settings_that_need_another_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        ServerConfig(**fields)


def test_a_unix_socket_serves_and_is_removed_at_the_end(tmp_path: Path) -> None:
    place = tmp_path / "llm.sock"
    with running(scripted(), uds=str(place)) as served:
        assert stat.S_ISSOCK(place.stat().st_mode)
        assert served.complete("hi").json()["choices"][0]["text"] == "Hello"
        assert served.complete("hi", stream=True).text.endswith("data: [DONE]\n\n")
    assert not place.exists()


def test_a_unix_socket_that_a_killed_server_left_is_taken_over(tmp_path: Path) -> None:
    place = tmp_path / "llm.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(place))
    listener = bind(ServerConfig(uds=str(place)))
    assert listener.url == f"unix:{place}"
    listener.close()
    assert not place.exists()
    listener.close()


def test_a_unix_socket_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "llm.sock"
    with running(scripted(), uds=str(place)) as served:
        with pytest.raises(ConfigError, match="taken"):
            bind(ServerConfig(uds=str(place)))
        assert served.get("/health").status_code == 200


def test_a_path_that_another_server_took_meanwhile_is_noticed_and_left_to_it(tmp_path: Path) -> None:
    place = tmp_path / "llm.sock"
    first = bind(ServerConfig(uds=str(place)))  # still loading: nobody can connect
    second = bind(ServerConfig(uds=str(place)))
    with pytest.raises(ConfigError, match="taken by another server"):
        first.check()
    second.check()
    first.close()
    assert place.exists()
    second.close()
    assert not place.exists()


def test_paths_that_cannot_hold_a_socket_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    wrong = {
        str(file): "no socket",
        str(tmp_path / "no" / "folder" / "s"): "No such file",
        str(tmp_path / ("x" * 200)): "too long",
        "~nobody-of-that-name/s": "home",
    }
    for path, expected in wrong.items():
        with pytest.raises(ConfigError, match=expected):
            bind(ServerConfig(uds=path))
    assert file.read_text() == "mine"
    assert os.listdir(tmp_path) == ["file"]


def test_a_port_without_tls_is_http() -> None:
    listener = bind(ServerConfig(port=0))
    assert listener.url == f"http://127.0.0.1:{listener.sock.getsockname()[1]}"
    listener.close()
