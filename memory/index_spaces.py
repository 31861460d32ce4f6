"""Types of the numbers that index memory. All are small integers; mypy keeps them apart.

    KvPage        a page of a sequence. All pools of a cache share page ids: with HiSparse, page p is latent rows in
                  host memory and their indexer keys on the device
    HotPage       a page of the hot pool, on the device (HiSparse): the id that all ranks agree on
    LocalHotPage  where one rank has a HotPage in its hot pool: the same number if the overlay is the same on all ranks
    RequestSlot   the number of a running request, which indexes its hot pages and tables (HiSparse)

Only allocators create them: pages come from `PageAllocator` (memory/pages.py), slots from `HotBuffers`
(scheduler/decode/memory/hot_buffers.py). `PoolOverlay` (memory/hisparse/shared_pool.py) maps free KvPages to the
HotPages that they are lent as, and HotPages to LocalHotPages. Rows (page * page_size + offset) exist only in tensors:
`KvRows` and `HotRows` of kernels/hisparse/slot_tables.py.
"""

from typing import NewType

KvPage = NewType("KvPage", int)
HotPage = NewType("HotPage", int)
LocalHotPage = NewType("LocalHotPage", int)
RequestSlot = NewType("RequestSlot", int)
