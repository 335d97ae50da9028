"""Run the command as `python -m embodyrl_gpu_check`."""

import sys

from embodyrl_gpu_check.command import main

sys.exit(main())
