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
    assert "fast-video-vae-writer" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("device", DEVICES)
def test_pieces_arrive_in_order_and_can_be_overwritten_at_once(device):
    got, places, memory = [], [], []

    def write(frames):
        time.sleep(0.002)
        got.append(frames.clone())
        places.append(frames.data_ptr())
        memory.append(weakref.ref(frames.untyped_storage()))

    sizes = [4, *(1 + value % 4 for value in range(30))]
    static = torch.empty(3, 4, 8, 6, dtype=torch.uint8, device=device)  # as a CUDA graph has
    pieces = [torch.randint(256, (n, 8, 6, 3), dtype=torch.uint8) for n in sizes]
    with BackgroundWriter(write, depth=3) as writer:
        for number, each in enumerate(pieces):
            planar = static[:, : len(each)].permute(1, 2, 3, 0)  # channels first in memory
            planar.copy_(each)
            with torch.inference_mode(number % 2 == 1):
                writer.put(planar)
    assert all(map(torch.equal, got, pieces))
    assert len(got) == len(pieces)
    assert len(set(places[-20:])) <= 3  # buffers that have grown are reused
    gc.collect()
    assert not any(each() is not None for each in memory)


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
        writer.wait(2)
        assert started[:2] == [0, 1]
        third.join(10)
    assert started == [0, 1, 2]


@pytest.mark.parametrize(
    ("error", "pieces"), [(OSError(28, "No space left", "a.mp4"), 1000), (SystemExit(3), 1)]
)
def test_an_error_of_the_thread_is_raised_by_the_next_put_or_at_the_end(error, pieces):
    calls, queued = [], threading.Event()

    def write(frames):
        queued.wait(10)
        calls.append(None)
        raise error

    def given():
        for value in range(pieces):
            if value == 2:  # two are queued
                queued.set()
            yield piece(value % 256)
        queued.set()

    with pytest.raises(type(error)) as caught:
        put_all(write, given())
    assert caught.value is error
    assert len(calls) == 1  # after an error nothing is written


def test_an_error_in_the_block_stops_the_thread_within_one_piece():
    """The error of the block is raised, not that of the thread, whose `write` ends."""
    written, begun, ended = [], threading.Event(), threading.Event()

    def write(frames):
        begun.set()
        ended.wait(10)
        written.append(None)
        raise OSError("thread")

    def raising():
        yield from map(piece, range(8))
        begun.wait(10)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        put_all(write, raising(), depth=8, cancel=ended.set)
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
    (thread,) = [each for each in threading.enumerate() if each.name == "fast-video-vae-writer"]
    begun.set()
    thread.join(10)
    assert not thread.is_alive()
    assert len(got) == 1


# A stream that a thread drops when the main thread has ended, after an interrupt in `put` and one
# at the end of the block.
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
def interrupt():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
signal.signal(signal.SIGINT, signal.default_int_handler)
for count in (10**6, 20):
    try:
        list(pieces(lambda _: time.sleep(0.02), count, interrupt))
    except KeyboardInterrupt:
        names = [thread.name for thread in threading.enumerate()]
        print("interrupted", names.count("fast-video-vae-writer"))
def drop():
    global stream
    time.sleep(0.2)
    stream = pieces(lambda each: print("written", each.sum().item()), 1000)
    next(stream)
threading.Thread(target=drop).start()
raise OSError
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_python_ends_with_a_writer_that_was_dropped_or_interrupted():
    command = script_command(SCRIPT)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["interrupted 0", "interrupted 0", "written 0"], done.stderr
    assert done.returncode == 1
