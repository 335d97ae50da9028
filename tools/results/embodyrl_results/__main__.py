"""Run the command as `python -m embodyrl_results`."""

import sys

from embodyrl_results.command import main

sys.exit(main())
