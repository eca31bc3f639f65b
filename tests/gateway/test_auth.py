import hmac

import pytest

from prefixgate.config.settings import SettingsError, TenantSettings
from prefixgate.gateway.auth import Authenticator, UnauthenticatedError
from prefixgate.gateway.tenants import digest_api_key

BLUE, RED = "pg-blue-key", "pg-red-key"


@pytest.fixture
def authenticator() -> Authenticator:
    tenants = {
        "blue": TenantSettings((digest_api_key(BLUE.encode()), digest_api_key(b"spare"))),
        "red": TenantSettings((digest_api_key(RED.encode()),)),
    }
    return Authenticator(tenants, local_allowed=True)


def test_the_key_names_the_tenant(authenticator: Authenticator) -> None:
    assert authenticator.authenticate([("user-agent", "x"), ("authorization", f"Bearer {BLUE}")]) == "blue"
    assert authenticator.authenticate([("authorization", f"bearer {RED}")]) == "red"
    assert authenticator.authenticate([("Authorization", b"Bearer spare")]) == "blue"


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Bearer  {BLUE}",
        f"Bearer {BLUE} ",
        f"Basic {BLUE}",
        BLUE,
        "Bearer " + digest_api_key(BLUE.encode()),
        f"Bearer {BLUE[:-1]}",
        f"Bearer {BLUE}{RED}",
        "Bearer é",
        "Bearer \udce9",
        "Bearer é".encode("latin-1"),
        b"Bearer \x00\xff",
    ],
)
def test_anything_else_is_refused_without_being_repeated(authenticator: Authenticator, value: str | bytes) -> None:
    with pytest.raises(UnauthenticatedError) as refusal:
        authenticator.authenticate([("authorization", value)])
    assert "pg-" not in str(refusal.value)
    assert str(refusal.value).isascii()


def test_no_key_and_two_keys_are_refused(authenticator: Authenticator) -> None:
    with pytest.raises(UnauthenticatedError, match="no API key"):
        authenticator.authenticate([("x-api-key", BLUE)])
    with pytest.raises(UnauthenticatedError, match="more than one"):
        authenticator.authenticate([("authorization", f"Bearer {BLUE}"), ("authorization", f"Bearer {BLUE}")])


def test_no_metadata_but_the_credential_names_a_tenant(authenticator: Authenticator) -> None:
    claims = [("tenant", "red"), ("x-tenant-id", "red"), ("authorization", f"Bearer {BLUE}")]
    assert authenticator.authenticate(claims) == "blue"


@pytest.mark.parametrize("key", [BLUE, RED, "spare", "unknown", "é"])
def test_every_key_is_compared_with_every_digest(
    authenticator: Authenticator, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    real = hmac.compare_digest

    def compare_digest(offered: bytes, digest: bytes) -> bool:
        compared.append(digest)
        return real(offered, digest)

    monkeypatch.setattr(hmac, "compare_digest", compare_digest)
    try:
        authenticator.authenticate([("authorization", f"Bearer {key}")])
    except UnauthenticatedError:
        assert key in ("unknown", "é")
    assert len(compared) == 3


def test_without_tenants_all_are_local_but_only_on_this_machine() -> None:
    local = Authenticator({}, local_allowed=True)
    assert local.authenticate([]) == "local"
    assert local.authenticate([("authorization", "Bearer whatever")]) == "local"
    with pytest.raises(SettingsError, match="tenants: none are configured"):
        Authenticator({}, local_allowed=False)
    assert Authenticator({"blue": TenantSettings((digest_api_key(b"k"),))}, local_allowed=False)
