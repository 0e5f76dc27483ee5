"""Models of `csrc/cuda/hopper_conv.cu`: of its addresses, `convolve`, and its barriers, `faults`.

Sizes, offsets and descriptors come from a `HopperTile`, by name.
"""

import functools
import itertools
import operator
from types import SimpleNamespace

import numpy as np
import torch

# Of the source: rows of a matrix, channels of a product, rows and columns of a tile, bytes of the
# warps that write. And the bytes of shared memory that a program can have on sm_90.
ROWS, DEPTH, TILE, EXCHANGED = 64, 16, 16, 8 * 1024
MOST_SHARED = 227 << 10


def permuted(address, by, swizzle):
    """Permute parts of 16 bytes: `CU_TENSOR_MAP_SWIZZLE_64B` is 2, 128B is 3."""
    return (address ^ (by >> 7 & (1 << swizzle) - 1) << 4) // 2


@functools.lru_cache(maxsize=4096)
def slots_of(descriptor, rows, anchored):
    """Return where the numbers of a matrix are: permuted by address, or by the row of an atom."""
    start, distance = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 32))
    swizzle = 4 - (descriptor >> 62)
    assert not descriptor & 0x3FFFC000C000C000, "bits without a meaning here"
    row, column = np.arange(rows)[:, None], np.arange(DEPTH)
    inside = row % 8 * (16 << swizzle)
    address = start + row // 8 * distance + inside + 2 * column
    return permuted(address, inside if anchored else address, swizzle)


def box_of(array, first, sizes):
    """Return a box of an array, with zeros outside."""
    at = np.ix_(*(np.arange(f, f + n) for f, n in zip(first, sizes, strict=True)))
    inside = [(a >= 0) & (a < n) for a, n in zip(at, array.shape, strict=True)]
    near = tuple(a.clip(0, n - 1) for a, n in zip(at, array.shape, strict=True))
    return array[near] * functools.reduce(operator.and_, inside)


