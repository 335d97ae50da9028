"""Config section `reward` of text tasks; simulators have another settings class."""

from embodyrl.config.sections import Section
from embodyrl.text.rewards.settings import JudgeSettings

SECTION = Section(
    kinds=(JudgeSettings,),
    choose=lambda chosen: JudgeSettings if chosen.reads_rows else None,
    needs={
        "never: a conversation has at most env.max_turns replies": "env.train.max_episode_steps "
        "env.eval.max_episode_steps env.train.ignore_terminations env.eval.ignore_terminations",
        "never: a conversation has no images": "video",
        "algorithm.sampling_params.max_new_tokens=null": "model.num_action_chunks",
    },
)
