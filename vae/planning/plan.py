"""The plan of a stream: the length of its steps, its tiles, and the place of its caches.

Whole frames come first, because tiles compute their halos twice. Otherwise the plan with the fewest
products wins, including the cost of copies: the caches of tiles can wait on the host. All caches
are copied once per chunk (8 GB for 720 x 1280 and Wan 2.1), so chunks are longer then.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..layers.conv_weights import packs_for
from ..models.base import Network
from ..models.config import VAEConfig
from ..models.receptive_field import Size, Span, is_encoder
from .cost import StreamCost, tiled_cost, whole_cost
from .device_memory import free_bytes
from .dry_run import Setting
from .layer_specs import NetworkSpec, network_spec
from .tiling import Chains, FrameTile, Tiles, can_cut, divided, grid, make_tile

# On a CPU an activation of this size stays in the last-level cache, and in memory that malloc
# reuses: glibc maps every block over 32 MB from the system, which takes about as long as the
# convolution that fills it.
_CPU_PART_BYTES = 24 << 20

# On a GPU: large enough to fill it, small enough to leave memory for other uses.
_DEVICE_PART_BYTES = 1 << 30

# Smallest part, for when memory is short; a larger single frame is not divided.
_SMALLEST_PART_BYTES = 1 << 20

# More latents per step gained nothing measurable, and delay the first frames.
_MOST_LATENTS = 4

# Latents per step with caches on the host: longer steps copy less.
_PARKED_LATENTS = (4, 8, 16, 32)

# Products in the time of copying a byte over PCIe: 100 T/s against 20 GB/s, as on a current card.
_PRODUCTS_PER_BYTE = 2500

# Numbers of rows and columns of tiles to try.
_GRIDS = ((2, 1), (3, 1), (4, 1), (6, 1), (4, 2), (8, 1), (6, 2), (8, 2), (8, 4), (12, 6), (16, 9))
_SMALLEST_TILE = 32


@dataclass(frozen=True)
class Plan:
    """The plan of one stream.

    Attributes:
        chunk: Latents per step; -1: all.
        part_bytes: Size of an activation above which its frames are divided into parts.
        peak_bytes: Estimated memory without weights, input and output.
        tiles: The tiles; None: whole frames.
        parked: The tails of a tile are on the host while it does not run.
        pixels: Pixels of an image per pixel of the network's frames.
    """

    chunk: int
    part_bytes: int
    peak_bytes: int
    tiles: Tiles | None = None
    parked: bool = False
    pixels: int = 1

    @property
    def step(self) -> str:
        """The length of a step, in words."""
        return "all latents" if self.chunk == -1 else f"{self.chunk} latent{'s'[: self.chunk > 1]}"

    @property
    def frames(self) -> str:
        """The size of the tiles in words, width before height."""
        if self.tiles is None:
            return "whole frames"
        height, width = (self.pixels * length for length in self.tiles.size)
        return f"tiles of {width}x{height}{', caches on the host' if self.parked else ''}"

    def __str__(self) -> str:
        return f"{self.step} a step, {self.frames}, about {self.peak_bytes / 2**20:.0f} MiB"


@dataclass(frozen=True)
class StreamJob:
    """The stream to plan.

    Attributes:
        network: The encoder or the decoder.
        latent_size: Batch, height and width of the latents.
        dtype: Dtype of the activations.
        device: Device of the activations.
        single_frame: The video has one frame.
        pixels: Pixels of an image per pixel of the network's frames.
    """

    network: Network
    latent_size: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    single_frame: bool = False
    pixels: int = 1

    @functools.cached_property
    def spec(self) -> NetworkSpec:
        """The numbers of the network."""
        return network_spec(self.network)

    @property
    def setting(self) -> Setting:
        """The conditions of the stream."""
        return Setting(
            self.latent_size[0],
            self.dtype.itemsize,
            self.single_frame,
            self.device.type == "cpu",
            packs_for(self.device, self.dtype),
            next(self.network.parameters()).dtype != self.dtype,
        )

    @property
    def start(self) -> Size:
        """Height and width of the input of the first layer."""
        height, width = self.latent_size[1:]
        return self.end if self.spec.encodes else (height, width)

    @property
    def end(self) -> Size:
        """Height and width of the frames, which tiles divide."""
        height, width = self.latent_size[1:]
        ups, downs = zip(*(layer.scale for layer in self.spec.layers), strict=True)
        scale = max(math.prod(ups), math.prod(downs))
        return height * scale, width * scale


def job_of(
    network: Network,
    config: VAEConfig,
    latent_size: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    single_frame: bool,
) -> StreamJob:
    """Return the job of a stream.

    Args:
        network: The encoder or the decoder.
        config: Configuration of the VAE.
        latent_size: Batch, height and width of the latents.
        dtype: Dtype of the activations.
        device: Device of the activations.
        single_frame: The video has one frame.

    Returns:
        The job.
    """
    pixels = config.patch_size
    if not is_encoder(network):
        pixels *= config.output_scale
    single_frame = single_frame or config.temporal_compression == 1
    return StreamJob(network, latent_size, dtype, device, single_frame, pixels)


def make_plan(
    job: StreamJob,
    limit_bytes: int | None = None,
    *,
    chunk: int | None = None,
    tile: Size | None = None,
    cuts: bool = True,
) -> Plan:
    """Choose the plan of a stream.

    Args:
        job: The stream.
        limit_bytes: Memory limit of the stream. None: half of the free memory for a step, and tiles
            only if whole frames need more than nine tenths of it.
        chunk: Latents per step, if given; -1: all, estimated as a few.
        tile: Height and width of a tile in pixels of the images, if given.
        cuts: Allow tiles.

    Returns:
        The fastest plan within the limit, or the smallest plan if none fits.
    """
    steps = most = limit_bytes
    if steps is None or most is None:
        free = free_bytes(job.device)
        steps, most = free // 2, free * 9 // 10
    if not cuts:
        tile = None
    candidates: list[_Candidate] = []
    for some in (_whole_candidates, _tiled_candidates) if cuts else (_whole_candidates,):
        for candidate in some(job, tile, chunk):
            candidates.append(candidate)
            if candidate.stream.kept_bytes <= most:
                plan = candidate.plan(steps)
                if plan.peak_bytes <= most:
                    return plan
    # The smallest plan of each, until the tails alone exceed the best plan.
    candidates.sort(key=lambda candidate: candidate.stream.kept_bytes)
    best = candidates[0].least
    for candidate in candidates[1:]:
        if candidate.stream.kept_bytes >= best.peak_bytes:
            break
        best = min(best, candidate.least, key=lambda plan: plan.peak_bytes)
    return best


def smaller_plan(job: StreamJob, plan: Plan) -> Plan | None:
    """Return the next smaller plan for `job` after `plan` ran out of memory, or None."""
    for share in (0.75, 0.5, 0.25, 0.0):
        other = make_plan(job, int(plan.peak_bytes * share))
        if other.peak_bytes < plan.peak_bytes:
            return other
    return None


def cut_tiles(job: StreamJob, tiles: Tiles) -> tuple[Chains, list[FrameTile], Size]:
    """Return the layers on whole frames, the tiles, and the size of whole frames before them.

    Args:
        job: The stream.
        tiles: How its frames are cut.

    Returns:
        Layers, tiles, and height and width.
    """
    first, rest = divided(job.network.chains(), tiles.cut)
    whole, tiled = (rest, first) if job.spec.encodes else (first, rest)
    size, places = _places(job, tiles)
    return whole, [make_tile(tiled, size, *each) for each in places], size


def _places(job: StreamJob, tiles: Tiles) -> tuple[Size, list[tuple[Span, Span]]]:
    """Return the size of the whole frames before the tiled layers, and the output of each tile."""
    shapes = job.spec.shapes(job.start, single_frame=True)
    if not job.spec.encodes:
        return shapes[tiles.cut][2:], grid(job.end, tiles.size)
    end = shapes[tiles.cut][2:]
    down = max(1, job.end[0] // end[0])
    return job.end, grid(end, (max(1, tiles.size[0] // down), max(1, tiles.size[1] // down)))


@dataclass(frozen=True)
class _Candidate:
    """Whole frames or certain tiles, with steps of any length.

    Attributes:
        stream: The layers and shapes.
        cost: Cost of a latent in products.
        lengths: Latents per step and size of a part, the longest steps first.
        chunk: Latents per step that the plan reports; None: as in `lengths`.
        pixels: As in `StreamJob`.
        tiles: As in `Plan`.
    """

    stream: StreamCost
    cost: float
    lengths: list[tuple[int, int]]
    chunk: int | None
    pixels: int
    tiles: Tiles | None = None

    def plan(self, limit_bytes: int) -> Plan:
        """Return the plan with the longest steps within a limit, or the smallest plan."""
        # Most of the many candidates with tiles do not fit.
        if self.tiles is None or self.least.peak_bytes <= limit_bytes:
            for length in self.lengths:
                plan = self._plan(*length)
                if plan.peak_bytes <= limit_bytes:
                    return plan
        return self.least

    @functools.cached_property
    def least(self) -> Plan:
        """The smallest plan; with tiles the one with the shortest steps."""
        lengths = self.lengths if self.tiles is None else self.lengths[-1:]
        return min((self._plan(*length) for length in lengths), key=lambda plan: plan.peak_bytes)

    def _plan(self, chunk: int, part_bytes: int) -> Plan:
        peak = self.stream.peak_bytes(chunk, part_bytes)
        return Plan(
            self.chunk or chunk, part_bytes, peak, self.tiles, self.stream.parked, self.pixels
        )


def _whole_candidates(job: StreamJob, tile: Size | None, chunk: int | None) -> list[_Candidate]:
    """Return whole frames as a candidate, unless tiles are required."""
    if tile is not None and _tile_sizes(job, tile) and can_cut(job.network):
        return []
    stream = whole_cost(job.spec, job.setting, job.start)
    return [_Candidate(stream, stream.work, _lengths(job, stream, chunk), chunk, job.pixels)]


def _tiled_candidates(job: StreamJob, tile: Size | None, chunk: int | None) -> list[_Candidate]:
    """Return candidates with tiles, cheapest first."""
    sizes = _tile_sizes(job, tile)
    tiles = [Tiles(cut, size) for cut in can_cut(job.network) for size in sizes]
    candidates = [candidate for each in tiles for candidate in _candidates_in(job, each, chunk)]
    return sorted(candidates, key=lambda candidate: candidate.cost)


def _tile_sizes(job: StreamJob, tile: Size | None) -> list[Size]:
    """Return the possible sizes of tiles in pixels of the tiled end, or the given one.

    Empty if the given tile is as large as the frames.
    """
    height, width = job.end
    if tile is not None:
        rows, columns = (max(1, length // job.pixels) for length in tile)
        size = min(height, rows), min(width, columns)
        return [] if size == job.end else [size]
    sizes = [(-(-height // rows), -(-width // columns)) for rows, columns in _GRIDS]
    return [size for size in dict.fromkeys(sizes) if min(size) * job.pixels >= _SMALLEST_TILE]


def _candidates_in(job: StreamJob, tiles: Tiles, chunk: int | None) -> Iterator[_Candidate]:
    """Yield the candidates for these tiles: tails on the device, or on the host."""
    _, places = _places(job, tiles)
    rows, columns = (list(dict.fromkeys(axis)) for axis in zip(*places, strict=True))
    stream = tiled_cost(job.spec, job.setting, job.start, tiles.cut, (rows, columns))
    yield _Candidate(stream, stream.work, _lengths(job, stream, chunk), chunk, job.pixels, tiles)
    if job.device.type == "cpu" or job.single_frame:
        return
    stream = replace(stream, parked=True)
    for latents in _PARKED_LATENTS if chunk is None else (chunk,):
        cost = stream.work + stream.moved_bytes * _PRODUCTS_PER_BYTE / abs(latents)
        yield _Candidate(stream, cost, _lengths(job, stream, latents), chunk, job.pixels, tiles)


def _lengths(job: StreamJob, stream: StreamCost, chunk: int | None) -> list[tuple[int, int]]:
    """Return the possible steps, longest first: fewer latents, then smaller parts.

    Activations at the smallest size, and those that are joined, must not exceed a part.
    """
    part = _CPU_PART_BYTES if job.device.type == "cpu" else _DEVICE_PART_BYTES
    most = max(1, min(_MOST_LATENTS, part // max(1, stream.latent_bytes)))
    chunks = range(most, 0, -1)
    if job.single_frame:
        chunks = (1,)
    elif chunk is not None:
        chunks = (chunk if chunk > 0 else _MOST_LATENTS,)
    lengths = [(each, part) for each in chunks]
    while part > _SMALLEST_PART_BYTES:
        part //= 2
        lengths.append((chunks[-1], part))
    return lengths
