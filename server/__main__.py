"""`python -m pdserve.server` is the `pdserve` command."""

import sys

from .cli import main

sys.exit(main())
