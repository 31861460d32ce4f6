"""Role switches of a running server: checks and accepts them, and reports their state. The frontend executes them."""

import asyncio
import time
from collections.abc import Mapping

from ...common.errors import ClientError, RoleConflictError, RoleSwitchError, StartupError
from ...common.sampling import NEUTRAL_SAMPLING, SamplingParams
from ...common.words import counted
from ...configs.load import Role, config_in_role
from ...configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from ...models.loading.catalog import ModelSource
from ..api.default_sampling import read_default_sampling
from ..api.role import RoleReport, SwitchReport, SwitchStage
from ..engine.leader import Leader
from .ports import check_port
from .startup_checks import check_startup


class RoleSwitch:
    """One accepted switch from the configuration `former` to `config`."""

    def __init__(self, former: AnyServerConfig, config: AnyServerConfig, default_sampling: SamplingParams) -> None:
        self.former = former
        self.config = config
        self.default_sampling = default_sampling
        self.stage: SwitchStage = "draining"
        self._began_at = time.time()
        self._ended_at: float | None = None
        self._error: str | None = None
        self._ended = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._ended.is_set()

    def end(self, ended_at: float, error: str | None) -> None:
        self.stage = "done" if error is None else "failed"
        self._ended_at, self._error = ended_at, error
        self._ended.set()

    async def wait(self) -> None:
        await self._ended.wait()
        if self._error is not None:
            raise RoleSwitchError(f"the server did not become {self.config.role}: {self._error}")

    def report(self) -> SwitchReport:
        return {
            "from_role": self.former.role,
            "to_role": self.config.role,
            "stage": self.stage,
            "began_at": self._began_at,
            "ended_at": self._ended_at,
            "error": self._error,
        }


class RoleSwitches:
    """Accepts one switch at a time. `leader` is the current leader; the frontend sets it when it starts another."""

    def __init__(self, source: ModelSource, leader: Leader, fixed_role: str | None) -> None:
        """`fixed_role` is the reason why the role of this server cannot change; None if it can."""
        self.leader = leader
        self._source = source
        self._fixed = fixed_role or _why_fixed(leader.config)
        self._since = time.time()
        self._configs: dict[Role, AnyServerConfig] = {leader.config.role: leader.config}
        self._last: RoleSwitch | None = None
        self._accepted: asyncio.Queue[RoleSwitch] = asyncio.Queue()

    async def accepted(self) -> RoleSwitch:
        """Wait for the next accepted switch, for the frontend to execute."""
        return await self._accepted.get()

    def end(self, error: str | None = None) -> None:
        """Mark the current switch, if there is one, as ended: it succeeded, or failed with `error`."""
        switch = self._last
        if switch is None or switch.is_over:
            return
        now = time.time()
        if error is None:
            self._since = now
            self._configs[switch.config.role] = switch.config
        switch.end(now, error)

    def report(self) -> RoleReport:
        return {
            "role": self.leader.config.role,
            "since": self._since,
            "state": self.leader.client.state,
            "fixed": self._fixed,
            "switch": None if self._last is None else self._last.report(),
        }

    def former(self) -> AnyServerConfig | None:
        return self._configs.get("decode" if self.leader.config.role == "prefill" else "prefill")

    async def request(self, role: Role, settings: Mapping[str, object], *, drain: bool) -> RoleSwitch | None:
        self._check_state()
        current = self.leader.config
        if role == current.role:
            if settings:
                raise ClientError(f"settings change only with the role, and this server is {role} already")
            return None
        if self._fixed is not None:
            raise RoleConflictError(self._fixed)
        try:
            config = config_in_role(role, current, self._configs.get(role), settings)
            sampling = await asyncio.to_thread(self._check, config)
        except StartupError as error:
            raise ClientError(str(error)) from None
        self._check_state()  # again: other requests ran during the checks
        count, what = self.leader.open_work()
        if count and not drain:
            raise RoleConflictError(
                f'this server is not idle: it has {counted(count, what)}; with "drain": true it switches anyway, and '
                f"they have {current.shutdown_timeout_s:g} s (shutdown_timeout_s) to end"
            )
        self._last = RoleSwitch(current, config, sampling)
        self._accepted.put_nowait(self._last)
        return self._last

    def _check_state(self) -> None:
        if self._last is not None and not self._last.is_over:
            raise RoleConflictError(f"a role switch is under way: {self._last.stage}")
        if (state := self.leader.client.state) != "ready":
            raise RoleConflictError(f"the role changes only while the server is ready, and it is {state}")

    def _check(self, config: AnyServerConfig) -> SamplingParams:
        """Repeats the checks of a server's start for the new role, and returns its default sampling. Raises
        StartupError.
        """
        check_startup(config, self._source)
        if isinstance(config, PrefillConfig):
            check_port(config.host, config.bootstrap_port, "--bootstrap-port")
        return default_sampling_of(config, self._source)


def default_sampling_of(config: AnyServerConfig, source: ModelSource) -> SamplingParams:
    """The sampling defaults of requests: the model's recommendation, or neutral values. Raises StartupError if the
    recommendation is invalid.
    """
    from_model = isinstance(config, DecodeConfig) and config.sampling_defaults == "model"
    return read_default_sampling(source) if from_model else NEUTRAL_SAMPLING


def _why_fixed(config: AnyServerConfig) -> str | None:
    if config.nnodes == 1:
        return None
    return f"this server has ranks on {config.nnodes} machines (nnodes), which keep their role: restart it instead"
