"""Request fields for real-time chunking: the delay, and the actions executed during inference."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index

import numpy as np

from embodyrl.policies.remote.dialects import MessageError
from embodyrl.types import EnvSpec, FloatArray

PREFIX, DELAY = "rtc/prefix", "rtc/delay"
"""Request keys: the remaining actions [n, A] of the previous chunk in the environment's units, and the delay.

The delay is the number of remaining actions that are executed before the reply arrives."""


def read_committed(message: object, env: EnvSpec) -> FloatArray:
    """Return the state entries for the committed actions (`EnvSpec.committed`); zeros if the request has none.

    Raises:
        MessageError: a field has another shape, or the policy observes no committed actions.
    """
    held = message if isinstance(message, Mapping) else {}
    if PREFIX not in held and DELAY not in held:
        return np.zeros(env.state_dim - env.own_state_dim, np.float32)
    spec, dim = env.committed, env.action.dim
    if spec is None:
        raise MessageError(
            f"This policy does not use '{PREFIX}' and '{DELAY}'. Fix: omit the fields, or serve the policy with "
            "model.rtc and env.control.latency_steps."
        )
    try:
        rows, delay = np.asarray(held[PREFIX], np.float32), index(held[DELAY])
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(f"'{PREFIX}' must be an array [n, {dim}] and '{DELAY}' an integer; send both.") from error
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise MessageError(f"'{PREFIX}' has shape {list(rows.shape)}, expected [n, {dim}].")
    if not np.isfinite(rows).all():
        raise MessageError(f"'{PREFIX}' contains NaN or infinite numbers; send finite numbers.")
    if not 0 <= delay <= min(spec.delay, len(rows)):
        raise MessageError(
            f"'{DELAY}' is {delay}, but must be 0 to {min(spec.delay, len(rows))}: at most the length of '{PREFIX}' "
            f"and env.control.latency_steps={spec.delay}."
        )
    rows = rows[: spec.rows]
    columns = np.zeros(spec.width(dim), np.float32)
    columns[:2] = delay, len(rows)
    columns[2 : 2 + rows.size] = rows.ravel()
    return columns
