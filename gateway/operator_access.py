"""Who may see what is the operator's: all tenants at once, in a browser.

An operator's key opens it from anywhere. Without any configured it is there for this machine alone, on a port that
nothing else can reach; and then a browser on this machine must not be made to fetch it for somebody else's page.
"""

import base64
import binascii
import ipaddress
import re
from collections.abc import Iterable
from http import HTTPStatus

from prefixgate.gateway.tenants import KeyDigests
from prefixgate.proto.http_server import Answer, Request, plain

_CHALLENGE = {"WWW-Authenticate": 'Basic realm="prefixgate, key of the operator as password", charset="UTF-8"'}
"""Basic, since that is what a browser can ask its user for."""

_FORWARDED = ("forwarded", "x-forwarded", "x-real-ip", "via")
"""Beginnings of headers that only somebody in between writes."""

_HOST = re.compile(r"(?P<name>localhost|[0-9.]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]+)?")
"""Names of this machine alone, so far as their form tells."""

_OWN_SITES = ("same-origin", "none")
"""What a browser says of a request that its user made, or a page of this very server."""


class OperatorAccess:
    """Lets an operator in, and nobody else."""

    def __init__(self, digests: Iterable[str] | None, *, is_local: bool) -> None:
        """``digests`` are those of the operator's keys, ``is_local`` whether this machine alone can reach the port."""
        self._is_local = is_local
        self._asks_for_key = False
        self.replace(digests)

    def replace(self, digests: Iterable[str] | None) -> None:
        """Know these keys, or none, from the next request on. Where there were some, a key is asked for ever after.

        Keys that a file has lost by mistake would else open the page: what stands before the port may be a proxy.
        """
        self._keys = KeyDigests((digest, "operator") for digest in digests or ())
        self._asks_for_key = self._asks_for_key or bool(self._keys)

    @property
    def is_possible(self) -> bool:
        """Whether there is anyone who may be let in."""
        return self._is_local or bool(self._keys)

    def refusal(self, request: Request) -> Answer | None:
        """Tell why a request is refused; None where it is not.

        A key that is configured is asked for on this machine too: with a proxy in front, all requests come from here.
        """
        if _is_of_another_site(request):
            return plain(HTTPStatus.FORBIDDEN, "the request comes from a page of another site")
        if self._asks_for_key:
            if self._keys.owner(_key(request.headers.get("authorization", ""))) is not None:
                return None
            refusal = plain(HTTPStatus.UNAUTHORIZED, "the key of the operator is needed, as password or as bearer")
            return refusal._replace(headers={**refusal.headers, **_CHALLENGE})
        if self._is_local and _is_from_here(request):
            return None
        return plain(
            HTTPStatus.FORBIDDEN,
            "without gateway.operator_keys this is for a browser on this machine alone, that asks a loopback address "
            "and no proxy; `prefixgate key` makes a key",
        )


def _is_of_another_site(request: Request) -> bool:
    site = request.headers.get("sec-fetch-site", "none")
    # A link on another site may lead here: its page learns nothing of what is shown then.
    is_followed = request.headers.get("sec-fetch-mode") == "navigate" and (
        request.headers.get("sec-fetch-dest") == "document"
    )
    if site not in _OWN_SITES and not is_followed:
        return True
    origin = request.headers.get("origin")
    return origin is not None and origin.partition("://")[2] != request.headers.get("host")


def _is_from_here(request: Request) -> bool:
    """Whether a program on this machine asks for an address of this machine.

    The name that was asked for counts too: a page of another site can have its own name resolved to this machine, and
    is then, to the browser, a page of this server.
    """
    host = _HOST.fullmatch(request.headers.get("host", ""))
    is_named = host is not None and (host["name"] == "localhost" or _is_loopback(host["name"].strip("[]")))
    is_forwarded = any(name.startswith(_FORWARDED) for name in request.headers)
    return is_named and _is_loopback(request.client) and not is_forwarded


def _is_loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


def _key(authorization: str) -> bytes:
    """Read the key out of a header; an empty one, which nobody has, where there is none."""
    scheme, _, value = authorization.partition(" ")
    # As it came: headers are read as Latin-1, whatever their bytes are.
    raw = value.strip().encode("latin-1", "replace")
    if scheme.lower() == "bearer":
        return raw
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(raw, validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""
