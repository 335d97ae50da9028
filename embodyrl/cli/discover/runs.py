"""Description of a run, from the files in its folder."""

import contextlib
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from embodyrl.errors import ConfigError
from embodyrl.files import natural_sort_key


def describe_run(folder: Path) -> dict[str, Any]:
    """Return the id, path, local start time, last step, success rate (0 to 1) and mean return of a run."""
    from embodyrl.monitor.history import METRICS_FILE, TABLE_FILE, read_newest_values, read_table

    step, success, mean_return = read_newest_values(folder / METRICS_FILE, ("step", "eval/success_once", "eval/return"))
    if step is None and (tables := sorted(folder.glob(f"eval/step_*/{TABLE_FILE}"), key=natural_sort_key)):
        with contextlib.suppress(ConfigError, KeyError, TypeError, ValueError):  # a damaged table is ignored
            overall = read_table(tables[-1].parent)["overall"]
            success, mean_return = overall["success_once"], overall["mean_return"]
            step = int(tables[-1].parent.name.removeprefix("step_"))
    # Values of a wrong type, NaN and infinity are left out.
    success, mean_return = (
        value if type(value) in (int, float) and abs(value) <= sys.float_info.max else None
        for value in (success, mean_return)
    )
    started = datetime.fromtimestamp((folder / "config.yaml").stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    names = {"id": folder.name, "path": str(folder), "started": started}
    return names | {"step": step, "success": success, "return": mean_return}
