"""`python -m pdserve` is the `pdserve` command."""

import sys

from .server.__main__ import main

sys.exit(main())