def convolve(tile, x, tail, weight, padding, *, anchored=False):
    """Return a convolution, NaN in all tiles of channels but the first and the last.

    `x` and `tail` are `[B, T, H, W, C]`, `weight` is `[C_out, C, T, H, W]`.
    """
    c = SimpleNamespace(**tile.constants)
    a_start, b_start = (int(text[:-3], 0) for text in (c.X_DESCRIPTOR, c.W_DESCRIPTOR))
    offsets = [int(each) for each in c.OFFSETS.split(",")]
    (rows, columns, slab), inputs, known = tile.box, x.shape[-1], tail.shape[1]
    weights = c.X_STAGES * c.X_BYTES
    parts = [weights, weights + c.W_STAGES * c.W_BYTES, c.EXCHANGE, c.EXCHANGE + EXCHANGED]
    parts += [c.BARRIERS, c.BARRIERS + 16 * (c.X_STAGES + c.W_STAGES), c.VECTORS]
    parts += [c.VECTORS + 4 * (1 + c.NORM) * len(weight), c.SHARED, MOST_SHARED]
    assert parts == sorted(parts), "parts of memory overlap"
    assert min(c.X_STAGES, c.W_STAGES) >= 2, "see `faults`"
    assert c.EXCHANGE % 16 == c.BARRIERS % 8 == c.VECTORS % 8 == 0
    memory, turns = np.full(c.SHARED // 2, np.nan), (itertools.count(), itertools.count())

    def load(start, end, array, first, sizes):
        box = box_of(array, first, sizes)
        address = np.arange(start, start + 2 * box.size, 2)
        assert start % 128 == 0
        assert address[-1] < end
        memory[permuted(address, address, tile.swizzle)] = box.ravel()
        return 2 * box.size

    def sums_of(video, top, left, frame, first):
        total = torch.zeros(4 * ROWS, c.WIDTH, dtype=torch.float64)
        boxes = itertools.product(range(c.FRAMES), range(0, inputs, c.SLAB), range(c.SHIFTS))
        for kt, channel, shift in boxes:
            at, a = frame + kt, next(turns[0]) % c.X_STAGES * c.X_BYTES
            source, moment = (tail, at) if at < known else (x, at - known)
            start = video, moment, top - padding[0], left - padding[1] + shift, channel
            loaded = load(a, a + c.X_BYTES, source, start, (1, 1, rows, columns, slab))
            assert loaded == c.X_EXPECTED
            value = itertools.count(
                (kt * c.FRAME_TAPS + shift) * inputs + channel, c.TAP_STEP * inputs
            )
            for step in range(c.BOX_TAPS // c.GROUP):
                b, loaded = weights + next(turns[1]) % c.W_STAGES * c.W_BYTES, 0
                for tap in range(c.GROUP):
                    place = b + tap * c.W_TAP, b + c.W_BYTES
                    loaded += load(*place, weight_rows, (first, next(value)), (tile.width, slab))
                assert loaded == c.W_EXPECTED
                total = total + multiply(a >> 4, b >> 4, step)
        total = total.reshape(2, 2, 8, 8, c.WIDTH)  # consumer, block, row, column
        return total.permute(1, 2, 0, 3, 4).reshape(TILE, TILE, c.WIDTH)

    def multiply(a, b, step):
        def matrix(starts, count):
            slots = [slots_of(each, count, anchored) for each in starts]
            return torch.from_numpy(memory[np.concatenate(slots, axis=1)])

        places = [*itertools.product(range(c.GROUP), range(c.SLAB // DEPTH))]
        moves = [a + side * c.X_SIDE + block * c.X_BLOCK for side in (0, 1) for block in (0, 1)]
        taps = [offsets[step * c.GROUP + tap] + k * c.K_STEP for tap, k in places]
        left = [matrix([a_start + move + tap for tap in taps], ROWS) for move in moves]
        right = [b_start + b + tap * (c.W_TAP >> 4) + k * c.K_STEP for tap, k in places]
        return torch.cat(left) @ matrix(right, c.WIDTH).T

    grown = np.add([x.shape[1] + known, *x.shape[2:4]], [0, *np.multiply(2, padding)])
    frames, height, width = 1 + grown - weight.shape[2:]
    result = np.full((len(x), frames, height, width, len(weight)), np.nan)
    channels = [n * c.WIDTH for n in {0, len(weight) // tile.width - 1}]
    weight_rows = weight.transpose(0, 2, 3, 4, 1).reshape(len(weight), -1)
    starts = range(0, height, TILE), range(0, width, TILE), range(frames), channels
    for video, top, left, frame, first in itertools.product(range(len(x)), *starts):
        sums = sums_of(video, top, left, frame, first)
        part = result[video, frame, top : top + TILE, left : left + TILE, first : first + c.WIDTH]
        part[:] = sums[: part.shape[0], : part.shape[1]].numpy()
    return result


def programs(stages, boxes, steps, broken):
    """Return the instructions of the producer and of a consumer: kind, stage and value."""
    producer, consumer, group = [], [], []
    for x in range(3 * boxes):  # of three tiles
        uses = [(0, x), *((1, x * steps + step) for step in range(steps))]
        uses = [(r * stages[0] + n % stages[r], n // stages[r] % 2, n + 1) for r, n in uses]
        for stage, phase, number in uses:
            producer += [("empty", stage, phase ^ (broken != "parity")), ("load", stage, number)]
        consumer.append(("full", *uses[0][:2]))
        for use in uses[1:]:
            last, group = group, [use, uses[0]]
            freed = group if broken == "early" else last
            consumer += [("full", *use[:2]), ("read", 0, last + group)]
            consumer += [("free", stage, 0) for stage, *_ in freed[: 1 + (use is uses[1])]]
        if x % boxes == boxes - 1:
            freed = [] if broken in ("early", "end") else group
            consumer += [("read", 0, group), *(("free", stage, 0) for stage, *_ in freed)]
            group = []
    return [[each for each in program if each[:2] != broken] for program in (producer, consumer)]


def faults(stages, boxes, steps, broken=""):
    """Return which of "race" and "deadlock" all interleavings of a producer and two consumers meet.

    A tile has `boxes` of pixels, and `steps` of weights for each. `broken` is the rule that is not
    kept: "parity" of the producer, "early" release, "end" of a tile without one, "count" of
    arrivals, or a kind of instruction and the stage without it.
    """
    producer, consumer = programs(stages, boxes, steps, broken)
    threads, count, arrivals = (producer, consumer, consumer), sum(stages), 2 - (broken == "count")
    # Per thread the next instruction; per stage the parities of both barriers, the arrivals that
    # the second one lacks, and the number of the box, negative until it has landed.
    first = (0,) * 3, (0,) * count, (0,) * count, (arrivals,) * count, (0,) * count
    found, seen, left = set(), {first}, [first]
    while left:
        state, after, race = left.pop(), [], False
        for thread, program in enumerate(threads):
            at, full, empty, lacks, holds = new = [[*part] for part in state]
            kind, stage, value = program[at[thread]] if at[thread] < len(program) else ("", 0, 0)
            at[thread] += 1
            if kind == "load":
                holds[stage] = -value
            elif kind == "free":
                lacks[stage] = lacks[stage] - 1 or arrivals
                empty[stage] ^= lacks[stage] == arrivals
            elif kind == "read":
                race |= any(holds[used] != number for used, _, number in value)
            elif not kind or (full if kind == "full" else empty)[stage] == value:
                continue
            after.append(new)
        for stage in range(count):
            if state[4][stage] < 0:
                _, full, _, _, holds = new = [[*part] for part in state]
                full[stage], holds[stage] = full[stage] ^ 1, -holds[stage]
                after.append(new)
        if race:
            found.add("race")
        elif after:
            fresh = {tuple(map(tuple, each)) for each in after} - seen
            seen |= fresh
            left += fresh
        elif state[0] != tuple(map(len, threads)):
            found.add("deadlock")
    return found
