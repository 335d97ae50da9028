from pathlib import Path

import pytest

from embodyrl.config import compose, paths


def test_checkout_contains_config_and_asset_folders():
    assert (compose.conf_dir() / "train.yaml").is_file()
    assert (paths.assets_dir() / "openvla_oft_tiny" / "config.json").is_file()


def test_installed_package_takes_precedence_over_the_checkout(tmp_path, monkeypatch):
    package = tmp_path / "site" / "embodyrl"
    (package / "conf").mkdir(parents=True)
    monkeypatch.setattr(compose, "PACKAGE", package)
    assert compose.conf_dir() == package.parent / "conf", "a conf folder without train.yaml is not ours"
    (package / "conf" / "train.yaml").write_text("")
    assert compose.conf_dir() == package / "conf"


@pytest.mark.parametrize("path", ["assets/openvla_oft_tiny", "assets/a/b"])
def test_assets_resolve_from_any_working_directory(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert paths.resolve_asset(path) == paths.assets_dir() / path.removeprefix("assets/")


def test_paths_outside_the_asset_folders_are_unchanged():
    assert paths.resolve_asset("models/x") == Path("models/x")
    assert paths.resolve_asset("~/x") == Path.home() / "x"
