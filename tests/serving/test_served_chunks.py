"""Fields of a request for real-time chunking."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from embodyrl.plan.config import load_config
from embodyrl.policies.remote.dialects import OPENPI, MessageError
from embodyrl.policies.settings import ModelSettings
from embodyrl.policies.untrained.policy import RANDOM, UntrainedPolicy
from embodyrl.serving.committed import read_committed
from embodyrl.serving.serve import describe
from embodyrl.serving.server import Answering
from embodyrl.types import ActionSpec, CommittedSpec, EnvSpec, InputSpec, Observation

PLAIN = EnvSpec(name="probe", action=ActionSpec(dim=2), tasks=("go",), states_per_task=(1,), state_dim=3)
ENV = replace(PLAIN, state_dim=3 + 2 + 4 * 2, committed=CommittedSpec(rows=4, delay=2))
SEEN = {"prompt": "go", "observation/state": [1.0, 2.0, 3.0]}


class Looking(UntrainedPolicy):
    """Policy that stores its observations."""

    seen: Observation

    def act(self, obs: Observation, **how: Any) -> Any:
        self.seen = obs
        return super().act(obs, **how)


def answering(env: EnvSpec) -> tuple[Looking, Answering]:
    spec = RANDOM.spec(ModelSettings(model_type="random", num_action_chunks=8), env, 0)
    policy = Looking(replace(spec, inputs=InputSpec(state=True)), env.action)
    return policy, Answering(policy, env, OPENPI)


def test_request_contains_delay_and_remaining_actions_of_the_previous_chunk():
    policy, answer = answering(ENV)
    rows = np.arange(6.0).reshape(3, 2)
    assert answer(SEEN | {"rtc/prefix": rows, "rtc/delay": 2}).shape == (8, 2)
    assert policy.seen.state.tolist() == [[1, 2, 3, 2, 3, 0, 1, 2, 3, 4, 5, 0, 0]]
    answer(SEEN | {"rtc/prefix": np.ones((6, 2)), "rtc/delay": 0})
    assert policy.seen.state.tolist() == [[1, 2, 3, 0, 4, *[1] * 8]], "longer rests are cut"
    assert answer.describe() | {"max_delay": 2, "horizon": 8} == answer.describe()


def test_requests_without_rtc_fields_get_independent_chunks():
    policy, answer = answering(ENV)
    answer(SEEN)
    assert policy.seen.state.tolist() == [[1, 2, 3, *[0] * 10]]
    policy, answer = answering(PLAIN)
    answer(SEEN)
    assert policy.seen.state.tolist() == [[1, 2, 3]]
    assert "max_delay" not in answer.describe()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rtc/prefix": np.zeros((3, 2))}, "send both"),
        ({"rtc/delay": 1}, "send both"),
        ({"rtc/prefix": np.zeros((3, 4)), "rtc/delay": 1}, r"shape \[3, 4\]"),
        ({"rtc/prefix": np.full((3, 2), np.nan), "rtc/delay": 1}, "finite numbers"),
        ({"rtc/prefix": np.zeros((3, 2)), "rtc/delay": 3}, "must be 0 to 2"),
        ({"rtc/prefix": np.zeros((1, 2)), "rtc/delay": 2}, "must be 0 to 1"),
        *(({"rtc/prefix": np.zeros((3, 2)), "rtc/delay": odd}, "an integer") for odd in ("soon", "2", 1.5, np.inf)),
    ],
)
def test_invalid_rtc_fields_are_refused(fields, said):
    with pytest.raises(MessageError, match=said):
        read_committed(SEEN | fields, ENV)


def test_a_policy_without_real_time_chunking_refuses_the_fields():
    with pytest.raises(MessageError, match=r"model\.rtc"):
        read_committed(SEEN | {"rtc/prefix": np.zeros((1, 2)), "rtc/delay": 0}, PLAIN)


def test_served_rtc_policy_accepts_all_remaining_actions():
    words = "env=tabletop model=flow_small model.num_action_chunks=4 model.rtc=guided env.control.latency_steps=2"
    env, spec = describe(load_config("serve", words.split()))
    assert env.committed == CommittedSpec(rows=2, delay=2)
    assert env.own_state_dim + 2 + 2 * 7 == env.state_dim
    plain, _ = describe(load_config("serve", words.split()[:3]))
    assert plain.committed is None
    assert spec.num_action_chunks == 4
