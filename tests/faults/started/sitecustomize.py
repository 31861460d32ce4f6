"""Python imports this module at start. It installs the hooks in the processes of servers that are not forked."""

import sys

KINDS = {
    "pdserve.server": "frontend",
    "pdserve.scheduler.engine.leader": "leader",
    "pdserve.scheduler.ranks.main": "rank",
}

for module in KINDS.keys() & set(sys.orig_argv):
    from tests.faults.server_hooks import install

    install(KINDS[module])
