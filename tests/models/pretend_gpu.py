"""A simulated GPU: enforces CUDA's rules on a machine without one.

Tensors of this GPU are CPU memory that reports cuda:0 as its device. The GPU paths of the code under test (Triton
kernels, in the interpreter; CUDA graphs; pinned buffers; overlap scheduling) run, slowly, and fail where CUDA would:

    devices    operations that mix tensors of both devices are errors
    waits      operations that make the host wait are recorded, and are errors where waiting is forbidden
    copies     asynchronous copies may read late (the source must not change before an event after the copy has been
               waited for) and arrive late (until then the target holds garbage)
    graphs     a replay repeats the captured operations on the captured memory. Decisions of the host are those of the
               capture, and new tensors hold what the last replay left
    streams    work on the legacy default stream is an error; kernels/backends/streams.py says why

Not covered: concurrency between streams (everything runs in the order of enqueueing), kernels of csrc/ (their
references run), memory that is freed too early.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

from pdserve.kernels.backends import few_rows_cuda, gemv_cuda
from pdserve.kernels.dsa import index_plan
from pdserve.kernels.hisparse import swap_in, swap_in_cuda, write_back
from pdserve.kernels.linear import fp8_linear, linear
from pdserve.kernels.linear.fp8_format import Fp8Matrix
from pdserve.kernels.linear.rms_norm import add_rms_norm_reference
from pdserve.kernels.linear.row_tiles import RowTiles
from pdserve.kernels.moe import experts
from pdserve.kernels.moe.router import norm_route_cuda, routing, select_route_cuda
from pdserve.kernels.moe.router.selection import SelectionRule, select_experts_reference
from pdserve.kernels.sampling import keep_top_p
from pdserve.models.layers import hot_rows
from tests.kernels import cuda_sources

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
_AMPERE = SimpleNamespace(multi_processor_count=2, shared_memory_per_block_optin=163 << 10)
"""Older than Hopper, whose features (programmatic dependent launch, wgmma) cannot be interpreted."""
_MEMORY_BYTES = 1 << 30

_WAITING = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select", "equal"}
_WAITING |= {"bincount", "unique", "repeat_interleave", "allclose"}
"""Operations whose result, or its shape, the host has to know."""
_FROM_HOST = {"tensor", "new_tensor", "from_numpy", "frombuffer", "as_tensor"}


class GpuTensor(torch.Tensor):
    """CPU memory that reports the GPU as its device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{_name(func)} of a tensor of the simulated GPU, outside its context")


