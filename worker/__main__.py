"""The worker process: ``python -m prefixgate.worker``."""

import argparse
import asyncio
import logging
import os
from collections.abc import Sequence

from prefixgate.config.flags import add_flags, settings_from
from prefixgate.config.hash_key import require_hash_key
from prefixgate.config.settings import Settings, SettingsError

# Read once, when torch is imported. The threads that share a step's arithmetic else spin while they wait for each
# other, and where the gateway or anything else wants one of their cores, a step takes several times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from prefixgate.proto.log_lines import start_logging
from prefixgate.worker.model_runner import ModelRefusedError
from prefixgate.worker.server import ListenError, WorkerServer

logger = logging.getLogger("prefixgate.worker")

EXIT_USAGE = 2
"""The settings cannot be used."""
EXIT_FAILED = 1
"""An address or the model cannot be had, or the engine failed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker until it is asked to stop; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="prefixgate worker",
        description="Serve one model on one device to gateways. Whoever proves to have the hash key can act for any "
        "tenant.",
    )
    add_flags(parser, ("worker", "cache", "tracing.endpoint", "log"))
    parsed = parser.parse_args(arguments)
    try:
        settings = settings_from(parsed)
    except SettingsError as error:
        start_logging("text")
        logger.error("%s", error)
        return EXIT_USAGE
    start_logging(settings.log.format)
    try:
        return asyncio.run(_run(settings, require_hash_key(settings.cache)))
    except SettingsError as error:
        logger.error("%s", error)
        return EXIT_USAGE
    except (ListenError, ModelRefusedError) as error:
        logger.error("%s", error)
        return EXIT_FAILED


async def _run(settings: Settings, hash_key: bytes) -> int:
    return await WorkerServer(settings, hash_key).run()


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # A model that is still being loaded runs on a daemon thread, in native code. Python's own way to end would stop
    # such a thread by unwinding it through frames that cannot be unwound, and abort.
    os._exit(code)
