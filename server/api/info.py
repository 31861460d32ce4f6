"""What a server says about itself: health, model, configuration and peers, as JSON objects."""

import time
from importlib.metadata import PackageNotFoundError, version

from pydantic import SecretStr

from ...configs.load import public_dict
from ...configs.schema import AnyServerConfig, PrefillConfig
from ...scheduler.messages.frontend import PeerStatus, Ready
from ...scheduler.messages.lifecycle import PrefillState, State
from ...transfer.control.events import describe_absence
from ..engine.leader_client import LeaderClient

WAITING_STATES = (State.QUEUED.value, PrefillState.WAITING.value)


def package_version() -> str:
    try:
        return version("pdserve")
    except PackageNotFoundError:
        return "unknown"  # run from a checkout without an install


class ServerInfo:
    """Answers the read-only routes from the configuration and the leader's latest messages."""

    def __init__(self, config: AnyServerConfig, leader: LeaderClient) -> None:
        self._config = config
        self._leader = leader
        self._started_at = time.time()

    @property
    def model_name(self) -> str:
        """The name clients see; before the model is loaded, the one it was asked for by."""
        ready = self._leader.ready
        return self._config.served_model_name or (ready.model.name if ready else self._config.model)

    def health(self) -> tuple[bool, dict[str, object]]:
        """Whether this server serves and moves, and why not. Peers are reported but never make it unhealthy."""
        reasons = self._leader.problems()
        report: dict[str, object] = {
            "status": "ok" if not reasons else "unavailable",
            "state": self._leader.state,
            "reasons": reasons,
            "warnings": self._warnings(),
            "role": self._config.role,
            "peers": self._peers(),
        }
        return not reasons, report

    def _warnings(self) -> list[str]:
        """What keeps this server from its work and is not its own: a decode server without a prefill server."""
        peers = self._peers()
        if self._config.role == "prefill" or self._leader.status is None or any(p.state == "paired" for p in peers):
            return []
        if not peers:
            return [
                "no prefill server is known: give --prefill, or name one in requests as routers do (bootstrap_host)"
            ]
        known = {peer.endpoint: peer.detail or peer.state for peer in peers}
        return [f"no prefill server is paired: {describe_absence(known)}"]

    def model(self, ready: Ready) -> dict[str, object]:
        return {
            "model_path": ready.model.path,
            "tokenizer_path": ready.model.path,
            "is_generation": True,
            "served_model_name": self.model_name,
            "architecture": ready.model.architecture,
            "context_length": ready.model.context_length,
            "vocab_size": ready.model.vocab_size,
            "eos_token_ids": ready.model.eos_token_ids,
            "dtype": ready.model.dtype,
            "device": ready.model.device,
            "fingerprint": ready.model.fingerprint,
        }

    def models(self, ready: Ready) -> dict[str, object]:
        """OpenAI's list of models: the one there is."""
        return {"object": "list", "data": [self.model_card(ready)]}

    def model_card(self, ready: Ready) -> dict[str, object]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": int(self._started_at),
            "owned_by": "sglang",  # by this routers know which requests we take: those with bootstrap_room
            "root": ready.model.path,
            "max_model_len": min(ready.model.context_length, ready.max_total_tokens),
        }

    def load(self, ready: Ready) -> list[dict[str, int]]:
        """How busy this server is, in SGLang's shape: an entry for each data-parallel rank, of which there is one."""
        status = self._leader.status
        states = status.states if status else {}
        gauges = status.gauges if status else {}
        held = int(gauges.get("kv_pages_held", 0)) * ready.page_size
        return [
            {
                "dp_rank": 0,
                "num_reqs": sum(states.values()),
                "num_waiting_reqs": sum(states.get(state, 0) for state in WAITING_STATES),
                "num_tokens": held + int(gauges.get("waiting_tokens", 0)),
            }
        ]

    def server(self) -> dict[str, object]:
        """Configuration without secrets, pool, peers and live requests; routers read the SGLang names in it."""
        config, ready, status = self._config, self._leader.ready, self._leader.status
        info: dict[str, object] = {
            "version": package_version(),
            "status": self._leader.state,
            "served_model_name": self.model_name,
            "model_path": ready.model.path if ready else config.model,
            "disaggregation_mode": config.role,
            "tp_size": config.tp,
            "pp_size": config.pp,
            "dp_size": 1,
            "config": self._public_config(),
            "peers": self._peers(),
            "taken_at": status.taken_at if status else None,
            "states": status.states if status else {},
            "gauges": status.gauges if status else {},
            "counters": status.counters if status else {},
        }
        if isinstance(config, PrefillConfig):
            info["disaggregation_bootstrap_port"] = config.bootstrap_port
        if ready is not None:
            info["instance"] = ready.instance
            info["ranks"] = list(ready.ranks)
            info["max_total_num_tokens"] = ready.num_pages * ready.page_size
            info["pool"] = {
                "page_size": ready.page_size,
                "num_pages": ready.num_pages,
                "tokens": ready.num_pages * ready.page_size,
                "max_total_tokens": ready.max_total_tokens,
            }
        return info

    def _public_config(self) -> dict[str, object]:
        """Whether a secret is set may be known, its value and length may not."""
        public = public_dict(self._config)
        public.update({name: "set" for name, value in self._config if isinstance(value, SecretStr)})
        if self._leader.ready is not None:
            public.update(self._leader.ready.chosen)
        return public

    def _peers(self) -> list[PeerStatus]:
        return list(self._leader.status.peers if self._leader.status else ())
