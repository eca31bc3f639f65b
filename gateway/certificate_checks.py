"""Whether a server's certificate and key can be used, and for how long."""

import ssl
import time
from collections.abc import Iterator

from prefixgate.proto.finding import Finding
from prefixgate.proto.tls import ServerCertificates, ServerFiles, TlsError

_DAY = 86_400
_SOON_DAYS = 14


def check_tls(key: str, certificate: str, private_key: str, client_ca: str) -> Iterator[Finding]:
    """Look at the files of a server; says nothing where none are named. ``key`` begins the settings' names."""
    if not certificate:
        return
    try:
        ServerCertificates(ServerFiles(certificate, private_key, client_ca))
        ends = _ends(certificate, private_key)
    except TlsError as error:
        yield Finding("tls", "problem", f"{key}_cert: {error}", "give PEM files that belong together")
        return
    except ssl.SSLCertVerificationError as error:
        remedy = "renew it; a server that runs takes the new one by itself"
        yield Finding("tls", "problem", f"{key}_cert: {certificate}: {error.verify_message}", remedy)
        return
    days = (ends - time.time()) / _DAY
    if days < _SOON_DAYS:
        remedy = "renew it; a server that runs takes the new one by itself"
        yield Finding("tls", "warning", f"{key}_cert: {certificate} ends in {days:.0f} days", remedy)
    else:
        yield Finding("tls", "ok", f"{key}_cert: {certificate} and its key belong together, and hold {days:.0f} days")


def _ends(certificate: str, private_key: str) -> float:
    """Tell when a certificate ends, in seconds since the epoch. Raises ssl.SSLCertVerificationError.

    Nothing in the standard library reads a certificate but a handshake, so one is made, in memory, with a client that
    trusts this certificate alone.
    """
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, private_key)
    calling = ssl.create_default_context(cafile=certificate)
    calling.check_hostname = False
    # It need not be signed by what is trusted, as it is what is trusted.
    calling.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server, client = serving.wrap_bio(up, down, server_side=True), calling.wrap_bio(down, up)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    told = client.getpeercert()
    assert told is not None
    return ssl.cert_time_to_seconds(str(told["notAfter"]))
