"""Run the command as `python -m embodyrl_migrate`."""

import sys

from embodyrl_migrate.command import main

sys.exit(main())
