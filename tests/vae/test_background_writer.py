"""Frames for a writer thread: order, queue length, errors, and no leaked threads or memory."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from fast_video_vae.tests.builders import script_command
from fast_video_vae.vae.media import BackgroundWriter

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


def piece(value):
    return torch.full((2, 8, 6, 3), value, dtype=torch.uint8)


def put_all(write, pieces, **options):
    with BackgroundWriter(write, **options) as writer:
        for each in pieces:
            writer.put(each)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not any("fast-video-vae-writer" in each.name for each in threading.enumerate())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [1, 3])
def test_pieces_arrive_in_order_on_the_cpu(device, depth):
    got, places, memory = [], [], []

    def write(frames):
        got.append(frames.clone())
        places.append(frames.data_ptr())
        memory.append(weakref.ref(frames.untyped_storage()))

    sizes = [4, *(1 + value % 4 for value in range(30))]
    planar = [torch.randint(256, (3, n, 8, 6), dtype=torch.uint8, device=device) for n in sizes]
    pieces = [x.permute(1, 2, 3, 0) for x in planar]  # channels first in memory
    with BackgroundWriter(write, depth=depth) as writer:
        for number, each in enumerate(pieces):
            with torch.inference_mode(number % 2 == 1):
                writer.put(each)
    assert all(x.device.type == "cpu" for x in got)
    assert all(torch.equal(x, y.cpu()) for x, y in zip(got, pieces, strict=True))
    assert len(set(places[-20:])) <= depth  # buffers that have grown are reused
    gc.collect()
    assert not any(each() is not None for each in memory)


@pytest.mark.parametrize("device", DEVICES)
def test_a_queued_piece_can_be_overwritten_at_once(device):
    got = []

    def slow(frames):
        time.sleep(0.005)
        got.append(frames.clone())

    static = torch.empty(4, 64, 64, 3, dtype=torch.uint8, device=device)
    with BackgroundWriter(slow) as writer:
        for value in range(30):
            static.fill_(value)  # as a CUDA graph or a ring buffer does
            writer.put(static)
        static.fill_(99)
    assert [x.unique().tolist() for x in got] == [[value] for value in range(30)]


def test_at_most_depth_pieces_are_queued():
    """While the thread writes one, the caller goes on."""
    gate, started = threading.Event(), []

    def write(frames):
        started.append(int(frames[0, 0, 0, 0]))
        gate.wait(10)

    with BackgroundWriter(write, depth=2) as writer:
        writer.put(piece(0))
        writer.put(piece(1))
        third = threading.Thread(target=lambda: writer.put(piece(2)))
        third.start()
        third.join(0.2)
        assert third.is_alive()  # it waits until one of the two is written
        assert started == [0]
        gate.set()
        third.join(10)
        assert not third.is_alive()
    assert started == [0, 1, 2]


@pytest.mark.parametrize(
    ("error", "pieces"), [(OSError(28, "No space left", "a.mp4"), 1000), (SystemExit(3), 1)]
)
def test_an_error_of_the_thread_is_raised_by_the_next_put_or_at_the_end(error, pieces):
    calls = []

    def write(frames):
        calls.append(None)
        raise error

    with pytest.raises(type(error)) as caught:
        put_all(write, (piece(value % 256) for value in range(pieces)))
    assert caught.value is error
    assert len(calls) == 1  # after an error nothing is written


def test_an_error_in_the_block_stops_the_thread_within_one_piece():
    """It comes before that of the thread."""
    error = KeyboardInterrupt()
    written, begun = [], threading.Event()

    def write(frames):
        begun.set()
        time.sleep(0.1)
        written.append(None)
        raise OSError("thread")

    def raising():
        yield from map(piece, range(8))
        begun.wait(10)
        raise error

    with pytest.raises(type(error)):
        put_all(write, raising(), depth=8)
    assert len(written) == 1


def test_wrong_use_is_an_error():
    with pytest.raises(ValueError, match="depth is 0"):
        BackgroundWriter(print, 0)
    with pytest.raises(RuntimeError, match="within `with`"):
        BackgroundWriter(print).put(piece(0))
    with pytest.raises(ValueError, match=r"float32; expected torch\.uint8"):
        put_all(print, [torch.zeros(1, 8, 6, 3)])


def test_the_garbage_collector_can_close_a_writer_in_its_thread():
    begun, held, got = threading.Event(), [], []

    def write(frames):
        begun.wait(10)
        held.clear()  # closes the stream
        got.append(frames.clone())

    def pieces():
        with BackgroundWriter(write, depth=3) as writer:
            for value in range(3):
                writer.put(piece(value))
            yield

    held.append(pieces())
    next(held[0])
    (thread,) = [each for each in threading.enumerate() if "fast-video-vae-writer" in each.name]
    begun.set()
    thread.join(10)
    assert not thread.is_alive()
    assert len(got) == 1


SCRIPT = """
import os, signal, threading, time, torch
from fast_video_vae.vae.media import BackgroundWriter
frames = torch.zeros(1, 1, 1, 3, dtype=torch.uint8)
def pieces(write, count, act=lambda: None):
    with BackgroundWriter(write, depth=20) as writer:
        for value in range(count):
            if value == min(count, 100) - 1:
                act()
            writer.put(frames)
            yield
"""
DROPPED_BY_A_THREAD = """
def drop():
    global stream
    stream = pieces(print, 1000)
    next(stream)
threading.Thread(target=drop).start()
raise OSError
"""
INTERRUPTED = """
def interrupt():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
signal.signal(signal.SIGINT, signal.default_int_handler)
for count in (10**6, 20):  # in `put`, and at the end of the block
    try:
        list(pieces(lambda _: time.sleep(0.05), count, interrupt))
    except KeyboardInterrupt:
        names = "".join(thread.name for thread in threading.enumerate())
        print("interrupted", names.count("fast-video-vae-writer"))
raise OSError
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (DROPPED_BY_A_THREAD, ["tensor([[[[0,", "0,", "0]]]],", "dtype=torch.uint8)"]),
        (INTERRUPTED, ["interrupted", "0"] * 2),
    ],
)
def test_python_ends_with_a_writer_that_was_dropped_or_interrupted(code, expected):
    command = script_command(SCRIPT + code)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == expected, done.stderr
    assert done.returncode == 1
