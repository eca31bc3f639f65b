"""Where the gateway listens: in the clear on this machine, by TLS where it is set up."""

import logging

import grpc.aio

from prefixgate.config.address import Address, parse_address
from prefixgate.config.settings import Settings, SettingsError
from prefixgate.proto.tls import ServerCertificates, ServerFiles, TlsError

logger = logging.getLogger(__name__)


def listen(server: grpc.aio.Server, settings: Settings) -> Address:
    """Have a server listen where the settings say; returns the address, with the port that the system chose.

    Raises SettingsError where the address cannot be had, TLS files cannot be used, or certificates are listed that
    nobody could show.
    """
    gateway = settings.gateway
    address = parse_address(gateway.listen)
    is_mutual = bool(gateway.tls_client_ca) and not address.is_unix
    for name, tenant in settings.tenants.items():
        if tenant.certificates and not is_mutual:
            problem = (
                f"tenants.{name}.certificates: nobody can show one; gateway.tls_client_ca and a TCP address are needed"
            )
            if not tenant.api_keys:
                raise SettingsError(problem)
            logger.warning("%s", problem)
    try:
        # TLS is for the network; a Unix socket's permissions say who may reach it.
        if gateway.tls_cert and not address.is_unix:
            port = server.add_secure_port(str(address), _certificates(settings).credentials())
        else:
            port = server.add_insecure_port(str(address))
            if not address.is_local:
                logger.warning("%s can be reached by other machines without TLS: API keys travel in the clear", address)
    except RuntimeError as error:
        raise SettingsError(f"gateway.listen: cannot listen on {address}; is the address taken?") from error
    return address if address.is_unix else Address(host=address.host, port=port)


def _certificates(settings: Settings) -> ServerCertificates:
    gateway = settings.gateway
    try:
        return ServerCertificates(ServerFiles(gateway.tls_cert, gateway.tls_key, gateway.tls_client_ca))
    except TlsError as error:
        raise SettingsError(f"gateway.tls_cert: {error}") from error
