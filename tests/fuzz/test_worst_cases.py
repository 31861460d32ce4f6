"""Searches for input that costs more than docs/architecture.md allows. The corpus has the costliest cases so far.

`make fuzz` searches longer, and adds a case that costs a third more than those in the corpus. `tests.fuzz.proof` checks
the search: with each fix taken out, it must find a case over the limit.
"""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings, target

from tests.cluster.servers import REPOSITORY
from tests.fuzz.harness import CORPUS, EXAMPLES, SHARE_S, kept, search_until
from tests.fuzz.proof import PATCHES
from tests.fuzz.request_fields import Case
from tests.fuzz.worst_cases import KINDS

GROWTH = 1.3


@pytest.mark.parametrize("name", KINDS)
def test_no_input_costs_more_than_its_limit(name: str) -> None:
    kind, worst = KINDS[name], [0.0]

    def measure(case: Case) -> float:
        cost = kind.cost(case)
        if cost > kind.limit:  # again: other processes may have been in the way
            cost = min(cost, kind.cost(case), kind.cost(case))
        assert cost <= kind.limit, f"{name} {json.dumps(case)} costs {cost:.3g}, limit {kind.limit:.3g}"
        return cost

    for kept_case in kept(f"worst/{name}"):
        worst[0] = max(worst[0], measure(json.loads(kept_case)))

    # without `explain`, which traces each line, and without `shrink`: the first case found is worth most
    @settings(
        max_examples=EXAMPLES,
        suppress_health_check=list(HealthCheck),
        deadline=None,
        phases=[Phase.reuse, Phase.generate, Phase.target],
    )
    @given(kind.cases)
    def example(case: Case) -> None:
        cost = measure(case)
        target(cost)
        if SHARE_S and cost > GROWTH * worst[0]:
            worst[0] = cost
            text = json.dumps(case)
            path = CORPUS / "worst" / name / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")

    search_until(example)


@pytest.mark.parametrize("patch", sorted(PATCHES.glob("*.patch")), ids=lambda patch: patch.stem)
def test_patch_that_takes_a_fix_out_applies(patch: Path) -> None:
    """Whether the search then finds a case takes minutes: `make fuzz-proof`."""
    assert patch.stem in KINDS
    subprocess.run(["git", "apply", "--check", patch], cwd=REPOSITORY, check=True)
