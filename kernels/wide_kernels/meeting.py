"""Programs of one launch that wait for each other, instead of a second launch.

A counter is one int32. Each program adds 1, the first one as much as is missing to 2^31: when all have come, the top
bit has changed and the others are zero again, so a counter is never cleared and may serve any number of programs. A
GPU starts programs in the order of their numbers; those that wait for each other have adjacent numbers and are few
enough to be all resident (the launcher sees to that), so the group started first always gets on.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def meet(counter, program, programs):
    """Wait until all `programs` that share `counter` are here; what they stored before can be read after.

    Read it with cache_modifier=".cg": the first-level cache is not shared.
    """
    tl.debug_barrier()
    amount = tl.where(program == 0, 0x7FFFFFFF - (programs - 2), 1)
    before = tl.atomic_add(counter, amount, sem="acq_rel", scope="gpu")
    while (before ^ tl.atomic_add(counter, 0, sem="acq_rel", scope="gpu")) >= 0:
        pass
    tl.debug_barrier()
