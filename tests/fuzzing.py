"""Request bodies that servers must answer, made from a valid JSON request."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 2**63, -(2**70), 10**400, 1e308, -0.0, 1.5, "", "x", "1", "\ud800", "\0\x1b[2J"),
    *("a" * 5000, [], {}, [[]], [None], {"": None}, [1] * 500, {"role": "user", "content": "12="}),
)


def bodies(valid: Any, count: int, seed: int) -> Iterator[bytes]:
    """Yield `count` bodies: values of the request replaced, removed or added at random places, or bytes changed."""
    rng = random.Random(seed)
    for number in range(count):
        request = json.loads(json.dumps(valid))
        for _ in range(rng.randrange(1, 4)):
            request = _changed(request, rng)
        body = bytearray(json.dumps(request, ensure_ascii=bool(rng.randrange(2))).encode(errors="surrogatepass"))
        if number % 4 == 0 and body:
            for _ in range(rng.randrange(1, 4)):
                body[rng.randrange(len(body))] = rng.randrange(256)
        yield bytes(body)


def _changed(value: Any, rng: random.Random) -> Any:
    """Return the value with one change at a random depth."""
    if not value or not isinstance(value, dict | list) or rng.random() < 0.1:
        return deepcopy(rng.choice(_VALUES))
    place = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    chance = rng.random()
    if chance < 0.15:
        del value[place]
    elif chance < 0.3 and isinstance(value, dict):
        value[rng.choice(("stream", "n", "stop", "tools", "seed", "logprobs", "x"))] = deepcopy(rng.choice(_VALUES))
    else:
        value[place] = _changed(value[place], rng)
    return value
