"""A leader process and the client of its socket. They live and end together: a role switch replaces both."""

import asyncio
from collections.abc import Sequence

from ...configs.schema import AnyServerConfig, DecodeConfig
from ..observability.metrics import Metrics
from ..observability.tracing import Tracing
from .leader_client import LeaderClient
from .leader_process import LeaderProcess

REPORTED_EXIT_S = 2.0
"""How long a leader that has reported a startup error may take to exit."""


class Leader:
    """Owns the client and, after `start()`, the process. The client comes first, because the process connects to its
    socket. Needs a running event loop.
    """

    def __init__(
        self, config: AnyServerConfig, metrics: Metrics, command: Sequence[str], tracing: Tracing | None = None
    ) -> None:
        self.config = config
        self.client = LeaderClient(metrics, config, tracing)
        self.process: LeaderProcess | None = None
        self._command = command
        self._receiving = asyncio.create_task(self.client.run())

    def start(self) -> LeaderProcess:
        self.process = LeaderProcess(self.config, self.client.address, self._command)
        return self.process

    @property
    def pid(self) -> int | None:
        """The id of the process; None before it is started."""
        return self.process.pid if self.process is not None else None

    def open_work(self) -> tuple[int, str]:
        """The amount of work to drain, and its unit: requests on decode, transfers to decode servers on prefill."""
        if isinstance(self.config, DecodeConfig):
            return len(self.client.open_rids), "request"
        status = self.client.status
        return sum(status.states.values()) if status is not None else 0, "transfer"

    async def wait_exit(self) -> None:
        """Wait until a process that is about to exit has written its last lines to stderr; end it after
        REPORTED_EXIT_S.
        """
        if self.process is not None and self.process.exit_status is None:
            await self.process.stop(REPORTED_EXIT_S)

    def kill(self, reason: str) -> None:
        """Kill the process and fail every open request."""
        if self.process is not None:
            self.process.kill()
        self.client.fail_all(reason)

    async def close(self) -> None:
        """Release the socket and the process. All requests must have ended: `kill()` ends them."""
        self._receiving.cancel()
        await asyncio.gather(self._receiving, return_exceptions=True)
        self.client.close()
        if self.process is not None:
            self.process.close()
