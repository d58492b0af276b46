"""Where the server listens: a port or a Unix socket, with TLS or without."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from jaxllm.config.engine import ServerConfig
from jaxllm.errors import ConfigError

_CERT_REQS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_PROBE_S = 1.0


@dataclass(frozen=True, slots=True)
class Listener:
    """A bound socket that does not listen yet: clients are refused until the model is ready."""

    sock: socket.socket
    url: str  # for people and scripts: http(s)://HOST:PORT, or unix:PATH
    place: Path | None = None  # of a Unix socket
    identity: tuple[int, int] | None = None  # device and inode that binding made there

    def check(self) -> None:
        """Raise ConfigError where another server has taken the path since: nobody would come here."""
        if self.place is not None and _identity(self.place) != self.identity:
            raise ConfigError(f"--uds {str(self.place)!r} was taken by another server; choose another path")

    def remove(self) -> None:
        """Take away the socket's file, unless it is another server's by now. Safe to call twice."""
        if self.place is not None and _identity(self.place) == self.identity:
            with contextlib.suppress(OSError):
                self.place.unlink()

    def close(self) -> None:
        self.sock.close()
        self.remove()


def bind(config: ServerConfig) -> Listener:
    """Claim the address that `config` names.

    Raises:
        ConfigError: it does not exist, is taken or is not allowed.
    """
    if config.uds is not None:
        return _bind_path(config.uds)
    sock = _bind_port(config.host, config.port)
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.ssl_certfile is None else "https"
    return Listener(sock, f"{scheme}://{host}:{sock.getsockname()[1]}")


def refusal(config: ServerConfig, error: OSError) -> ConfigError:
    """The error of an address that cannot be listened on."""
    if config.uds is not None:
        return _path_refused(config.uds, error)
    return _port_refused(config.host, config.port, error)


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What the server proves who it is with; None without a certificate.

    Raises:
        ConfigError: a file cannot be read, is no PEM, or the key is another certificate's.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = f"ssl_certfile={config.ssl_certfile!r}, ssl_keyfile={config.ssl_keyfile!r}"
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"{files}: {error}; accepted: PEM files of a certificate and its key") from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"ssl_ca_certs={config.ssl_ca_certs!r}: {error}; accepted: a PEM file") from None
    context.verify_mode = _CERT_REQS[config.ssl_cert_reqs]
    return context


def _no_password() -> NoReturn:
    raise ValueError("the private key is encrypted, which is not served")  # OpenSSL would ask on the terminal


def _bind_port(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise ConfigError(f"--host {host!r} --port {port} is no address to listen on: {error}") from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _port_refused(host, port, error) from None
    return sock


def _port_refused(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on --host {host} --port {port}: {error.strerror}; choose a free --port")


def _bind_path(path: str) -> Listener:
    """Whoever may write to the socket's file may connect; its mode is the process's umask."""
    try:
        place = Path(path).expanduser().absolute()
    except RuntimeError as error:  # ~ of somebody without a home
        raise _path_refused(path, error) from None
    _clear_stale(path, place)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(place))
    except OSError as error:
        sock.close()
        raise _path_refused(path, error) from None
    return Listener(sock, f"unix:{place}", place, _identity(place))


def _identity(place: Path) -> tuple[int, int] | None:
    try:
        found = place.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _clear_stale(path: str, place: Path) -> None:
    """Take away a socket that nobody listens on: a server that was killed leaves one."""
    try:
        mode = place.lstat().st_mode
    except OSError:
        return  # not there, or binding will say why it cannot be
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--uds {path!r} is a file that is no socket; accepted: a path to make a socket at")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(place))
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                os.unlink(place)
            return
        except OSError as error:
            raise _path_refused(path, error) from None
    raise ConfigError(f"--uds {path!r} is taken: another server listens there; choose another path")


def _path_refused(path: str, error: Exception) -> ConfigError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(
        f"cannot listen on --uds {path!r}: {why}; accepted: a short path in a folder that can be written"
    )
