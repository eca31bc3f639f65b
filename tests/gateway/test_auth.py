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


def certificate(**names: bytes) -> dict[str, list[bytes]]:
    """What gRPC tells of a verified client certificate."""
    return {name: [value] for name, value in names.items()} | {"transport_security_type": [b"ssl"]}


@pytest.fixture
def mixed() -> Authenticator:
    tenants = {
        "blue": TenantSettings((digest_api_key(BLUE.encode()),), ("dns:blue.example", "subject:CN=blue,O=Example")),
        "red": TenantSettings((), ("uri:spiffe://example/red", "email:red@example.com")),
    }
    return Authenticator(tenants, local_allowed=False)


@pytest.mark.parametrize(
    ("peer", "tenant"),
    [
        (certificate(peer_dns=b"blue.example"), "blue"),
        (certificate(x509_subject=b"CN=blue,O=Example"), "blue"),
        (certificate(peer_uri=b"spiffe://example/red"), "red"),
        (certificate(peer_email=b"red@example.com", peer_dns=b"unlisted.example"), "red"),
    ],
)
def test_a_listed_certificate_names_the_tenant(mixed: Authenticator, peer: dict[str, list[bytes]], tenant: str) -> None:
    assert mixed.authenticate([], peer) == tenant


@pytest.mark.parametrize(
    "peer",
    [
        certificate(),
        certificate(peer_dns=b"BLUE.example"),
        certificate(peer_dns=b"a.blue.example"),
        certificate(peer_dns=b"*.example"),
        certificate(peer_uri=b"blue.example"),  # a listed name, of another kind
        certificate(x509_common_name=b"blue"),
        certificate(x509_subject=b"CN=blue,O=Example,C=AT"),
        certificate(peer_dns=b"blue.example\xff"),
    ],
)
def test_any_other_certificate_proves_nothing_and_leaves_it_to_the_key(
    mixed: Authenticator, peer: dict[str, list[bytes]]
) -> None:
    with pytest.raises(UnauthenticatedError, match="no client certificate that is listed"):
        mixed.authenticate([], peer)
    assert mixed.authenticate([("authorization", f"Bearer {BLUE}")], peer) == "blue"


def test_key_and_certificate_must_prove_the_same_tenant(mixed: Authenticator) -> None:
    blue, red = certificate(peer_dns=b"blue.example"), certificate(peer_uri=b"spiffe://example/red")
    header = [("authorization", f"Bearer {BLUE}")]
    assert mixed.authenticate(header, blue) == "blue"
    with pytest.raises(UnauthenticatedError, match="of different tenants"):
        mixed.authenticate(header, red)
    # A key that is sent counts, also a wrong one.
    with pytest.raises(UnauthenticatedError, match="not known"):
        mixed.authenticate([("authorization", "Bearer wrong")], blue)
    both = {"peer_dns": [b"blue.example"], "peer_uri": [b"spiffe://example/red"]}
    with pytest.raises(UnauthenticatedError, match="names of more than one tenant"):
        mixed.authenticate([], both)
    with pytest.raises(UnauthenticatedError, match="names of more than one tenant"):
        mixed.authenticate(header, both)


def test_keys_change_from_the_next_call_on_and_never_to_none_at_all(mixed: Authenticator) -> None:
    header = [("authorization", f"Bearer {BLUE}")]
    mixed.replace({"blue": TenantSettings((digest_api_key(b"new"), digest_api_key(b"newer")))})
    with pytest.raises(UnauthenticatedError):
        mixed.authenticate(header)
    with pytest.raises(UnauthenticatedError):
        mixed.authenticate([], certificate(peer_dns=b"blue.example"))
    for key in ("new", "newer"):
        assert mixed.authenticate([("authorization", f"Bearer {key}")]) == "blue"
    with pytest.raises(SettingsError, match="none are left"):
        mixed.replace({})
    assert mixed.authenticate([("authorization", "Bearer new")]) == "blue"


def test_a_gateway_without_tenants_can_come_to_have_some() -> None:
    local = Authenticator({}, local_allowed=True)
    local.replace({})
    assert local.authenticate([]) == "local"
    local.replace({"blue": TenantSettings((digest_api_key(BLUE.encode()),))})
    with pytest.raises(UnauthenticatedError):
        local.authenticate([])
