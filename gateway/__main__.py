"""Lets ``python -m prefixgate.gateway`` do what the command ``prefixgate`` does."""

import sys

from prefixgate.gateway.cli import main

sys.exit(main())
