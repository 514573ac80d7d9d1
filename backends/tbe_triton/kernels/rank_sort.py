"""The sort of few lookups in one launch: each counts how many come before it, and moves there."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["lookups"])
def tbe_rank_sort_kernel(
    keys_ptr,
    values_ptr,
    sorted_keys_ptr,
    sorted_values_ptr,
    lookups,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: blocks of BLOCK lookups. Stable: of equal keys those that stand before come before. Work grows with
    the square of the lookups, which is nothing for a GPU up to some ten thousand."""
    pid = tl.program_id(0)
    mine = pid * BLOCK + tl.arange(0, BLOCK)
    tile = tl.arange(0, TILE)
    mask = mine < lookups
    key = tl.load(keys_ptr + mine, mask=mask, other=0)
    value = tl.load(values_ptr + mine, mask=mask, other=0)
    before = tl.zeros([BLOCK, TILE], tl.int32)
    own = pid * BLOCK // TILE * TILE
    for first in range(0, own, TILE):
        theirs = tl.load(keys_ptr + first + tile)
        before += (theirs[None, :] <= key[:, None]).to(tl.int32)
    at = own + tile
    theirs = tl.load(keys_ptr + at, mask=at < lookups, other=0)
    equal = (theirs[None, :] == key[:, None]) & (at[None, :] < mine[:, None])
    before += (((theirs[None, :] < key[:, None]) | equal) & (at < lookups)[None, :]).to(tl.int32)
    for first in range(own + TILE, lookups, TILE):
        at = first + tile
        theirs = tl.load(keys_ptr + at, mask=at < lookups, other=0)
        before += ((theirs[None, :] < key[:, None]) & (at < lookups)[None, :]).to(tl.int32)
    place = tl.sum(before, axis=1)
    tl.store(sorted_keys_ptr + place, key, mask=mask)
    tl.store(sorted_values_ptr + place, value, mask=mask)
