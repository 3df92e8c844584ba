import pytest
from hypothesis import given
from hypothesis import strategies as st

from taut.config import Config, read_config, to_toml


def test_settings_take_the_place_of_the_recipe(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text('[model]\nkind = "gpt2"\nnum_layers = 2\n[optim]\nlr = 1\n')
    config = read_config(recipe, ["model.num_layers=3", "train.out=some where", "optim.lr=2e-4"])
    assert (config.model.kind, config.model.num_layers) == ("gpt2", 3)
    assert (config.optim.lr, config.train.out) == (2e-4, "some where")
    assert isinstance(read_config(recipe).optim.lr, float)
    assert read_config(None) == Config()


@given(
    st.text(max_size=30).filter(lambda s: "\x00" not in s), st.integers(1, 10**9), st.floats(0, 1)
)
def test_what_is_written_is_read(name, steps, dropout):
    import tempfile
    from pathlib import Path

    name = "".join(c for c in name if c.isprintable())
    config = read_config(None, [f"train.steps={steps}", f"model.dropout={dropout!r}"])
    config = type(config)(
        data=type(config.data)(source=name), model=config.model, train=config.train
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c.toml")
        path.write_text(to_toml(config), encoding="utf-8")
        assert read_config(path) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.step=3"], "no setting 'train.step'; the nearest is train.steps"),
        (["modle.kind=bert"], "no setting 'modle.kind'; the nearest is model.kind"),
        (["train.steps"], "settings are section.key=value; got 'train.steps'"),
        (["train.steps=many"], "train.steps must be a int; got 'many', a str"),
        (["train.steps=2.5"], "train.steps must be a int; got 2.5, a float"),
        (["train.steps=0"], "train.steps must be at least 1; got 0"),
        (["model.kind=t5"], "model.kind must be one of bert, gpt2; got 't5'"),
        (["data.held_out=1.0"], r"data.held_out must lie in \(0, 1\); got 1.0"),
        (["data.longest=3"], "data.longest must be at least 8"),
    ],
)
def test_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        read_config(None, settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train", "is no TOML"),
        ("steps = 3", r"'steps' of .* must stand in a \[section\]"),
        ("[train]\nsteps = true", "train.steps must be a int; got True, a bool"),
    ],
)
def test_refuses_recipes(text, message, tmp_path):
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path / "r.toml")
    with pytest.raises(ValueError, match="there is no recipe"):
        read_config(tmp_path / "none.toml")


@given(st.lists(st.text(max_size=20), max_size=3))
def test_noise_is_refused_and_never_crashes(settings):
    if settings:
        with pytest.raises(ValueError, match=r"\Aconfig:"):
            read_config(None, settings)
