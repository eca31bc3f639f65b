"""Who sees the status page."""

import base64
from http import HTTPStatus

import pytest

from prefixgate.gateway.operator_access import OperatorAccess
from prefixgate.gateway.tenants import digest_api_key
from prefixgate.proto.http_server import Request

KEY = "pg-the-operators"
DIGESTS = [digest_api_key(b"pg-an-older-one"), digest_api_key(KEY.encode())]


def request(client: str = "127.0.0.1", **headers: str) -> Request:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Request({"host": "127.0.0.1:8051", **named}, client)


def basic(password: str, user: str = "operator") -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def status(access: OperatorAccess, asked: Request) -> HTTPStatus | None:
    refusal = access.refusal(asked)
    return None if refusal is None else refusal.status


LOCAL = OperatorAccess(None, is_local=True)
KEYED = OperatorAccess(DIGESTS, is_local=False)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8051", "127.0.0.1", "localhost:8051", "localhost", "[::1]:8051", "127.9.9.9"]
)
def test_without_keys_this_machine_is_let_in(host: str) -> None:
    assert LOCAL.refusal(request(host=host)) is None
    assert LOCAL.refusal(request("::1", host=host)) is None


@pytest.mark.parametrize(
    "asked",
    [
        request("10.0.0.7"),
        request(host="status.example:8051"),
        request(host="127.0.0.1.example:8051"),
        request(host="localhost.example"),
        request(host="127.0.0.1, evil.example"),
        request(host=""),
        request(host="[::1"),
        request(host="[10.0.0.7]"),
        request(host="operator@127.0.0.1"),
        request(host="127.0.0.1:8051:8051"),
        request(host="10.0.0.7:8051"),
        request(host="0.0.0.0:8051"),
        Request({}, "127.0.0.1"),
        request(x_forwarded_for="10.0.0.7"),
        request(x_forwarded_host="status.example"),
        request(forwarded="for=10.0.0.7"),
        request(via="1.1 proxy"),
        request("not an address"),
    ],
    ids=str,
)
def test_without_keys_nobody_else_is_let_in(asked: Request) -> None:
    assert status(LOCAL, asked) is HTTPStatus.FORBIDDEN
    assert status(OperatorAccess(None, is_local=False), asked) is HTTPStatus.FORBIDDEN


def test_a_port_that_others_reach_is_closed_without_keys_and_says_what_to_do() -> None:
    access = OperatorAccess(None, is_local=False)
    refusal = access.refusal(request())
    assert refusal is not None
    assert refusal.status is HTTPStatus.FORBIDDEN
    assert b"gateway.operator_keys" in refusal.body
    assert (access.is_possible, LOCAL.is_possible, KEYED.is_possible) == (False, True, True)


@pytest.mark.parametrize(
    "given", [f"Bearer {KEY}", f"bearer {KEY}", basic(KEY), basic(KEY, ""), basic("pg-an-older-one")]
)
def test_a_key_opens_from_anywhere(given: str) -> None:
    assert KEYED.refusal(request("10.0.0.7", host="status.example", authorization=given)) is None


@pytest.mark.parametrize(
    "given",
    [
        "",
        KEY,
        "Bearer",
        "Bearer ",
        f"Bearer {KEY}x",
        f"Bearer {KEY}, Bearer {KEY}",
        f"Basic {KEY}",
        "Basic ====",
        basic(""),
        basic(KEY + "é"),
        "Bearer ké",
        "Bearer \udce9",
        base64.b64encode(KEY.encode()).decode(),
        "Digest " + KEY,
    ],
)
@pytest.mark.parametrize("client", ["127.0.0.1", "10.0.0.7"])
def test_with_keys_nobody_is_let_in_without_one(client: str, given: str) -> None:
    for access in (KEYED, OperatorAccess(DIGESTS, is_local=True)):
        refusal = access.refusal(request(client, authorization=given))
        assert refusal is not None
        assert refusal.status is HTTPStatus.UNAUTHORIZED
        assert refusal.headers["WWW-Authenticate"].startswith("Basic realm=")
        assert KEY.encode() not in refusal.body


@pytest.mark.parametrize("access", [LOCAL, KEYED])
def test_pages_of_other_sites_are_let_in_by_no_credential(access: OperatorAccess) -> None:
    by_key = {"authorization": f"Bearer {KEY}"}
    for site in ("cross-site", "same-site"):
        assert status(access, request(sec_fetch_site=site, sec_fetch_mode="cors", **by_key)) is HTTPStatus.FORBIDDEN
        framed = request(sec_fetch_site=site, sec_fetch_mode="navigate", sec_fetch_dest="iframe", **by_key)
        assert status(access, framed) is HTTPStatus.FORBIDDEN
    assert status(access, request(origin="https://evil.example", **by_key)) is HTTPStatus.FORBIDDEN
    assert status(access, request(origin="null", **by_key)) is HTTPStatus.FORBIDDEN
    # A link that is followed, an address that is typed, and the page itself.
    followed = request(sec_fetch_site="cross-site", sec_fetch_mode="navigate", sec_fetch_dest="document", **by_key)
    assert access.refusal(followed) is None
    assert access.refusal(request(sec_fetch_site="none", **by_key)) is None
    own = request(sec_fetch_site="same-origin", origin="http://127.0.0.1:8051", **by_key)
    assert access.refusal(own) is None


def test_keys_are_exchanged_while_it_runs() -> None:
    access = OperatorAccess(DIGESTS, is_local=True)
    access.replace([digest_api_key(b"pg-new")])
    assert status(access, request(authorization=f"Bearer {KEY}")) is HTTPStatus.UNAUTHORIZED
    assert access.refusal(request(authorization="Bearer pg-new")) is None
    # Keys that are lost open nothing.
    access.replace(None)
    assert status(access, request()) is HTTPStatus.UNAUTHORIZED
    assert status(access, request(authorization="Bearer pg-new")) is HTTPStatus.UNAUTHORIZED
    access.replace(DIGESTS)
    assert access.refusal(request(authorization=f"Bearer {KEY}")) is None
