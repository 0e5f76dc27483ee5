"""Take the screenshots of README.md again: `python tests/tools/workflows/screenshots.py [NAME...]`.

Run it after a change of a node's inputs or outputs. It needs what `write.py` needs. The pictures
have two pixels per pixel of the page, and are as wide as README.md is shown, so that the text is
as large as in ComfyUI.
"""

import runpy
import tempfile
from pathlib import Path

_HERE = Path(__file__).resolve().parent
runpy.run_path(str(_HERE.parents[1] / "conftest.py"))  # binds the checkout to its import name

from fast_video_vae.tests.nodes.checkout import PACK  # noqa: E402
from fast_video_vae.tests.nodes.server import Server  # noqa: E402
from fast_video_vae.tests.tools.workflows import files  # noqa: E402
from fast_video_vae.tests.tools.workflows.command import chosen  # noqa: E402
from fast_video_vae.tests.tools.workflows.frontend import Frontend, open_browser  # noqa: E402
from fast_video_vae.tests.tools.workflows.furnish import furnish  # noqa: E402
from fast_video_vae.tests.tools.workflows.graph import FAST, Graph, Model  # noqa: E402

# A LoRA with a short name, so that the node shows all of it.
_LORA = Model(
    "Wan14B_RealismBoost.safetensors",
    "https://huggingface.co/vrgamedevgirl84/Wan14BT2VFusioniX/resolve/main/OtherLoRa's/"
    "Wan14B_RealismBoost.safetensors",
    "loras",
)

_SCALE = 2
_QUALITY = 86


def main() -> None:
    """Take the screenshots that were named, or all."""
    graphs = {graph.name: graph for graph in (first_run(), nodes())}
    names, folder = chosen(__doc__, graphs, PACK / "media")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        base = Path(scratch)
        furnish(base / "server", graphs.values())
        with Server(base / "server", threads=1) as server:
            context = open_browser(driver, base / "browser", device_scale_factor=_SCALE)
            frontend = Frontend(context.pages[0], server.url)
            for name in names:
                picture = frontend.picture(graphs[name])
                file = folder / f"{name}.jpg"
                picture.save(file, quality=_QUALITY, optimize=True, progressive=True)
            context.close()


def first_run() -> Graph:
    """The two ways to use the pack."""
    graph = Graph("first_run", gap=50)
    column = graph.column(852)
    instead = column.group("Instead of Load VAE", FAST, row=True)
    vae = instead.add("FastVAE_Load", vae_name=files.WAN21_VAE)
    decodes = [instead.add("VAEDecode", vae=vae)]
    after = column.group("After any other loader", FAST, row=True)
    stock = after.add("VAELoader", vae_name=files.WAN21_VAE)
    vae = after.add("FastVAE_Accelerate", vae=stock)
    decodes.append(after.add("VAEDecode", vae=vae))
    for decode in decodes:
        decode.width = 172
    return graph


def nodes() -> Graph:
    """A LoRA, the sampler, a quick look and the file."""
    graph = Graph("nodes", gap=48)
    column = graph.column(287)
    loras = column.group("A LoRA for each expert", FAST)
    stacks = {
        f"loras_{noise}": loras.add("FastVAE_LoraStack", lora_name=_LORA, strength=strength)
        for noise, strength in (("high", "1"), ("low", "0.6"))
    }
    words = {"positive": "a red fox in the snow", "negative": "blurred"}
    encoder = column.group("All prompts in one pass", FAST)
    text = encoder.add("FastVAE_TextEncode", stretch=True, **words)
    prompts = {name: text[name] for name in words}

    column = graph.column(280)
    sampling = column.group("Both experts, one sampler", FAST)
    latent = sampling.add("FastVAE_WanSampler", seed=1, **stacks, **prompts)["LATENT"]
    vae = column.group("The fast VAE", FAST).add("FastVAE_Load", vae_name=files.WAN21_VAE)

    column = graph.column(248)
    column.group("A quick look", FAST).add("FastVAE_PreviewLatent", samples=latent)
    result = column.group("Straight into a file", FAST)
    result.decode_video(0, "wan22", vae, latent)
    return graph


if __name__ == "__main__":
    main()