class PretendGpu(TorchFunctionMode):
    """A context manager: code within runs as on a machine with a GPU. One thread at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        """Operations that made the host wait, except explicit waits for events and streams."""
        self.waits_for_arrivals = 0
        """How often a stream waited for the legacy default stream, on which Mooncake copies arriving data."""
        self._waits_allowed = True
        self._pinned: dict[int, torch.UntypedStorage] = {}
        """By address. References are kept, so that addresses are not reused."""
        self._under_way: list[_Copy] = []
        self._recording: CapturedGraph | None = None
        self._legacy = _Stream()
        """The legacy default stream: the current one of a new thread."""
        self._threads = threading.local()
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> "PretendGpu":
        self._patch()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.undo()
        if error[0] is None:
            self.settle()

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        """Forbid waits of the host for the device."""
        self._waits_allowed = False
        try:
            yield
        finally:
            self._waits_allowed = True

    def pin(self, memory: torch.Tensor) -> torch.Tensor:
        """Make host memory accessible to the GPU."""
        storage = memory.untyped_storage()
        self._pinned[storage.data_ptr()] = storage
        return memory

    def launch(self, kernel: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run the reference of a kernel, on GPU or pinned tensors. A graph captures it as one operation."""
        self._enqueue("a kernel")
        pinned: list[torch.Tensor] = []

        def reachable(argument: Any) -> Any:
            """The argument with its tensors as plain ones, for a kernel's reference."""
            if dataclasses.is_dataclass(argument) and not isinstance(argument, type):
                parts = {field.name: getattr(argument, field.name) for field in dataclasses.fields(argument)}
                return dataclasses.replace(argument, **{name: reachable(part) for name, part in parts.items()})
            if isinstance(argument, torch.Tensor) and not isinstance(argument, GpuTensor):
                if not self._is_pinned(argument):
                    raise ValueError(
                        f"a kernel is given {argument.dtype} {list(argument.shape)} of the CPU, not pinned"
                    )
                pinned.append(argument)
            return _plain(argument)

        def run() -> None:
            self._finish([copy for copy in self._under_way if copy.reads(pinned)])  # enqueued earlier, so complete
            kernel(*plain_args, **plain_kwargs)

        plain_args, plain_kwargs = tree_map(reachable, (args, kwargs))
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            run()
        if self._recording is not None:
            self._recording.operations.append(run)

    def settle(self, copies: "Sequence[_Copy] | None" = None) -> None:
        """Finish these copies, or all."""
        self._finish(self.under_way if copies is None else copies)

    @property
    def under_way(self) -> "Sequence[_Copy]":
        """Copies that have not been waited for."""
        return tuple(self._under_way)

    def _finish(self, copies: "Sequence[_Copy]") -> None:
        for copy in copies:
            if copy in self._under_way:
                self._under_way.remove(copy)
                copy.finish()

    # -- operations --------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return self._call(func, _name(func), args, kwargs)

    def _call(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        first: Any = args[0] if args else None
        on_gpu = isinstance(first, GpuTensor)
        if name in ("device", "is_cuda", "is_cpu") and len(args) == 1 and isinstance(first, torch.Tensor):
            return {"device": DEVICE if on_gpu else CPU, "is_cuda": on_gpu, "is_cpu": not on_gpu}[name]
        if name == "pin_memory":
            assert not on_gpu, "only memory of the host can be pinned"
            return self.pin(first.clone())
        if name == "is_pinned":
            return not on_gpu and self._is_pinned(first)
        if name in ("numpy", "__array__") and on_gpu:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if name == "cuda":
            return self._moved(first, DEVICE, non_blocking=False)
        if name == "cpu":
            return self._moved(first, CPU, non_blocking=False)
        if name == "to":
            return self._to(func, args, kwargs)
        if name == "copy_":
            return self._copy(*args, **kwargs)
        if name in ("__getitem__", "__setitem__"):
            self._check_index(name, *args)
        return self._compute(func, name, args, kwargs)

    def _compute(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_gpu = any(isinstance(tensor, GpuTensor) for tensor in tensors)
        where = kwargs.get("device")
        if where is not None:
            on_gpu = torch.device(where).type == "cuda"
            kwargs["device"] = CPU
        elif on_gpu and any(not isinstance(tensor, GpuTensor) and tensor.ndim for tensor in tensors):
            raise RuntimeError(f"{name}: all tensors must be on one device, there are some of cuda:0 and cpu")
        pinned = kwargs.pop("pin_memory", False)
        if on_gpu and (name in _WAITING or name in _FROM_HOST):
            self._wait(name)
        result = func(*args, **kwargs)
        if on_gpu and _computes(name, tensors, result):
            self._enqueue(name)
        if pinned:
            self.pin(result)
        return tree_map(_gpu if on_gpu else _plain, result) if name != "__setitem__" else result

    def _to(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """`Tensor.to` with a device, a dtype, or both."""
        tensor, *rest = args
        device = kwargs.pop("device", None)
        non_blocking = kwargs.pop("non_blocking", False)
        if rest and isinstance(rest[0], torch.device | str):
            device, *rest = rest
        if rest and isinstance(rest[0], torch.Tensor):
            raise NotImplementedError("to(another tensor)")
        if rest or kwargs:
            tensor = self._compute(func, "to", (tensor, *rest), kwargs)
        return tensor if device is None else self._moved(tensor, torch.device(device), non_blocking=non_blocking)

    def _moved(self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        if (device.type == "cuda") == isinstance(tensor, GpuTensor):
            return tensor
        target = torch.empty_like(_plain(tensor))
        return self._copy(_gpu(target) if device.type == "cuda" else target, tensor, non_blocking)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        to_gpu, from_gpu = isinstance(target, GpuTensor), isinstance(source, GpuTensor)
        if to_gpu or from_gpu:
            self._enqueue("copy_")
        if to_gpu == from_gpu:
            torch.Tensor.copy_(target, source)
            return target
        host = source if to_gpu else target
        if not (non_blocking and self._is_pinned(host)):
            self._wait("copy_")
            torch.Tensor.copy_(target, source)
            return target
        assert self._recording is None, "a graph would repeat the copy from or to this very memory of the host"
        torch.Tensor.copy_(target, source)
        self._under_way.append(_Copy.to_device(source) if to_gpu else _Copy.to_host(target))
        return target

    def _check_index(self, name: str, tensor: torch.Tensor, index: Any, value: Any = None) -> None:
        if not isinstance(tensor, GpuTensor):
            return
        parts = index if isinstance(index, tuple) else (index,)
        tensors = [part for part in parts if isinstance(part, torch.Tensor | list)]
        if any(not isinstance(part, GpuTensor) or part.dtype in (torch.bool, torch.uint8) for part in tensors):
            self._wait(f"{name} by a mask, or by an index that the host has")
        if name == "__setitem__" and (tensors or isinstance(value, torch.Tensor)) and not isinstance(value, GpuTensor):
            self._wait("__setitem__ of what the host has")

    def _wait(self, name: str) -> None:
        if not self._waits_allowed or self._recording is not None:
            raise AssertionError(f"{name} waits for the device, where nothing may")
        self.waits.append(name)
        self.settle()

    @property
    def _stream(self) -> "_Stream":
        """The current stream of this thread."""
        stream: _Stream = getattr(self._threads, "stream", self._legacy)
        return stream

    def _enqueue(self, name: str) -> None:
        """Check the stream that work for the device is enqueued on."""
        if self._stream is self._legacy:
            raise AssertionError(f"{name} on the legacy default stream, which transfers between GPUs wait for")

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return _plain(tensor).untyped_storage().data_ptr() in self._pinned

    # -- torch.cuda --------------------------------------------------------------------------------------------

    def _patch(self) -> None:
        from triton.runtime.interpreter import GridExecutor

        event, stream = type("Event", (_Event,), {"gpu": self}), type("Stream", (_Stream,), {"gpu": self})
        interpret = GridExecutor.__call__
        self._legacy = stream()
        for name, value in {
            "Event": event,
            "Stream": stream,
            "CUDAGraph": functools.partial(CapturedGraph, self),
            "graph": self._capture,
            "graph_pool_handle": lambda: None,
            "current_stream": lambda *_: self._stream,
            "default_stream": lambda *_: self._legacy,
            "set_stream": lambda stream: setattr(self._threads, "stream", stream),
            "stream": self._on_stream,
            "synchronize": lambda *_: self.settle(),
            "get_device_properties": lambda *_: _AMPERE,
            "get_device_capability": lambda *_: (8, 0),
            "set_device": lambda _: None,
            "mem_get_info": lambda *_: (_MEMORY_BYTES, _MEMORY_BYTES),
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda *_: None,
            "max_memory_reserved": lambda *_: 0,
            "memory_reserved": lambda *_: 0,
            "MemPool": lambda: None,
            "use_mem_pool": lambda *_: contextlib.nullcontext(),
        }.items():
            self._patches.setattr(torch.cuda, name, value)
        self._patches.setattr(GridExecutor, "__call__", lambda *args, **kwargs: self.launch(interpret, *args, **kwargs))
        self._patch_cuda_kernels()

    @contextlib.contextmanager
    def _on_stream(self, stream: "_Stream") -> Iterator[None]:
        before = self._stream
        self._threads.stream = stream
        try:
            yield
        finally:
            self._threads.stream = before

    @contextlib.contextmanager
    def _capture(self, graph: "CapturedGraph", **_options: Any) -> Iterator[None]:
        """On a separate stream, like torch."""
        assert self._recording is None, "one graph at a time"
        self._recording = graph
        try:
            with self._on_stream(_Stream()), graph:
                yield
        finally:
            self._recording = None

    def _patch_cuda_kernels(self) -> None:
        """Run launchers up to the launch itself, and then the references of their kernels."""
        from pdserve.kernels.dsa import index_topk_triton

        def plan_and_copy(*args: Any) -> None:
            *planned, host, hot = args
            swap_in.plan_reference(*planned)
            swap_in.copy_misses_reference(planned[0], host, hot)

        def select(
            scores: torch.Tensor,
            visible: torch.Tensor,
            out: torch.Tensor,
            rows_of: index_plan.IndexPlan | None = None,
        ) -> None:
            positions = index_plan.select_top_reference(scores, visible, out.shape[1])
            out.copy_(positions if rows_of is None else rows_of.flat_rows(positions))

        def multiply(
            x: torch.Tensor,
            weight: torch.Tensor | Fp8Matrix,
            bias: torch.Tensor | None,
            out: torch.Tensor,
            *,
            gated: bool,
        ) -> None:
            if isinstance(weight, Fp8Matrix):
                scaled = fp8_linear.fp8_gated_linear if gated else fp8_linear.fp8_linear
                out.copy_(scaled(x, weight, bias, impl="reference"))
            else:
                plain = linear.gated_linear if gated else linear.linear
                out.copy_(plain(x, weight, bias, impl="reference"))

        def mix(x: torch.Tensor, *args: Any, first: int, shared: Callable[[], torch.Tensor] | None) -> None:
            *inputs, out = args
            mixed = experts.experts_reference(x, *inputs, first=first, exact=True)
            out.copy_(mixed if shared is None else mixed + shared())

        def select_and_route(
            logits: torch.Tensor,
            bias: torch.Tensor | None,
            weights: torch.Tensor,
            chosen: torch.Tensor,
            tiles: RowTiles,
            rule: SelectionRule,
            *,
            first: int,
        ) -> None:
            for out, found in zip((weights, chosen), select_experts_reference(logits, bias, rule), strict=True):
                out.copy_(found)
            found_tiles = routing.route_reference(chosen, first, len(tiles.ends), tiles.rows)
            for field in ("order", "place", "ends", "expert", "first", "counts"):
                getattr(tiles, field).copy_(getattr(found_tiles, field))

        def norm_and_route(
            x: torch.Tensor,
            y: torch.Tensor,
            norm: torch.Tensor,
            eps: float,
            router: torch.Tensor,
            bias: torch.Tensor | None,
            rule: SelectionRule,
            *outs: torch.Tensor,
        ) -> None:
            total, normed = add_rms_norm_reference(x, y, norm, eps)
            selected = select_experts_reference(linear.linear(normed, router, bias, impl="reference"), None, rule)
            for out, found in zip(outs, (total, normed, *selected), strict=True):
                out.copy_(found)

        for module in (
            few_rows_cuda,
            gemv_cuda,
            index_topk_triton,
            norm_route_cuda,
            select_route_cuda,
            swap_in_cuda,
            write_back,
            keep_top_p,
        ):
            self._patches.setattr(module, "load_kernel", cuda_sources.load_kernel)
        for module in (swap_in_cuda, write_back):
            self._patches.setattr(module, "device_address", torch.Tensor.data_ptr)
        for place, name, reference in (
            (swap_in_cuda, "launch_swap_in", plan_and_copy),
            (swap_in_cuda, "launch_copy_misses", swap_in.copy_misses_reference),
            (index_topk_triton, "launch_select_top", select),
            (hot_rows, "write_back", write_back.write_back_reference),
            (keep_top_p, "launch_keep_top_p", keep_top_p.keep_top_p_reference),
            (linear, "_launch_cuda", multiply),
            (fp8_linear, "_launch_cuda", multiply),
            (experts, "launch_token_experts", mix),
            (routing, "launch_select_route", select_and_route),
            (norm_route_cuda, "launch_norm_route", norm_and_route),
        ):
            self._patches.setattr(place, name, self._with_reference(getattr(place, name), reference))

    def _with_reference(self, launcher: Callable[..., None], reference: Callable[..., None]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            launcher(*args, **options)
            self.launch(reference, *args, **options)

        return launch


class CapturedGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """The operations of a captured graph."""

    def __init__(self, gpu: PretendGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Callable[[], None]] = []
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.operations.append(functools.partial(_repeat, func, args, kwargs, result))
        return result

    def replay(self) -> None:
        assert self.operations, "nothing was captured"
        self._gpu._enqueue("a graph")
        with torch.inference_mode(), torch._C.DisableTorchFunction():
            for operation in self.operations:
                operation()


class _Event:
    """The copies that were in flight when it was recorded."""

    gpu: PretendGpu

    def __init__(self, **_options: Any) -> None:
        self._copies: Sequence[_Copy] = ()

    def record(self, _stream: "_Stream | None" = None) -> None:
        self._copies = self.gpu.under_way

    def synchronize(self) -> None:
        self.gpu.settle(self._copies)

    def query(self) -> bool:
        self.synchronize()
        return True


class _Stream:
    """Work on any stream runs at once."""

    gpu: PretendGpu
    cuda_stream = 0

    def __init__(self, *_device: torch.device) -> None: ...

    def synchronize(self) -> None:
        self.gpu.settle()

    def wait_stream(self, stream: "_Stream") -> None:
        gpu = getattr(stream, "gpu", None)
        if gpu is not None and stream is gpu._legacy:
            gpu.waits_for_arrivals += 1

    def wait_event(self, _event: _Event) -> None: ...

    def record_event(self) -> _Event:
        event: _Event = torch.cuda.Event()  # type: ignore[no-untyped-call, assignment]  # patched
        event.record()
        return event


class _Copy:
    """A copy between host and device that has not been waited for."""

    def __init__(self, memory: torch.Tensor, content: torch.Tensor, *, arrives: bool) -> None:
        self._memory, self._content, self._arrives = memory, content, arrives

    @classmethod
    def to_device(cls, source: torch.Tensor) -> "_Copy":
        return cls(source, _bytes(source).clone(), arrives=False)

    @classmethod
    def to_host(cls, target: torch.Tensor) -> "_Copy":
        content = _bytes(target).clone()
        _bytes(target).fill_(0xFF)
        return cls(target, content, arrives=True)

    def reads(self, memory: Iterable[torch.Tensor]) -> bool:
        """Whether it reads the storage of one of these tensors."""
        address = self._memory.untyped_storage().data_ptr()
        return not self._arrives and any(part.untyped_storage().data_ptr() == address for part in memory)

    def finish(self) -> None:
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            if self._arrives:
                _bytes(self._memory).copy_(self._content)
            elif not _bytes(self._memory).equal(self._content):
                raise AssertionError("memory of the host was changed before a copy to the device had read it")


def _repeat(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
    """Repeat an operation, with its result in the same memory."""
    again = func(*args, **kwargs)
    for old, new in zip(tree_iter(result), tree_iter(again), strict=True):
        if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
            old.copy_(new)


def _computes(name: str, arguments: Sequence[torch.Tensor], result: Any) -> bool:
    """Whether this launches a kernel: it writes in place, or its result is more than a view or an allocation."""
    if name.startswith(("empty", "new_empty")):
        return False
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return True
    known = {argument.untyped_storage().data_ptr() for argument in arguments}
    made = [leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor)]
    return any(tensor.untyped_storage().data_ptr() not in known for tensor in made)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.is_contiguous(), "an asynchronous copy must be contiguous"
    plain: torch.Tensor = _plain(tensor)
    return plain.view(-1).view(torch.uint8)


def _gpu(value: Any) -> Any:
    return value.as_subclass(GpuTensor) if isinstance(value, torch.Tensor) else value


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, GpuTensor) else value


def _name(func: Any) -> str:
    """Name of a function, a method or the attribute of a property."""
    name: str = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name == "__get__" else name
