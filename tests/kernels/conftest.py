"""What the kernel tests are parametrised over: an implementation and the device it runs on."""

import pytest
import torch

from pdserve.kernels.dispatch import Impl


@pytest.fixture(
    params=[
        pytest.param(("reference", "cpu"), id="reference-cpu"),
        pytest.param(("auto", "cpu"), id="auto-cpu"),
        pytest.param(("reference", "cuda"), id="reference-cuda", marks=pytest.mark.gpu),
        pytest.param(("triton", "cuda"), id="triton-cuda", marks=pytest.mark.gpu),
    ]
)
def where(request: pytest.FixtureRequest) -> tuple[Impl, torch.device]:
    impl, device = request.param
    return impl, torch.device(device)
