"""The pack in a running ComfyUI, over HTTP: its start, every node, interrupts."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fast_video_vae.tests.nodes import boot
from fast_video_vae.tests.nodes.checkout import PACK, find_comfyui
from fast_video_vae.tests.nodes.prompts import KINDS, Prompt
from fast_video_vae.tests.nodes.server import NODES, VAE_FILE, Workflow

pytestmark = pytest.mark.comfyui

# Memory that the allocator may keep after a decode, and map in steps of 64 MiB per thread.
SLACK_BYTES, MAPPED_SLACK_BYTES = 64 << 20, 384 << 20

# Imports the pack as ComfyUI does, after all that ComfyUI itself imports at its start.
IMPORT = """
import asyncio, json, sys, time
sys.path[:0] = sys.argv[1:3]
import boot
boot.stand_ins()
import comfy.options
from comfy.cli_args import args
args.cpu = True
import comfy_api.latest, comfy_config.config_parser, nodes
before, start = set(sys.modules), time.process_time()
assert asyncio.run(nodes.load_custom_node(sys.argv[3]))
print(json.dumps([time.process_time() - start, *set(sys.modules) - before]))
"""


def test_comfyui_starts_without_import_errors(server):
    assert "IMPORT FAILED" not in server.boot_log
    assert "Traceback" not in server.boot_log
    assert re.search(rf" seconds: .*{server.name}$", server.boot_log, re.MULTILINE)


def test_the_import_is_fast_and_loads_no_compiler(available, tmp_path):
    folders = [str(Path(boot.__file__).parent), str(find_comfyui()), str(PACK)]
    command = [sys.executable, "-c", IMPORT, *folders]
    for _ in range(3):  # one of three counts
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        seconds, *modules = json.loads(done.stdout.splitlines()[-1])
        if seconds < 0.1:
            break
    compilers = re.compile(r"triton|ninja|setuptools|torch\._inductor|torch\.utils\.cpp_extension")
    assert not [name for name in modules if compilers.match(name)]
    assert seconds < 0.1


def test_every_node_runs_next_to_comfyuis_own(expert_server):
    used = set()
    for kind in KINDS:
        prompt = Prompt()
        kind(prompt)
        used |= {each["class_type"] for each in prompt.values()}
        expert_server.run(prompt)
    assert {*NODES} <= used


def test_an_interrupt_ends_a_decode_and_frees_its_memory(server):
    def decode(frames):
        workflow = Workflow()
        inputs = {"samples": workflow.latent(256, frames), "vae": workflow.load(VAE_FILE)}
        workflow.add("PreviewAny", source=workflow.add("VAEDecode", **inputs))
        return workflow

    server.run(decode(9))
    before, log = server.memory(), server.log()
    error, seconds = server.interrupted(decode(1001))  # a minute and more, an IMAGE of 750 MiB
    assert error.interrupted
    assert seconds < 3
    assert re.search(r"s measured of .* s \(interrupted\)$", server.log()[len(log) :], re.MULTILINE)
    server.run(decode(5))
    after = server.memory()
    assert after.rss < before.rss + SLACK_BYTES
    assert after.vms < before.vms + MAPPED_SLACK_BYTES
