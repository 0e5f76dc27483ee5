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


def raising(pieces, begun, error):
    """Yield the pieces, then raise `error` when the thread has begun to write."""
    yield from pieces
    begun.wait(10)
    raise error


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert "fast-video-vae-writer" not in names


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_pieces_arrive_in_order_on_the_cpu(device, depth):
    got, places, memory = [], [], []

    def write(frames):
        got.append(frames.clone())
        places.append(frames.data_ptr())
        memory.append(weakref.ref(frames.untyped_storage()))

    sizes = [4, *(1 + value % 4 for value in range(40))]  # varying sizes
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


def test_python_ends_with_a_writer_that_was_dropped_midway():
    code = """
import torch
from fast_video_vae.vae.media import BackgroundWriter

def pieces():
    with BackgroundWriter(print) as writer:
        while True:
            writer.put(torch.zeros(1, 1, 1, 3, dtype=torch.uint8))
            yield

stream = pieces()
next(stream); raise OSError
"""
    done = subprocess.run(script_command(code), timeout=60, check=False, capture_output=True)
    assert done.returncode == 1
    assert b"tensor" in done.stdout


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
    begun.set()
    for thread in threading.enumerate():
        if thread.name == "fast-video-vae-writer":
            thread.join(10)
            assert not thread.is_alive()
    assert len(got) == 1


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


def test_an_error_of_a_copy_is_that_of_the_writer(monkeypatch):
    class Copied:
        def synchronize(self):
            raise RuntimeError("CUDA error: unspecified launch failure")

    written = []
    monkeypatch.setattr(BackgroundWriter, "_copy", lambda *_: Copied())
    with pytest.raises(RuntimeError, match="launch failure"):
        put_all(written.append, [piece(0), piece(1)])
    assert not written


def test_at_most_depth_pieces_are_queued():
    """While the thread writes one, the caller goes on."""
    gate = threading.Event()
    started = []

    def write(frames):
        started.append(int(frames[0, 0, 0, 0]))
        gate.wait(10)

    with BackgroundWriter(write, depth=2) as writer:
        writer.put(piece(0))
        writer.put(piece(1))
        third = threading.Thread(target=lambda: writer.put(piece(2)))
        third.start()
        third.join(0.4)
        assert third.is_alive()  # it waits until one of the two is written
        assert started == [0]
        gate.set()
        third.join(10)
        assert not third.is_alive()
    assert started == [0, 1, 2]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device", "a.mp4"), SystemExit(3)])
@pytest.mark.parametrize("pieces", [1, 1000])
def test_an_error_of_the_thread_is_raised_by_the_next_put_or_at_the_end(error, pieces):
    calls = []

    def write(frames):
        calls.append(None)
        raise error

    def slow():
        for value in range(pieces):
            yield piece(value % 256)
            time.sleep(0.001)

    with pytest.raises(type(error)) as caught:
        put_all(write, slow())
    assert caught.value is error
    assert len(calls) == 1  # after an error nothing is written


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x")])
def test_an_error_in_the_block_stops_the_thread_within_one_piece(error):
    """It comes before that of the thread."""
    written = []
    begun = threading.Event()

    def write(frames):
        begun.set()
        time.sleep(0.1)
        written.append(None)
        raise OSError("thread")

    with pytest.raises(type(error)):
        put_all(write, raising(map(piece, range(8)), begun, error), depth=8)
    assert len(written) == 1


def test_wrong_use_is_an_error():
    with pytest.raises(ValueError, match="depth is 0"):
        BackgroundWriter(print, 0)
    with pytest.raises(RuntimeError, match="within `with`"):
        BackgroundWriter(print).put(piece(0))
    with (
        BackgroundWriter(print) as writer,
        pytest.raises(ValueError, match=r"float32; expected torch\.uint8"),
    ):
        writer.put(torch.zeros(1, 8, 6, 3))


INTERRUPTED = """
import os, signal, threading, time, torch
from fast_video_vae.vae.media import BackgroundWriter
def interrupt(seconds):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
def run(pieces):
    with BackgroundWriter(lambda frames: time.sleep(0.05), depth=20) as writer:
        for value in range(pieces):
            if value == min(pieces, 100) - 1:
                interrupt(0.2)
            writer.put(torch.zeros(1, 8, 8, 3, dtype=torch.uint8))
signal.signal(signal.SIGINT, signal.default_int_handler)
for pieces in (10**6, 20):  # in `put`, and at the end of the block
    try:
        run(pieces)
    except KeyboardInterrupt:
        names = [thread.name for thread in threading.enumerate()]
        print("interrupted", names.count("fast-video-vae-writer"))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_an_interrupt_ends_any_wait():
    command = script_command(INTERRUPTED)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["interrupted", "0"] * 2, done.stderr
