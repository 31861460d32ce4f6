"""`pdserve up` with fake servers, as a program. Arguments: the program of the servers, three ports, and the number of
probes before prefill is healthy.
"""

import sys
from collections.abc import Sequence

from pdserve.configs.schema import AnyServerConfig
from pdserve.server.launch import up
from pdserve.server.launch.pair import load_pair_config


def main(arguments: Sequence[str]) -> int:
    server_program, port, prefill_port, bootstrap_port, probes = arguments
    unready = {"prefill": probes, "decode": "0"}

    def server_command(config: AnyServerConfig) -> list[str]:
        return [sys.executable, "-P", "-c", server_program, config.role, str(config.port), unready[config.role]]

    up.PROGRESS_LINE_S = 0.0
    up.server_command = server_command
    ports = {"port": port, "prefill_port": prefill_port, "bootstrap_port": bootstrap_port}
    return up.run_up(load_pair_config(None, ports, {}))
