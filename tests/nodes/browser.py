"""A browser with ComfyUI's frontend: how it starts, and what its page is asked to evaluate."""

import os
import shutil
from pathlib import Path
from typing import Any

BROWSERS = ["chromium", "chromium-browser", "google-chrome"]

READY = "window.app?.graph && Object.keys(LiteGraph.registered_node_types).length > 100"

SET = """async settings => {
  for (const [key, value] of Object.entries(settings))
    await app.extensionManager.setting.set(key, value);
}"""

LOAD = "async workflow => { await app.loadGraphData(workflow) }"
PROMPT = "async () => (await app.graphToPrompt()).output"
QUEUE = "async () => { await app.queuePrompt(0, 1) }"

# No sandbox: it does not start for root. The rest keeps the browser off the network.
_FLAGS = (
    "--no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


def find_browser() -> str | None:
    """Return the browser of this machine: `$CHROMIUM`, or one of `BROWSERS`."""
    names = [os.environ.get("CHROMIUM"), *BROWSERS]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def open_browser(driver: Any, folder: Path) -> Any:
    """Open the browser by Playwright, with its profile in `folder`; return its context."""
    return driver.chromium.launch_persistent_context(
        folder, executable_path=find_browser(), args=_FLAGS.split()
    )
