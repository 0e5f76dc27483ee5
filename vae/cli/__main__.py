"""`python -m fast_video_vae.vae.cli`: the command, where it is not installed."""

import sys

from .main import main

sys.exit(main())
