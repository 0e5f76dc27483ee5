"""`python -m fast_video_vae`, the command line, as `torchrun -m` starts it."""

import sys

from .vae.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
