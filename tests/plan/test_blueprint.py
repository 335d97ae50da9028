"""What the join decides before any process starts."""

import pytest

from embodyrl.errors import ConfigError
from embodyrl.plan.blueprint import draw_blueprint
from embodyrl.plan.config import load_config


def blueprint(*overrides, training=False):
    return draw_blueprint(load_config("train", ["env=tabletop", *overrides]), training=training)


def test_only_cameras_that_the_policy_reads_are_rendered_and_stored():
    both = ("model=openvla_oft_tiny", "env.init_params.camera_names=[front,wrist]")
    one = blueprint(*both)
    assert one.env.cameras == ("front",)
    assert one.cfg.env.init_params.camera_names == ["front"]
    two = blueprint(*both, "model.num_images_in_input=2")
    assert two.env.cameras == ("front", "wrist")
    images = [next(f.shape for f in plan.layout.fields if f.name == "images") for plan in (one, two)]
    assert images == [(1, 56, 56, 3), (2, 56, 56, 3)]
    # An expert reads none; what it collects shows all of them.
    assert blueprint("model=scripted").env.cameras == ("front", "wrist")


@pytest.mark.parametrize("model", ["scripted", "random"])
def test_rl_refuses_policies_without_probabilities(model):
    with pytest.raises(ConfigError, match=rf"model '{model}' cannot be trained: it has no weights"):
        blueprint(f"model={model}", training=True)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["env=gym", "env.id=CartPole-v1"], "discrete actions; choose another model, for example model=mlp"),
        (["env=text/copy"], "text actions; choose another model, for example model=causal_lm_tiny"),
        (["env=text/copy", "model=cnn"], "choose another model, for example model=causal_lm_tiny"),
    ],
)
def test_a_model_of_another_kind_is_refused_with_one_that_fits(words, fix):
    with pytest.raises(ConfigError) as caught:
        draw_blueprint(load_config("train", words), training=True)
    assert fix in caught.value.problems[0]
    assert not any("unnorm_key" in line or "max_new_tokens" in line for line in caught.value.problems)
