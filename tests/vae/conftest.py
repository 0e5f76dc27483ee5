"""Fixtures for the tests of files and the command line."""

from contextlib import contextmanager

import pytest
from safetensors.torch import save_file

from fast_video_vae.kernels import errors, submit
from fast_video_vae.kernels.ready import facts
from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.vae.families import all_layers_in_int8
from fast_video_vae.vae.layers import conv as conv_module
from fast_video_vae.vae.planning import plan
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
def plans_anew(monkeypatch):
    """No network keeps estimates for plans, because the test changes what they depend on."""
    monkeypatch.setattr(plan, "kept_settings", plan.Settings)


@pytest.fixture
def int8(monkeypatch, tmp_path):
    """Int8 pays on this CPU, choices are kept in a new file, and the log starts anew."""
    found = facts.Facts(tmp_path / "facts.json", {})
    monkeypatch.setattr(int8_layers, "facts_of", lambda device: found)
    monkeypatch.setattr(int8_vae, "int8_lacks", lambda device, dtype: "")
    monkeypatch.setattr(errors, "_logged", set())
    yield found
    submit("the end", lambda: None).wait(60)  # no choice is made within the next test


@pytest.fixture
def all_int8(int8, monkeypatch, tmp_path):
    """All convolutions after a norm are chosen, without a measurement."""
    all_layers_in_int8(monkeypatch, tmp_path)


@pytest.fixture
def products(monkeypatch):
    """The calls of the convolution of codes; a plan runs it on `meta` too."""
    calls, real = [], conv_module.int8_conv3d

    def counted(*arguments, **options):
        if not arguments[0].is_meta:
            calls.append(arguments[0].shape)
        return real(*arguments, **options)

    monkeypatch.setattr(conv_module, "int8_conv3d", counted)
    return calls
