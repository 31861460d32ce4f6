"""The numbers that memory is counted with. All are small integers, with types of their own: mypy tells them apart.

    KvPage        a page of a sequence. All pools of a cache share page ids: with HiSparse, page p is latent rows in
                  host memory, and their indexer keys on the device
    HotPage       a page of the hot pool, on the device (HiSparse)
    HotPlace      where one rank has a HotPage in its hot pool: the same number, where all ranks have the same lots
    RequestSlot   the number under which a running request has its hot pages and tables (HiSparse)

They come from their allocators and from nowhere else: pages from `PageAllocator` (memory/pages.py), slots from
`HotBuffers` (scheduler/decode/memory/hot_buffers.py). Free KvPages are HotPages for a while by way of `PoolOverlay`
(memory/hisparse/shared_pool.py), which also knows the places of HotPages. Rows, page * page_size + offset, are only
ever in tensors: `KvRows` and `HotRows` of kernels/hisparse/slot_tables.py.
"""

from typing import NewType

KvPage = NewType("KvPage", int)
HotPage = NewType("HotPage", int)
HotPlace = NewType("HotPlace", int)
RequestSlot = NewType("RequestSlot", int)
