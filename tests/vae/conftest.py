"""Fixtures for the tests of files and the command line."""

from contextlib import contextmanager

import pytest
from safetensors.torch import save_file

from fast_video_vae.kernels import errors
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.vae.layers import conv as conv_module
from fast_video_vae.vae.layers.inputs.coding import name_convolutions
from fast_video_vae.vae.streaming.int8 import layers as int8_layers
from fast_video_vae.vae.streaming.int8 import settings as int8_vae


@pytest.fixture
def limited_files():
    """Limit the size of files, which simulates a full disk.

    Python ignores the signal that comes with it, so that the write fails as on a full disk.
    """
    resource = pytest.importorskip("resource", reason="limits on files need a POSIX system")

    @contextmanager
    def limited(limit_bytes):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture
def run(capsys):
    """Run the command line in this process: code, lines of stdout, lines of stderr."""
    from fast_video_vae.vae.cli.main import main

    def call(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return call


@pytest.fixture
def done(run, vae_path):
    """Run a command with the narrow VAE in float32, which has to succeed: lines of stdout."""

    def call(*arguments):
        code, lines, errors = run(*arguments, "--vae", vae_path, "--dtype", "fp32")
        assert code == 0, errors
        return lines

    return call


@pytest.fixture(scope="session")
def vae_path(tmp_path_factory):
    """A file of a narrow Wan 2.1 VAE."""
    path = tmp_path_factory.mktemp("vae") / "vae.safetensors"
    save_file(random_state_dict(8), path)
    return path


@pytest.fixture
def int8(monkeypatch):
    """Int8 pays on this CPU, and the log starts anew."""
    monkeypatch.setattr(int8_vae, "int8_lacks", lambda device, dtype: "")
    monkeypatch.setattr(errors, "_logged", set())


@pytest.fixture
def all_int8(int8, monkeypatch):
    """All convolutions after a norm are chosen, without a measurement."""

    def every(network, x, dtype):
        return int8_layers.Int8Layers(frozenset(name_convolutions(network)), ())

    monkeypatch.setattr(int8_layers, "choose", every)


@pytest.fixture
def products(monkeypatch):
    """The calls of the convolution of codes."""
    calls, real = [], conv_module.int8_conv3d

    def counted(*arguments, **options):
        calls.append(arguments[0].shape)
        return real(*arguments, **options)

    monkeypatch.setattr(conv_module, "int8_conv3d", counted)
    return calls
